// Few query rows for each key head, which have kernels of their own, against float64.
#include <doctest/doctest.h>

#include <iterator>
#include <string>

#include "tests/cpu/case.hpp"
#include "tests/cpu/forced.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

// Whole strips of every instruction set, and others, of which some are whole vectors.
constexpr std::int64_t kSizesOfFew[] = {1, 7, 16, 32, 48, 64, 80, 128, 160, 257};
constexpr std::int64_t kKeysOfFew[] = {1, 2, 15, 31, 32, 33, 64, 100, 129, 300};
// Those of the forward kernel and one more, and what a vector of the widest instruction set has.
constexpr std::int64_t kRowsOfFew[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17};

void check_few(const Settings& s) {
  const std::string wrong = disagreement(s, {.threads = 2});
  if (!wrong.empty()) FAIL_CHECK(wrong);
}

}  // namespace

TEST_SUITE_BEGIN("kernels");

TEST_CASE("all numbers of rows and head sizes, in every type") {
  forced_backend();
  std::uint64_t seed = 8000;
  for (std::int64_t rows : kRowsOfFew) {
    for (std::int64_t dim : kSizesOfFew) {
      for (Type type : tested_types()) {
        ++seed;
        const std::int64_t group = seed % 2 == 0 ? rows : 1;
        check_few({.type = type,
                   .heads_q = 2 * group,
                   .heads_kv = 2,
                   .len_q = rows / group,
                   .len_k = kKeysOfFew[seed % std::size(kKeysOfFew)],
                   .dim = dim,
                   .dim_v = kSizesOfFew[seed * 7 % std::size(kSizesOfFew)],
                   .gaps = seed % 3 == 0,
                   .seed = seed});
      }
    }
  }
}

TEST_CASE("every feature by itself and in pairs") {
  forced_backend();
  std::uint64_t seed = 9000;
  for (int first = 0; first < kFeatureCount; ++first) {
    for (int second = first; second < kFeatureCount; ++second) {
      for (Type type : tested_types()) {
        const std::int64_t group = 1 + std::int64_t(++seed % 4);
        Settings s{.type = type,
                   .batch = 2,
                   .heads_q = group,
                   .len_q = 1 + std::int64_t(seed / 4 % 2),
                   .len_k = 70,
                   .dim = 32,
                   .dim_v = 64,
                   .seed = seed};
        check_few(with_features(s, 1u << first | 1u << second));
      }
    }
  }
}

// A call with few rows next to many, and one with the few alone.
TEST_CASE("sequences of many rows in the batch change no bit of one of few") {
  forced_backend();
  for (Type type : tested_types()) {
    Settings s{.type = type,
               .batch = 2,
               .heads_q = 4,
               .heads_kv = 1,
               .len_q = 40,
               .len_k = 70,
               .dim = 32,
               .dim_v = 32,
               .seqused = true};
    const Case many(s);
    for (std::int64_t b = 0; b < 2; ++b) {
      many.used_q.set(b, b == 0 ? 2 : 40);
      many.used_k.set(b, 70);
    }
    many.forward({.threads = 2});
    many.backward({.threads = 2});
    s.batch = 1;
    const Case few(s);
    few.used_q.set(0, 2);
    few.used_k.set(0, 70);
    few.forward({.threads = 1});
    few.backward({.threads = 1});
    for (const auto result : {&Case::out, &Case::dq, &Case::dk, &Case::dv}) {
      const std::string bytes((few.*result).bytes());
      CHECK((many.*result).bytes().substr(0, bytes.size()) == bytes);
    }
  }
}

TEST_CASE("kernels for bf16 alone have the bits of f32's") {
  const std::string forced = forced_backend();
  if (forced != "cpu:avx512bf16" && forced != "cpu:amx") return;
  for (std::int64_t len_k : {90, 8200}) {
    const Settings s{.type = bf16,
                     .heads_q = 8,
                     .heads_kv = 2,
                     .len_q = 1,
                     .len_k = len_k,
                     .dim = 64,
                     .dim_v = 64};
    const Case pairs(s), wide(s);
    pairs.forward({.backend = forced});
    wide.forward({.backend = "cpu:avx512"});
    CHECK(pairs.result_bytes() == wide.result_bytes());
  }
}

// dq = sum of P (dP - delta) k, where what the keys share cancels if P sums to 1.
TEST_CASE("dq of keys that share a large part is as exact as that of more rows") {
  forced_backend();
  double more = 0;
  for (std::int64_t len_q : {40, 8, 5, 1}) {
    const Settings s{.len_q = len_q, .len_k = 400, .dim = 64, .dim_v = 64, .scale = 1};
    const Case got(s), want(s, Case::Values::exact);
    for (const Case* c : {&got, &want}) {
      for (std::int64_t n = 0; n < c->q.count(); ++n) c->q.set(n, 0.5 + c->q.get(n) / 64);
      for (std::int64_t n = 0; n < c->k.count(); ++n) c->k.set(n, rounded(f32, 100 + c->k.get(n)));
    }
    got.both({.threads = 2});
    want.both({.backend = "reference"});
    const double error = row_error(got.dq, want.dq);
    if (len_q == 40) more = error;
    CAPTURE(len_q);
    CHECK(error < 2 * more);
  }
}

TEST_SUITE_END();
