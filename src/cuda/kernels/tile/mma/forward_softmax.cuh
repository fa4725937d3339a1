// The online softmax of the forward kernel, tile by tile: logits to weights, the rows' running max
// and sum, and the rescaling of out when a max is raised.
#pragma once

#include "cuda/kernels/tile/mma/forward_tile.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardSoftmax {
  using Tile = ForwardTileMma<kConfig>;
  using L = MmaLanes<kConfig.type>;
  using Scores = typename Tile::Scores;
  using Out = typename Tile::Out;
  static constexpr int kM = Tile::kM;
  static constexpr int kKeyBlocks = Tile::kKeyBlocks, kOutBlocks = Tile::kOutBlocks;
  static constexpr float kSlack = 8;

  SoftmaxRow<L> rows[kM][2];  // each lane has its own part of the sums until the end

  REGARD_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) rows[m][0] = rows[m][1] = empty_softmax<L>();
  }

  // Logits to weights: P = 2^(value * exponent - m). A row's m stays until some weight would pass
  // 2^kSlack, so that most tiles leave out and the sums as they are.
  REGARD_DEVICE void make_weights(Scores& scores, Out& out, float exponent) {
    float max[kM][2];
    bool raises = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& most = max[m][half];
        most = scores[m][0][half * 2];
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) most = max_of(most, scores[m][n][half * 2 + e]);
        }
        most = max_of(most, shuffle_xor(most, 1));
        most = max_of(most, shuffle_xor(most, 2));
        raises = raises || most * exponent > rows[m][half].max + kSlack;
      }
    }
    if (any_in_warp(raises)) raise_references(out, max, exponent);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float reference = subtractable<L>(rows[m][half].max);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[m][n][half * 2 + e];
            score = weight_at<L>(score, exponent, reference);
            sum += score;
          }
        }
        rows[m][half].sum += sum;
      }
    }
  }
  REGARD_DEVICE void raise_references(Out& out, const float (&max)[kM][2], float exponent) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply(out[m], half, raise_reference<L>(rows[m][half], max[m][half], exponent));
      }
    }
  }

  // Sums a row over the lanes that hold it.
  REGARD_DEVICE void sum_over_lanes(int m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = rows[m][half].sum;
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
    }
  }

  // The sink is a logit without a value.
  REGARD_DEVICE void add_sink(Accumulator (&out)[kOutBlocks], int m, int half, float sink) {
    SoftmaxRow<L>& row = rows[m][half];
    const float shrink = raise_reference<L>(row, sink, float(kLog2E));
    row.sum += weight_at<L>(sink, float(kLog2E), subtractable<L>(row.max));
    multiply(out, half, shrink);
  }

  static REGARD_DEVICE void multiply(Accumulator (&out)[kOutBlocks], int half, float factor) {
#pragma unroll
    for (int n = 0; n < kOutBlocks; ++n) {
      out[n][half * 2] *= factor;
      out[n][half * 2 + 1] *= factor;
    }
  }
};

}  // namespace regard
