// Philox against the published vectors, and what dropout makes of it.
#include "semantics/dropout.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <set>

using namespace regard;

namespace {

constexpr bool same(const Philox& a, const Philox& b) {
  for (int w = 0; w < 4; ++w) {
    if (a.word[w] != b.word[w]) return false;
  }
  return true;
}

// Random123's kat_vectors, philox4x32 with 7 and with 10 rounds.
static_assert(same(philox<7>({{0, 0, 0, 0}}, 0, 0),
                   {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}));
static_assert(same(philox<7>({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff,
                             0xffffffff),
                   {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}));
static_assert(same(philox<10>({{0, 0, 0, 0}}, 0, 0),
                   {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
static_assert(same(philox<10>({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff,
                              0xffffffff),
                   {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
static_assert(same(philox<10>({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822,
                              0x299f31d0),
                   {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));

constexpr int64 kRows = 64, kColumns = 4096;
constexpr double kCount = double(kRows) * kColumns;

}  // namespace

TEST_SUITE_BEGIN("semantics");

TEST_CASE("Philox of other machines") {
  CHECK(same(philox<10>({{0, 0, 0, 0}}, 0, 0), {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
}

TEST_CASE("every column has a call and a slot of its own") {
  std::set<std::pair<uint32, int>> used;
  for (int64 j = 0; j < 4096; ++j) {
    const int slot = dropout_slot(j);
    CHECK((slot >= 0 && slot < 8));
    CHECK(dropout_call(j) < 4096 / 8);  // with 4096 distinct pairs: no number is wasted
    used.insert({dropout_call(j), slot});
  }
  CHECK(used.size() == 4096);
  CHECK(dropout_call(int64(1) << 30) == uint32(1) << 27);
}

TEST_CASE("the realised probability is the nearest multiple of 1/65536 below 1") {
  for (int step = 0; step < 65536; ++step) {
    const double p = double(step) / 65536;
    if (realised_probability(dropout_params(p, 1, 2)) != p) FAIL_CHECK("p = " << p);
  }
  CHECK(realised_probability(dropout_params(0.1, 1, 2)) == 6554.0 / 65536);
  CHECK(realised_probability(dropout_params(0.999999, 1, 2)) == 65535.0 / 65536);
  CHECK(realised_probability(dropout_params(1e-9, 1, 2)) == 0);
  CHECK(keep_scale(dropout_params(0.5, 1, 2)) == 2);
  CHECK(keep_scale(dropout_params(0, 1, 2)) == 1);
}

TEST_CASE("the share kept is 1 - p, in rows, columns and neighbours") {
  for (double p : {0.02, 0.1, 0.5, 0.9}) {
    const DropoutParams params = dropout_params(p, 1234, 56);
    double all = 0, next = 0, below = 0;
    for (int64 i = 0; i < kRows; ++i) {
      for (int64 j = 0; j < kColumns; ++j) {
        const bool here = keep(params, 1, 2, i, j);
        all += here;
        next += here && keep(params, 1, 2, i, j + 1);
        below += here && keep(params, 1, 2, i + 1, j);
      }
    }
    const double share = 1 - realised_probability(params);
    // Five standard deviations of a fair coin's count.
    const auto room = [](double q) { return 5 * std::sqrt(kCount * q * (1 - q)); };
    CHECK(std::fabs(all - kCount * share) < room(share));
    CHECK(std::fabs(next - kCount * share * share) < 2 * room(share * share));
    CHECK(std::fabs(below - kCount * share * share) < 2 * room(share * share));
  }
}

TEST_CASE("p = 0 keeps everything") {
  const DropoutParams params = dropout_params(0, 3, 4);
  int64 dropped = 0;
  for (int64 j = 0; j < 10000; ++j) dropped += !keep(params, 0, 0, 0, j);
  CHECK(dropped == 0);
}

TEST_CASE("seed, offset, batch, head and row each give another mask") {
  const auto pattern = [](uint64 seed, uint64 offset, int64 b, int64 h, int64 i) {
    const DropoutParams params = dropout_params(0.5, seed, offset);
    uint64 bits = 0;
    for (int64 j = 0; j < 64; ++j) bits |= uint64(keep(params, b, h, i, j)) << j;
    return bits;
  };
  const std::set<uint64> patterns{pattern(1, 1, 0, 0, 0),
                                  pattern(2, 1, 0, 0, 0),
                                  pattern(uint64(1) << 32 | 1, 1, 0, 0, 0),
                                  pattern(1, 2, 0, 0, 0),
                                  pattern(1, uint64(1) << 32 | 1, 0, 0, 0),
                                  pattern(1, 1, 1, 0, 0),
                                  pattern(1, 1, 0, 1, 0),
                                  pattern(1, 1, 0, 0, 1),
                                  pattern(1, 0, 0, 0, 0)};
  CHECK(patterns.size() == 9);
  CHECK(pattern(1, 1, 0, 0, 0) == pattern(1, 1, 0, 0, 0));
}

TEST_SUITE_END();
