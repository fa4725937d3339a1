// The weights of a block of keys straight from the products, where no pair is hidden by intervals
// and references stay: all that lies between in one stretch of code, so that the additions and
// multiplications of one score run while the exponential of another is made. (One exponential takes
// a quarter of a multiprocessor eight clocks, in which it issues seven other instructions.)
//
// What is hidden by the bias has the weight 0 without a look at it: its power is -inf, but for a
// product that is not finite, which spoils the row (params.h). A finite bias is low beside a
// reference that is none of a low bias (WarpgroupSoftmax::lacks_reference).
#pragma once

#include "cuda/kernels/tile/forward_scores.cuh"
#include "cuda/kernels/tile/wgmma/small_tanh.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_bias.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_softmax.cuh"

namespace regard {

template <KernelConfig kConfig>
struct SteadyWeights {
  using L = MmaLanes<kConfig.type>;
  using Place = WarpgroupPlace<kConfig>;
  using Scores = typename Place::Scores;
  using Elementwise = ForwardScores<kConfig, Place>;
  static constexpr Features kOn = kConfig.features;
  static constexpr int kKeyBlocks = Place::kKeyBlocks;
  static constexpr bool kHoldsBias = stages_bias(kConfig) && element_bytes(kConfig.bias.type) == 2;
  // Bias and mask where tiles of them are staged; for more than two terms, and for others beside a
  // bias, there are no registers.
  static constexpr int kTerms = kOn.softcap + kOn.bias + kOn.mask + kOn.alibi +
                                (kOn.dropout && !has_dropout_warpgroup(kConfig));
  static constexpr Features kKnown{.softcap = true,
                                   .bias = true,
                                   .mask = true,
                                   .alibi = true,
                                   .sink = true,
                                   .dropout = true,
                                   .interval = true,
                                   .signed_scale = true};
  static constexpr bool kExists =
      !WarpgroupSoftmax<kConfig>::kBare && is_within(kOn, kKnown) && kTerms <= (kOn.bias ? 1 : 2) &&
      kOn.bias == stages_bias(kConfig) && kOn.mask == stages_mask(kConfig);
  using F = Fragments<kHoldsBias ? kConfig.bias.type : Type::bf16, Products::direct>;
  // Read before all weights are made, or as they are.
  static constexpr bool kReadsAhead = kHoldsBias && WarpgroupBias<kConfig>::kHolds;
  using Bias = typename F::A[kReadsAhead ? kKeyBlocks / 2 : 1];  // 16 rows, 16 keys each

  const Elementwise terms;
  const int first_key;
  const float unit;  // of a product, in powers of two; under a softcap as SmallTanh wants it
  const float (&reference)[2];

  static REGARD_DEVICE void read_bias(Bias& bias, const Place& at) {
    if constexpr (kReadsAhead) {
#pragma unroll
      for (int k = 0; k < kKeyBlocks / 2; ++k) at.load_bias_fragment(bias[k].word, k);
    }
  }

  // Of blocks [kFrom, kTo): adds to the rows' sums, and notes the bits of what must be small.
  template <int kFrom, int kTo>
  REGARD_DEVICE void make(Scores& scores, SoftmaxRow<L> (&rows)[2], Bias& bias,
                          uint32& bits) const {
    const SmallTanh tanh(float(kLog2E) * score_params<float>(terms.at.p).softcap);
    float distance[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = terms.at.row_at(terms.at.row_of(0, half)).i;
      distance[half] = terms.terms.position(i, first_key + terms.at.column_of(0, 0));
    }
    const float fall = kOn.alibi ? -terms.terms.head.alibi_slope * float(kLog2E) : 0.0f;
#pragma unroll
    for (int n = kFrom; n < kTo; ++n) {
      if (kHoldsBias && !kReadsAhead && n % 2 == 0) {
        terms.at.load_bias_fragment(bias[0].word, n / 2);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = terms.at.row_of(0, half);
        float of_bias[2] = {};
        bool seen[2] = {true, true};
        if constexpr (kHoldsBias) {
          F::unpack(bias[kReadsAhead ? n / 2 : 0], n % 2 * 2 + half, of_bias[0], of_bias[1]);
        } else if constexpr (kOn.bias) {
          terms.read_bias(of_bias, 0, row, n);
        }
        if constexpr (kOn.mask) terms.read_mask(seen, 0, row, n);
        float* const pair = &scores[0][n][half * 2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float power = -reference[half];
          if constexpr (kOn.bias) power = fma_of(of_bias[e], float(kLog2E), power);
          if constexpr (kOn.alibi) {
            power = fma_of(fall, magnitude_of(distance[half] - float(n * 8 + e)), power);
          }
          if constexpr (kOn.softcap) {
            const float x = pair[e] * unit;
            bits |= bits_of(x);
            power = tanh.add(x, power);
          } else {
            power = fma_of(pair[e], unit, power);
          }
          pair[e] = ex2_approx(power);
          if (kOn.mask && !seen[e]) pair[e] = 0;
        }
        rows[half].sum += pair[0] + pair[1];
      }
    }
  }

  static REGARD_DEVICE float unit_of(const Problem& p) {
    const ScoreParams<float> score = score_params<float>(p);
    return kOn.softcap ? score.scale / score.softcap * SmallTanh::kUnit
                       : score.scale * float(kLog2E);
  }
  static REGARD_DEVICE bool was_large(uint32 bits) {
    return kOn.softcap && any_in_warp(SmallTanh::is_large(bits));
  }
};

}  // namespace regard
