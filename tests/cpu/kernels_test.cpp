// The kernels against float64 around every tile edge, with features, types and layouts in turn.
#include <doctest/doctest.h>

#include <cstring>

#include "tests/cpu/case.hpp"
#include "tests/cpu/forced.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

constexpr std::int64_t kLengths[] = {1,  2,  7,  15,  16,  17,  31,  32,  33,
                                     63, 64, 65, 127, 128, 129, 255, 256, 257};
constexpr std::int64_t kHeadSizes[] = {1,  2,  3,  15, 16, 17,  31,  32,
                                       33, 64, 65, 80, 96, 128, 257, 300};
constexpr Type kTypes[] = {f64, f32, f16, bf16};

// Draws what the grid leaves open: type, heads and features.
Settings drawn(std::uint64_t seed) {
  const auto draw = [&](std::uint64_t stream, double below) {
    return std::int64_t(uniform(seed, stream, 0) * below);
  };
  Settings s;
  s.seed = seed;
  s.type = tested_types()[seed % tested_types().size()];
  s.batch = 1 + draw(11, 2);
  s.heads_kv = 1 + draw(12, 2);
  s.heads_q = s.heads_kv * (1 + draw(13, 3));
  // Some features, not most of them: each alone and in company.
  return with_features(s, unsigned(draw(14, 1 << kFeatureCount) & draw(15, 1 << kFeatureCount)));
}

void refine(Settings& s) {
  const auto draw = [&](std::uint64_t stream, double below) {
    return std::int64_t(uniform(s.seed, stream, 0) * below);
  };
  if (s.bias != Type::none) {
    s.bias = kTypes[draw(16, 4)];
    for (int axis = 0; axis < 4; ++axis) s.bias_broadcast[axis] = draw(17 + axis, 2) == 1;
  }
  if (s.window.left >= 0) s.window = {draw(22, 40) - 1, draw(23, 40) - 1};
  if (s.causal != Causal::none && draw(24, 2) == 1) s.causal = Causal::top_left;
  s.wide_results = draw(25, 4) == 0;
  s.accumulate = draw(26, 4) == 0;
  s.packed = !s.seqused && s.bias == Type::none && !s.mask && draw(27, 4) == 0;
}

void check(Settings s) {
  refine(s);
  const std::string wrong = disagreement(s, {.threads = 2});
  if (!wrong.empty()) FAIL_CHECK(wrong);
}

}  // namespace

TEST_SUITE_BEGIN("kernels");

TEST_CASE("the forced instruction set is the one that runs") {
  const std::string forced = forced_backend();
  if (forced.empty()) return;
  const Case c(Settings{.type = bf16});
  CHECK(explain(c.attention(), Pass::forward).backend == forced);
  CHECK(explain(c.attention(), Pass::forward).kernel.find(forced.substr(4)) != std::string::npos);
}

TEST_CASE("all lengths of queries against all lengths of keys") {
  forced_backend();
  std::uint64_t seed = 1000;
  for (std::int64_t len_q : kLengths) {
    for (std::int64_t len_k : kLengths) {
      Settings s = drawn(++seed);
      s.len_q = len_q;
      s.len_k = len_k;
      s.dim = 3;
      s.dim_v = 2;
      if (len_q * len_k > 4000) s.batch = s.heads_kv = 1, s.heads_q = 1 + (seed % 3 == 0);
      check(s);
    }
  }
}

TEST_CASE("all head sizes against all head sizes of values") {
  forced_backend();
  std::uint64_t seed = 2000;
  for (std::int64_t dim : kHeadSizes) {
    for (std::int64_t dim_v : kHeadSizes) {
      Settings s = drawn(++seed);
      s.len_q = 19;
      s.len_k = 35;
      s.dim = dim;
      s.dim_v = dim_v;
      if (dim + dim_v > 200) s.batch = s.heads_kv = s.heads_q = 1;
      check(s);
    }
  }
}

TEST_CASE("every feature by itself and in pairs, in every type") {
  forced_backend();
  std::uint64_t seed = 3000;
  for (int first = 0; first < kFeatureCount; ++first) {
    for (int second = first; second < kFeatureCount; ++second) {
      for (Type type : tested_types()) {
        Settings s{.type = type,
                   .batch = 2,
                   .heads_q = 2,
                   .heads_kv = 1,
                   .len_q = 37,
                   .len_k = 70,
                   .dim = 9,
                   .dim_v = 5,
                   .seed = ++seed};
        check(with_features(s, 1u << first | 1u << second));
        if (!multiplies_by_terms(type)) continue;
        s.batch = 1;
        s.len_q = 410;
        s.len_k = 390;
        check(with_features(s, 1u << first | 1u << second));
      }
    }
  }
}

TEST_CASE("several chunks of keys, split keys, and blocks beyond the last") {
  forced_backend();
  std::uint64_t seed = 4000;
  for (Type type : tested_types()) {
    Settings s{.type = type,
               .heads_q = 2,
               .heads_kv = 1,
               .len_q = 300,
               .len_k = 530,
               .dim = 16,
               .dim_v = 8};
    for (unsigned features : {0x0u, 0x1u, 0x2u, 0x88u, 0x31u}) {
      s.seed = ++seed;
      check(with_features(s, features));
    }
    s = {
        .type = type, .heads_q = 2, .heads_kv = 1, .len_q = 2, .len_k = 8200, .dim = 4, .dim_v = 4};
    for (unsigned features : {0x0u, 0x41u, 0x82u, 0x10u}) {
      s.seed = ++seed;
      check(with_features(s, features));
    }
    // Longer chunks of keys, and higher blocks of rows.
    for (const auto& [rows, keys] : {std::pair{70, 2300}, std::pair{2100, 90}}) {
      s.len_q = rows, s.len_k = keys;
      for (unsigned features : {0x0u, 0x1u, 0x2eu, 0x298u, 0xc51u}) {
        s.seed = ++seed;
        check(with_features(s, features));
      }
    }
    s.len_q = 2;
    // A window that leaves out the first chunk of the split, or all chunks except the last.
    s.causal = Causal::bottom_right;
    s.len_k = 13'000;
    s.sink = true;
    for (std::int64_t left : {7'000, 100}) {
      s.window.left = left;
      for (bool packed : {false, true}) {
        s.packed = packed;
        s.seed = ++seed;
        check(s);
      }
    }
  }
}

TEST_CASE("nothing is read behind a workspace of the size that is asked for") {
  forced_backend();
  for (Type type : tested_types()) {
    for (const auto& [dim, dim_v] : {std::pair{64, 64}, {320, 320}, {64, 512}, {8, 1500}}) {
      const Settings s{.type = type, .len_q = 40, .len_k = 64, .dim = dim, .dim_v = dim_v};
      CAPTURE(to_string(s));
      const Case got(s), want(s, Case::Values::exact);
      const auto run_with = [&](std::size_t size, auto call) {
        const Guarded memory(size);
        std::memset(memory.data(), 0xff, size);  // NaN
        call(Run{.workspace = {memory.data(), size}, .threads = 1});
      };
      const Attention a = got.attention();
      run_with(workspace(a, got.outputs(), {.threads = 1}), [&](const Run& r) { got.forward(r); });
      run_with(workspace(a, got.inputs(), got.gradients(), {.threads = 1}),
               [&](const Run& run) { got.backward(run); });
      want.both({.backend = "reference"});
      CHECK(row_error(got.out, want.out) < tolerance(type));
      CHECK(row_error(got.dv, want.dv) < tolerance(type));
    }
  }
}

// Maxima rise again and again, after sums of small weights; some kernels read whole rows of keys as
// they lie, and pack values of long sequences in several goes.
TEST_CASE("scores that rise from block to block, in few and in many blocks") {
  forced_backend();
  for (Type type : tested_types()) {
    for (Settings s : {Settings{.len_q = 70, .len_k = 512, .dim = 64, .dim_v = 96},
                       Settings{.len_q = 70, .len_k = 1536, .dim = 200, .dim_v = 200}}) {
      s.type = type;
      for (const Causal causal : {Causal::none, Causal::bottom_right}) {
        s.causal = causal;
        CAPTURE(to_string(s));
        const Case got(s), want(s, Case::Values::exact);
        for (std::int64_t n = 0; n < got.k.count(); ++n) {
          got.k.set(n, got.k.get(n) * (1 + 20 * double(n) / double(got.k.count())));
          want.k.set(n, got.k.get(n));
        }
        got.forward({.threads = 2});
        want.forward({.backend = "reference"});
        // Large scores carry their own rounding into the weights.
        CHECK(row_error(got.out, want.out) < 4 * tolerance(type));
        CHECK(row_error(got.lse, want.lse) < 4 * tolerance(type));
      }
    }
  }
}

TEST_CASE("masks and biases that hide and show whole tiles") {
  forced_backend();
  std::uint64_t seed = 5000;
  for (std::int64_t side : {32, 50, 128}) {
    for (unsigned features : {0x10u, 0x8u, 0x99u}) {
      Settings s{.heads_q = 2,
                 .heads_kv = 1,
                 .len_q = 200,
                 .len_k = 330,
                 .dim = 16,
                 .dim_v = 8,
                 .mask_tile = side,
                 .seed = ++seed};
      s.type = tested_types()[seed % tested_types().size()];
      s.mask_broadcast[1] = seed % 2 == 0;
      s.mask_reversed = seed % 5 == 0;
      check(with_features(s, features));
    }
  }
  // Several blocks in a chunk of keys, and hidden ones among them.
  for (Type type : tested_types()) {
    const Settings s{.type = type,
                     .len_q = 140,
                     .len_k = 2400,
                     .dim = 16,
                     .dim_v = 8,
                     .mask_tile = 128,
                     .seed = ++seed};
    check(with_features(s, 0x10u));
  }
}

TEST_SUITE_END();
