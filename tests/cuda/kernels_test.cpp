// The GPU's kernels on the emulated machine against float64: features one by one and in company,
// lengths around tile edges, head sizes, chips, tilings and orders of warps.
#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "tests/cpu/case.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

constexpr Type kTypes[] = {f16, bf16, f32, f64};
constexpr const char* kOrders[] = {"forward", "backward", "mixed"};

std::int64_t draw(std::uint64_t seed, std::uint64_t stream, double below) {
  return std::int64_t(uniform(seed, stream, 0) * below);
}

// A kernel family, a chip that has it, and an order.
std::string drawn_backend(const Settings& s) {
  const bool mma = s.type != f64 && draw(s.seed, 40, 3) != 0;
  std::string name = mma ? "emulated:mma" : "emulated:simt";
  constexpr const char* chips[] = {"sm_86", "sm_80", "sm_90", "sm_75"};
  const bool any = s.type == f16 || !mma;
  name += std::string("+") + chips[draw(s.seed, 41, any ? 4 : 3)];
  return name + "+" + kOrders[draw(s.seed, 42, 3)] + "+" + std::to_string(s.seed);
}

void refine(Settings& s) {
  if (s.bias != Type::none) {
    s.bias = kTypes[draw(s.seed, 16, 4)];
    for (int axis = 0; axis < 4; ++axis) s.bias_broadcast[axis] = draw(s.seed, 17 + axis, 2) == 1;
  }
  if (s.mask) {
    for (int axis = 0; axis < 4; ++axis) s.mask_broadcast[axis] = draw(s.seed, 43 + axis, 3) == 1;
    s.mask_reversed = draw(s.seed, 47, 4) == 0;
  }
  if (s.window.left >= 0) s.window = {draw(s.seed, 22, 40) - 1, draw(s.seed, 23, 40) - 1};
  if (s.causal != Causal::none && draw(s.seed, 24, 2) == 1) s.causal = Causal::top_left;
  s.wide_results = draw(s.seed, 25, 4) == 0;
  s.accumulate = draw(s.seed, 26, 4) == 0;
  s.packed = !s.seqused && s.bias == Type::none && !s.mask && draw(s.seed, 27, 4) == 0;
  s.gaps = draw(s.seed, 28, 3) == 0;
}

void check(const Settings& s, const std::string& backend) {
  CAPTURE(backend);
  std::string wrong;
  try {
    wrong = disagreement(s, {.backend = backend});
  } catch (const std::exception& error) {
    wrong = error.what() + (" (" + to_string(s) + ")");
  }
  if (!wrong.empty()) FAIL_CHECK(wrong);
}

}  // namespace

TEST_SUITE_BEGIN("emulated");

TEST_CASE("every feature by itself") {
  std::uint64_t seed = 100;
  for (int feature = 0; feature < kFeatureCount; ++feature) {
    Settings s{.heads_q = 2, .heads_kv = 1, .len_q = 70, .len_k = 83, .seed = ++seed};
    s.dim = 16;
    s.dim_v = 24;
    s = with_features(s, 1u << feature);
    s.type = kTypes[feature % 4];
    check(s, "emulated:simt");
    s.type = kTypes[feature % 3];
    check(s, "emulated:mma");
  }
}

TEST_CASE("features in company, lengths around tile edges") {
  constexpr std::int64_t lengths[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 200};
  for (std::uint64_t seed = 1000; seed < 1016; ++seed) {
    Settings s{.seed = seed};
    s.type = kTypes[draw(seed, 10, 4)];
    s.batch = 1 + draw(seed, 11, 2);
    s.heads_kv = 1 + draw(seed, 12, 2);
    s.heads_q = s.heads_kv * (1 + draw(seed, 13, 3));
    s.len_q = lengths[draw(seed, 30, std::size(lengths))];
    s.len_k = lengths[draw(seed, 31, std::size(lengths))];
    s.dim = 1 + draw(seed, 32, 40);
    s.dim_v = draw(seed, 33, 2) == 0 ? s.dim : 1 + draw(seed, 34, 40);
    s = with_features(
        s, unsigned(draw(seed, 14, 1 << kFeatureCount) & draw(seed, 15, 1 << kFeatureCount)));
    refine(s);
    check(s, drawn_backend(s));
  }
}

TEST_CASE("head sizes") {
  constexpr std::int64_t sizes[] = {1, 8, 33, 64, 96, 128, 192, 256, 320, 512};
  std::uint64_t seed = 2000;
  for (const std::int64_t dim : sizes) {
    for (const std::int64_t dim_v : {dim, std::int64_t(48)}) {
      Settings s{.len_q = 34, .len_k = 70, .dim = dim, .dim_v = dim_v, .seed = ++seed};
      s.type = kTypes[draw(seed, 10, 3)];
      s.causal = draw(seed, 35, 2) == 0 ? Causal::bottom_right : Causal::none;
      s.dropout = draw(seed, 36, 3) == 0 ? 0.2 : 0;
      // Backward, f32 above 256 has no tile of family mma on these chips.
      const bool fits = s.type != f32 || std::max(s.dim, s.dim_v) <= 192;
      if (fits) check(s, "emulated:mma+sm_" + std::string(draw(seed, 41, 2) == 0 ? "80" : "86"));
      if (dim == dim_v) check(s, "emulated:simt");
    }
  }
}

TEST_CASE("forced tilings give the same result") {
  constexpr const char* tilings[] = {"rows=16,warps=1", "keys=32",          "stages=1",
                                     "keys=128",        "rows=128,warps=8", "slices=2,warps=8"};
  std::uint64_t seed = 3000;
  for (const char* tiling : tilings) {
    for (const Type type : {f16, f32}) {
      Settings s{.type = type, .len_q = 150, .len_k = 170, .dim = 64, .dim_v = 64, .seed = ++seed};
      s.causal = Causal::bottom_right;
      const Run run{.backend = std::string("emulated:mma@") + tiling};
      const Case c(s);
      try {
        workspace(c.attention(), Pass::forward, run);
        workspace(c.attention(), Pass::backward, run);
      } catch (const Error&) {
        continue;  // not a tiling of both passes
      }
      check(s, run.backend);
    }
  }
}

TEST_SUITE_END();
