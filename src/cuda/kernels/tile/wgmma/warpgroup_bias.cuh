// The bias of a consumer warp's rows and a block of keys, where it hides no pair and is nowhere so
// low that score() raises it: then it is added as it is, without a look at single elements.
#pragma once

#include "cuda/kernels/machine_hopper.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_place.cuh"

namespace regard {

template <KernelConfig kConfig>
struct WarpgroupBias {
  using Place = WarpgroupPlace<kConfig>;
  static constexpr bool kOn = stages_bias(kConfig) && !kConfig.bias_of_keys &&
                              element_bytes(kConfig.bias_type) == 2 && !kConfig.features.mask;
  using F = Fragments<kOn ? kConfig.bias_type : Type::bf16, Products::direct>;
  static constexpr int kFragments = Place::kKeyBlocks / 2;

  typename F::A fragments[kFragments];  // 16 rows, 16 keys each

  REGARD_DEVICE explicit WarpgroupBias(const Place& at) {
#pragma unroll
    for (int k = 0; k < kFragments; ++k)
      F::load_a(fragments[k], at.bias_tile(0), at.warp_row, k * 16);
  }

  // Whether some lane's bias is -inf, or low.
  REGARD_DEVICE bool is_low() const {
    uint32 most = fragments[0].word[0];
#pragma unroll
    for (int i = 1; i < kFragments * 4; ++i) {
      most = larger_halves(most, fragments[i / 4].word[i % 4]);
    }
    return any_in_warp(has_low_half<kConfig.bias_type>(most));
  }

  REGARD_DEVICE void add(typename Place::Scores& scores, const ScoreTerms<kConfig>& terms,
                         const Place& at, int first_key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = at.row_at(at.row_of(0, half)).i;
      const float distance = terms.distance(i, first_key + at.column_of(0, 0));
#pragma unroll
      for (int n = 0; n < Place::kKeyBlocks; ++n) {
        float bias[2];
        F::unpack(fragments[n / 2], n % 2 * 2 + half, bias[0], bias[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[0][n][half * 2 + e];
          score = terms.value_of_bias(score, bias[e], distance - float(n * 8 + e));
        }
      }
    }
  }
};

}  // namespace regard
