// The weights of a full tile straight from the products: a block of keys in which intervals hide no
// pair, with a running max that stays. The code has no branch, so that multiply-adds of one score
// run during the exponential of another (a warp's ex2 takes its scheduler eight cycles, in which it
// issues seven other instructions).
//
// A bias of -inf needs no look: its power is -inf and its weight 0, except with a product that is
// not finite, which makes the row non-finite and flags it. Finite biases need no clamp, because the
// running max is known to come from a bias above kLowestBias (WarpgroupSoftmax::lacks_max).
#pragma once

#include "cuda/kernels/tile/forward_scores.cuh"
#include "cuda/kernels/tile/wgmma/forward/bias_fragments.cuh"
#include "cuda/kernels/tile/wgmma/forward/small_tanh.cuh"
#include "cuda/kernels/tile/wgmma/forward/softmax.cuh"

namespace regard {

template <KernelConfig kConfig>
struct FullTileWeights {
  using L = MmaLanes<kConfig.type>;
  using Coords = WarpgroupCoords<kConfig>;
  using Scores = typename Coords::Scores;
  using Elementwise = ForwardScores<kConfig, Coords>;
  static constexpr Features kOn = full_tile_features(kConfig);
  static constexpr int kKeyBlocks = Coords::kKeyBlocks;
  static constexpr bool kBiasInFragments =
      stages_bias(kConfig) && element_bytes(kConfig.bias.type) == 2;
  // There are registers for two terms, or for a bias alone, which must be staged.
  static constexpr int kTerms =
      kOn.softcap + kOn.bias + kOn.alibi + (kOn.dropout && !has_dropout_warpgroup(kConfig));
  static constexpr Features kKnown{.softcap = true,
                                   .bias = true,
                                   .alibi = true,
                                   .sink = true,
                                   .dropout = true,
                                   .positions = true,
                                   .interval = true,
                                   .signed_scale = true};
  static constexpr bool kExists = !WarpgroupSoftmax<kConfig>::kPlain && is_within(kOn, kKnown) &&
                                  kTerms <= (kOn.bias ? 1 : 2) && kOn.bias == stages_bias(kConfig);
  using F = Fragments<kBiasInFragments ? kConfig.bias.type : Type::bf16, Products::direct>;
  // Bias fragments are read before all weights, or one by one.
  static constexpr bool kReadsBiasAhead = kBiasInFragments && BiasFragments<kConfig>::kHolds;
  using Bias = typename F::A[kReadsBiasAhead ? kKeyBlocks / 2 : 1];  // 16 rows, 16 keys each

  const Elementwise terms;
  const int first_key;
  const float unit;  // of a product, in powers of two; with a softcap, as SmallTanh wants it
  const float (&max)[2];

  static REGARD_DEVICE void read_bias(Bias& bias, const Coords& at) {
    if constexpr (kReadsBiasAhead) {
#pragma unroll
      for (int k = 0; k < kKeyBlocks / 2; ++k) at.load_bias_fragment(bias[k].word, k);
    }
  }

  // Weights of blocks [kFrom, kTo), added to the rows' sums. `bits` collects the bits of the
  // softcap's arguments.
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
      if (kBiasInFragments && !kReadsBiasAhead && n % 2 == 0) {
        terms.at.load_bias_fragment(bias[0].word, n / 2);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = terms.at.row_of(0, half);
        float pair_bias[2] = {};
        if constexpr (kBiasInFragments) {
          F::unpack(bias[kReadsBiasAhead ? n / 2 : 0], n % 2 * 2 + half, pair_bias[0],
                    pair_bias[1]);
        } else if constexpr (kOn.bias) {
          terms.read_bias(pair_bias, 0, row, n);
        }
        float* const pair = &scores[0][n][half * 2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float power = -max[half];
          if constexpr (kOn.bias) power = fma_of(pair_bias[e], float(kLog2E), power);
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
  // Whether some score of the warp was too large for SmallTanh.
  static REGARD_DEVICE bool was_large(uint32 bits) {
    return kOn.softcap && any_in_warp(SmallTanh::is_large(bits));
  }
};

}  // namespace regard
