// One iteration of the forward kernel over keys: both products of a tile, with the softmax between.
#pragma once

#include "cuda/kernels/tile/forward_scores.cuh"
#include "cuda/kernels/tile/mma/forward_softmax.cuh"
#include "cuda/kernels/tile/mma/forward_tile.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardStep {
  using Tile = ForwardTileMma<kConfig>;
  using Row = typename Tile::Row;
  using F = FragmentsOf<kConfig>;
  using L = MmaLanes<kConfig.type>;
  static constexpr Features kOn = kConfig.features;
  static constexpr Tiling kTiling = kConfig.tiling;
  static constexpr int kM = Tile::kM, kKeys = Tile::kKeys, kOutBlocks = Tile::kOutBlocks;
  static constexpr int kSteps = kConfig.dim / F::kStep;
  static constexpr bool kKeepQueries = kM * kSteps * sizeof(typename F::A) <= 128;

  const Tile at;
  ForwardScores<kConfig, Tile> elementwise{at};
  const float exponent = elementwise.terms.unit() * float(kLog2E);
  DropoutOf<kConfig> dropout = dropout_of<kConfig>(at.p);

  typename F::A queries[kKeepQueries ? kM : 1][kKeepQueries ? kSteps : 1];
  typename Tile::Scores scores;
  typename Tile::Out out;
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

  // out += P V; P has replaced the scores.
  REGARD_DEVICE void multiply_values(int stage) {
    add_product<F, kKeys / F::kStep>(
        out, at.value_tile(stage), at.warp_column(),
        [&](typename F::A& a, int m, int k) { F::from_accumulators(a, scores[m], k); });
  }

  REGARD_DEVICE void make_weights(int first_key) {
    softmax.make_weights(scores, out, exponent);
    if constexpr (kOn.dropout) elementwise.drop(scores, first_key, dropout);
  }

  // One tile, which has arrived in this stage. Calls after_scores() behind the first product.
  template <class AfterScores>
  REGARD_DEVICE void take(int stage, const KeyBlock& block, AfterScores after_scores) {
    typename ForwardScores<kConfig, Tile>::SeenKeys seen;
    elementwise.read_seen(seen, block);
    multiply_keys(stage);
    after_scores();
    elementwise.make_logits(scores, stage, block, seen);
    make_weights(block.first_key);
    multiply_values(stage);
  }
};

}  // namespace regard
