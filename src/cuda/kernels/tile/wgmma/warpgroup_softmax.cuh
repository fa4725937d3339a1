// The online softmax of a consumer warpgroup: two rows a lane.
//
// A row's reference is the maximum of the first block in which it sees a key, and stays. A maximum
// only guards against overflow, so that a look at the sums once a block is enough: where they pass
// kBound the block is made again, and the reference is raised (forward_consumer.cuh). Under terms
// beside scale and intervals it is also raised to the sums where they pass kSwell, and from where
// it was too low nevertheless it follows the maxima, by steps of 2^kSlack and more.
#pragma once

#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/wgmma/warpgroup_place.cuh"

namespace regard {

template <KernelConfig kConfig>
struct WarpgroupSoftmax {
  using L = MmaLanes<kConfig.type>;
  using Place = WarpgroupPlace<kConfig>;
  using Scores = typename Place::Scores;
  using Out = typename Place::Out;
  static constexpr int kKeyBlocks = Place::kKeyBlocks;
  static constexpr bool kBare = is_plain(kConfig.features) && !kConfig.features.mask;
  // Weights become f16 or bf16, and results sums of so many times a value.
  static constexpr float kBound = kConfig.type == Type::f16 ? 0x1p14f : 0x1p40f;
  static constexpr float kSwell = kConfig.type == Type::f16 ? kBound : 0x1p10f;
  static constexpr float kSlack = 8;

  SoftmaxRow<L> rows[2];  // sums are the lane's own until the end
  float shrink[2];        // what the last raise leaves of earlier results

  REGARD_DEVICE void clear() { rows[0] = rows[1] = empty_softmax<L>(); }

  // A row's maximum over the four lanes that hold it; eight chains, as the latency of one would
  // show.
  static REGARD_DEVICE float maximum(const Scores& scores, int half) {
    constexpr int kChains = 8;
    float most[kChains];
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& chain = most[(2 * n + e) % kChains];
        const float x = scores[0][n][half * 2 + e];
        chain = 2 * n + e < kChains ? x : max_of(chain, x);
      }
    }
#pragma unroll
    for (int width = kChains / 2; width > 0; width /= 2) {
#pragma unroll
      for (int i = 0; i < width; ++i) most[i] = max_of(most[i], most[i + width]);
    }
    return over_lanes_largest(most[0]);
  }
  static REGARD_DEVICE float over_lanes_largest(float x) {
    const float pair = max_of(x, shuffle_xor(x, 1));
    return max_of(pair, shuffle_xor(pair, 2));
  }

  // References follow the maxima of the block, at least to references + least, where that is more
  // than slack above them.
  REGARD_DEVICE void raise(const Scores& scores, float exponent, const float (&least)[2],
                           float slack) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SoftmaxRow<L>& row = rows[half];
      const float most = maximum(scores, half) * exponent;
      const float before = row.max;
      if constexpr (kBare) {
        row.max = max_of(max_of(most, before), before + least[half]);
      } else {
        const float top = max_of(most, before + least[half]);
        row.max = top > before + slack ? top : before;
      }
      shrink[half] = ex2_approx(before - subtractable<L>(row.max));
      if (row.max == before) shrink[half] = 1;
      row.sum *= shrink[half];
    }
  }
  REGARD_DEVICE void leave() { shrink[0] = shrink[1] = 1; }
  // References rise to the sums.
  REGARD_DEVICE void raise_to_sums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SoftmaxRow<L>& row = rows[half];
      const float before = row.max;
      row.max += log2_of(max_of(over_lanes_largest(row.sum), 1.0f));
      shrink[half] = ex2_approx(before - subtractable<L>(row.max));
      if (row.max == before) shrink[half] = 1;
      row.sum *= shrink[half];
    }
  }

  // A row that has seen no key yet has no reference, one that has seen only lowest biases none that
  // others are measured by.
  REGARD_DEVICE bool lacks_reference() const {
    constexpr float kNone = -infinity<float>(), kLow = -0x1p100f;
    if constexpr (!kConfig.features.bias) {
      return any_in_warp(rows[0].max == kNone || rows[1].max == kNone);
    }
    return any_in_warp(rows[0].max <= kLow || rows[1].max <= kLow);
  }
  REGARD_DEVICE bool ran_away() const { return has_sum_from(kBound); }
  REGARD_DEVICE bool swells() const { return has_sum_from(kSwell); }
  REGARD_DEVICE bool has_sum_from(float least) const {
    return any_in_warp(rows[0].sum >= least || rows[1].sum >= least);
  }

  // Logits of blocks [kFrom, kTo) become weights.
  template <int kFrom, int kTo>
  REGARD_DEVICE void make_weights(Scores& scores, float exponent) {
    const float reference[2] = {subtractable<L>(rows[0].max), subtractable<L>(rows[1].max)};
#pragma unroll
    for (int n = kFrom; n < kTo; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[0][n][half * 2 + e];
          score = weight_at<L>(score, exponent, reference[half]);
        }
        rows[half].sum += scores[0][n][half * 2] + scores[0][n][half * 2 + 1];
      }
    }
  }

  // Earlier results follow a raise.
  REGARD_DEVICE void rescale(Out& out) const {
    if (!any_in_warp(shrink[0] != 1 || shrink[1] != 1)) return;
#pragma unroll
    for (int n = 0; n < Place::kOutBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= shrink[e / 2];
    }
  }

  REGARD_DEVICE void sum_over_lanes() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = rows[half].sum;
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
    }
  }
  // The sink is a logit without a value.
  REGARD_DEVICE void add_sink(float sink) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shrink[half] = raise_reference<L>(rows[half], sink, float(kLog2E));
      rows[half].sum += weight_at<L>(sink, float(kLog2E), subtractable<L>(rows[half].max));
    }
  }
};

}  // namespace regard
