// A 16-bit bias of a consumer warp's rows and a block of keys, as fragments. If no element is -inf
// or below kLowestBias, it is added without a look at single elements.
#pragma once

#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/wgmma/forward/coords.cuh"

namespace regard {

template <KernelConfig kConfig>
struct BiasFragments {
  using Coords = WarpgroupCoords<kConfig>;
  static constexpr bool kOn = stages_bias(kConfig) && !kConfig.bias.one_row &&
                              element_bytes(kConfig.bias.type) == 2 &&
                              !tests_pairs(full_tile_features(kConfig));
  using F = Fragments<kOn ? kConfig.bias.type : Type::bf16, Products::direct>;
  static constexpr int kFragments = Coords::kKeyBlocks / 2;  // of 16 rows and 16 keys
  // Fragments are kept in registers, or read twice: three consumer warpgroups have no registers for
  // them, and two have none next to a dropout warpgroup.
  static constexpr bool kHolds =
      consumers_of(kConfig.tiling) == 2 && !has_dropout_warpgroup(kConfig);

  const Coords& at;
  typename F::A held[kHolds ? kFragments : 1];

  REGARD_DEVICE explicit BiasFragments(const Coords& coords) : at(coords) {
    if constexpr (!kHolds) return;
#pragma unroll
    for (int k = 0; k < kFragments; ++k) at.load_bias_fragment(held[k].word, k);
  }
  REGARD_DEVICE const typename F::A& fragment(int k) {
    if constexpr (kHolds) return held[k];
    at.load_bias_fragment(held[0].word, k);
    return held[0];
  }

  // Whether some element of the warp is -inf or low.
  REGARD_DEVICE bool is_low() {
    uint32 most = 0;
#pragma unroll
    for (int k = 0; k < kFragments; ++k) {
      const typename F::A& of_keys = fragment(k);
#pragma unroll
      for (int i = 0; i < 4; ++i) most = max_u16x2(most, of_keys.word[i]);
    }
    return any_in_warp(has_low_half<kConfig.bias.type>(most));
  }

  REGARD_DEVICE void add(typename Coords::Scores& scores, const ScoreTerms<kConfig>& terms,
                         int first_key) {
#pragma unroll
    for (int k = 0; k < kFragments; ++k) {
      const typename F::A& of_keys = fragment(k);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = at.row_at(at.row_of(0, half)).i;
        const float distance = terms.position(i, first_key + at.column_of(0, 0));
#pragma unroll
        for (int n = 2 * k; n < 2 * k + 2; ++n) {
          float bias[2];
          F::unpack(of_keys, n % 2 * 2 + half, bias[0], bias[1]);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[0][n][half * 2 + e];
            score = terms.value_of_bias(score, bias[e], distance - float(n * 8 + e));
          }
        }
      }
    }
  }

  // Logits from products and the bias in global memory, where neighbouring keys are neighbours.
  static REGARD_DEVICE void apply_from_memory(typename Coords::Scores& scores,
                                              const ScoreTerms<kConfig>& terms, const Coords& at,
                                              int first_key) {
    using Format = typename ElementOf<kConfig.bias.type>::Format;
    const int first_column = first_key + at.column_of(0, 0), left = at.seq.len_k - first_column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row_of(0, half), i = at.row_at(row).i;
      const auto* const from =
          static_cast<const uint16*>(terms.bias) + i * terms.bias_row + first_column;
      const int keys = row < at.row_count ? left : 0;
      const float distance = terms.position(i, first_column);
#pragma unroll
      for (int n = 0; n < Coords::kKeyBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = n * 8 + e;
          const float bias = key < keys ? widen<Format>(from[key]) : 0.0f;
          float& score = scores[0][n][half * 2 + e];
          score = terms.value(score, bias, distance - float(key));
          if (bias == -infinity<float>()) score = -infinity<float>();
        }
      }
    }
  }
};

}  // namespace regard
