// The shortcut for full tiles of Hopper's forward kernel: FullTileWeights makes the same weights
// from the same products as score() and the plain softmax do.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "plan/cuda/config_text.hpp"
#include "tests/cpu/case.hpp"
#include "tests/cuda/emulator.hpp"
#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::emulated;

namespace {

constexpr int kLength = 512, kKeys = 128, kRows = 16;  // of a warp

// One warp, rows 256 to 271 and keys 0 to 127 of the second head: products (q) become weights
// (out), first by score(), then by the shortcut, and the bits of the softcap's arguments follow.
constexpr char kLines[] = R"(
  using Full = FullTileWeights<kConfig>;
  static_assert(Full::kExists && kConfig.tiling.keys == 128);
  const ForwardTile<kConfig> tile{{}, {}, 1, 0, 0, 1, 256, kConfig.tiling.rows, 512, 512, 0, 0};
  const ForwardMemory<kConfig> memory;
  ForwardTerms<kConfig> terms{params, memory, 0, 0};
  terms.read_head_terms(tile);
  terms.coords(tile).load_terms({0, true});
  cp_async_wait<0>();
  sync_warp();
  typename Full::Scores by_score, by_shortcut;
  const float* const products = static_cast<const float*>(params.problem.q.data);
  float* const out = static_cast<float*>(params.problem.out.data);
  const int lane = lane_index();
  for (int n = 0; n < 16; ++n) {
    for (int e = 0; e < 4; ++e) {
      by_score[0][n][e] = by_shortcut[0][n][e] = products[(n * 4 + e) * 32 + lane];
    }
  }
  constexpr float kNothing[2] = {};
  const float exponent =
      logit_unit(kConfig.features, score_params<float>(params.problem)) * float(kLog2E);
  WarpgroupSoftmax<kConfig> softmax{};
  terms.make_logits(by_score, tile, {0, true}, false, false);
  softmax.clear();
  softmax.raise(by_score, exponent, kNothing, 0);
  const float max[2] = {softmax.rows[0].max, softmax.rows[1].max};
  softmax.template make_weights<0, 16>(by_score, {exponent, exponent});
  typename Full::Bias bias;
  uint32 bits = 0;
  Full::read_bias(bias, terms.coords(tile));
  const Full full{terms.elementwise(tile), 0, Full::unit_of(params.problem), max};
  full.template make<0, 16>(by_shortcut, softmax.rows, bias, bits);
  for (int n = 0; n < 16; ++n) {
    for (int e = 0; e < 4; ++e) {
      out[(n * 4 + e) * 32 + lane] = by_score[0][n][e];
      out[kElements + (n * 4 + e) * 32 + lane] = by_shortcut[0][n][e];
    }
  }
  if (Full::was_large(bits)) out[0] = -1;
)";

std::string unit_of(const KernelConfig& config) {
  return "#define REGARD_LEVEL 90\n"
         "#include \"cuda/kernels/params.h\"\n"
         "#include \"cuda/kernels/ptx_hopper.cuh\"\n"
         "#include \"cuda/kernels/tile/wgmma/forward/full_tile.cuh\"\n"
         "#include \"cuda/kernels/tile/wgmma/forward/terms.cuh\"\n"
         "namespace regard {\n"
         "constexpr int kElements = 16 * 128;\n"
         "constexpr KernelConfig kConfig = " +
         to_text(config) +
         ";\n"
         "void full_tile(const KernelParams& params) {" +
         kLines +
         "}\n}\n"
         "extern \"C\" void regard_kernel(regard::KernelParams params) {\n"
         "  regard::full_tile(params);\n}\n";
}

struct Memory {
  std::vector<float> bias, slopes{0.03f, 0.01f}, products, out;
};

double normal(std::uint64_t stream, std::uint64_t n) {
  return std::sqrt(-2 * std::log(1 - tests::uniform(stream, 0, n))) *
         std::cos(6.283185307 * tests::uniform(stream, 1, n));
}

Memory memory_of(std::uint64_t seed) {
  Memory m;
  for (int n = 0; n < 2 * kLength * kLength; ++n) {
    m.bias.push_back(float(normal(seed, n)));
  }
  for (int n = 0; n < kRows * kKeys; ++n) m.products.push_back(float(8 * normal(seed + 9, n)));
  m.out.resize(2 * kRows * kKeys);
  return m;
}

// What the shortcut knows: a bias alone, or two of the other terms; and what costs no term.
Attention random_attention(const Memory& m, std::uint64_t seed) {
  const auto chosen = [&](int n) { return tests::uniform(seed, 3, n) < 0.5; };
  Attention a = cuda_case::attention(
      {.batch = 1, .heads_q = 2, .heads_kv = 2, .len_q = kLength, .len_k = kLength});
  const int left_out = int(seed % 4);  // 2: none; 3: all but the bias
  if (left_out == 3) {
    a.bias = Tensor(m.bias.data(), f32, {1, 2, kLength, kLength});
  } else {
    if (left_out != 0) a.softcap = 40;
    if (left_out != 1) a.alibi_slopes = Tensor(m.slopes.data(), f32, {2});
  }
  if (chosen(0)) a.causal = Causal::bottom_right;
  if (chosen(1)) a.scale = -0.125;
  if (chosen(2)) a.sink = Tensor(m.slopes.data(), f32, {2});
  return a;
}

}  // namespace

TEST_SUITE_BEGIN("emulator");

TEST_CASE("full tiles have the weights that score() gives") {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    CAPTURE(seed);
    Memory m = memory_of(seed);
    KernelParams params;
    params.problem = describe(random_attention(m, seed), Pass::forward, NullData::allowed);
    const CudaPlan plan = cuda_case::planned(params.problem, "sm_90", "cuda:wgmma");
    const CudaLaunch* const launch = cuda_case::launch_of(plan, Kernel::forward);
    REQUIRE(launch);
    params.problem.q.data = m.products.data();
    params.problem.out.data = m.out.data();
    static BlockMachine machine;
    struct Bound {
      KernelEntry entry;
      KernelParams params;
    } const bound{compiled(unit_of(launch->config), machine), params};
    machine.run({.kernel =
                     [](const void* context) {
                       const Bound& kernel = *static_cast<const Bound*>(context);
                       kernel.entry(kernel.params, {});
                     },
                 .params = &bound,
                 .blocks = 1,
                 .threads = 32,
                 .shared_bytes = launch->shared_bytes,
                 .cluster = 1,
                 .order = Order::forward});
    int positive = 0;
    for (int n = 0; n < kRows * kKeys; ++n) {
      const float by_score = m.out[n], by_shortcut = m.out[kRows * kKeys + n];
      CHECK(std::fabs(by_shortcut - by_score) <= 5e-5f * by_score);
      positive += by_score > 0;
    }
    CHECK(positive > kRows * kKeys / 2);
  }
}
