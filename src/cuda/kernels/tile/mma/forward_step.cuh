// One step of the forward kernel's walk over keys: both products of a tile, and what lies between.
#pragma once

#include "cuda/kernels/tile/forward_scores.cuh"
#include "cuda/kernels/tile/mma/forward_place.cuh"
#include "cuda/kernels/tile/mma/forward_softmax.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardStep {
  using Place = ForwardPlace<kConfig>;
  using Row = typename Place::Row;
  using F = FragmentsOf<kConfig>;
  using L = MmaLanes<kConfig.type>;
  static constexpr Features kOn = kConfig.features;
  static constexpr Tiling kTiling = kConfig.tiling;
  static constexpr int kM = Place::kM, kKeys = Place::kKeys, kOutBlocks = Place::kOutBlocks;
  static constexpr int kSteps = kConfig.dim / F::kStep;
  static constexpr bool kKeepQueries = kM * kSteps * sizeof(typename F::A) <= 128;

  const Place at;
  ForwardScores<kConfig, Place> elementwise{at};
  const float exponent = elementwise.terms.unit() * float(kLog2E);

  typename F::A queries[kKeepQueries ? kM : 1][kKeepQueries ? kSteps : 1];
  typename Place::Scores scores;
  typename Place::Out out;
  ForwardSoftmax<kConfig> softmax;

  REGARD_DEVICE void load_operand(typename F::A& a, int m, int k) const {
    F::load_a(a, at.query_tile(), at.warp_row() + m * 16, k * F::kStep);
  }
  REGARD_DEVICE void keep_queries() {
    if constexpr (kKeepQueries) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) load_operand(queries[m][k], m, k);
      }
    }
  }

  // S = Q K^T.
  REGARD_DEVICE void multiply_keys(int stage) {
    multiply_transposed<F, kSteps>(scores, at.key_tile(stage), 0,
                                   [&](typename F::A& a, int m, int k) {
                                     if constexpr (kKeepQueries) {
                                       a = queries[m][k];
                                     } else {
                                       load_operand(a, m, k);
                                     }
                                   });
  }

  // out += P V, P in the scores' place.
  REGARD_DEVICE void multiply_values(int stage) {
    add_product<F, kKeys / F::kStep>(
        out, at.value_tile(stage), at.warp_column(),
        [&](typename F::A& a, int m, int k) { F::from_accumulators(a, scores[m], k); });
  }

  REGARD_DEVICE void make_weights(int first_key) {
    softmax.make_weights(scores, out, exponent);
    if constexpr (kOn.dropout) elementwise.drop(scores, first_key);
  }

  // A tile that lies in this stage, its copies done.
  REGARD_DEVICE void take(int stage, int first_key) {
    multiply_keys(stage);
    elementwise.make_logits(scores, stage, first_key);
    make_weights(first_key);
    multiply_values(stage);
  }
};

}  // namespace regard
