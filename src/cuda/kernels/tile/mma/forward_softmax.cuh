// The online softmax of the forward kernel: from logits to weights, tile by tile, with the rows'
// references and sums, and what a raised reference does to the results so far.
#pragma once

#include "cuda/kernels/tile/mma/forward_place.cuh"

namespace regard {

template <KernelConfig kConfig>
struct ForwardSoftmax {
  using Place = ForwardPlace<kConfig>;
  using L = MmaLanes<kConfig.type>;
  using Scores = typename Place::Scores;
  using Out = typename Place::Out;
  static constexpr int kM = Place::kM;
  static constexpr int kKeyBlocks = Place::kKeyBlocks, kOutBlocks = Place::kOutBlocks;
  static constexpr float kSlack = 8;

  SoftmaxRow<L> rows[kM][2];  // of the halves of a block; sums are the lane's own until the end

  REGARD_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) rows[m][0] = rows[m][1] = empty_softmax<L>();
  }

  // Logits to weights: P = 2^(value * exponent - reference). A row's reference stays until some
  // weight would pass 2^kSlack: most tiles then leave out and the sums as they are.
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

  // The row's share of the lanes that hold it, as one.
  REGARD_DEVICE void sum_over_lanes(int m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = rows[m][half].sum;
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
    }
  }

  // A logit without a value.
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
