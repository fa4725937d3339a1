// The online softmax of a consumer warpgroup: each lane has two rows.
//
// The running max is raised lazily. The max of the first block in which a row sees a key stays,
// because a max only guards against overflow; one look at the row sums after each block is enough.
// If a sum passes kMaxSum, the consumer computes the block again with a higher max. With terms
// other than scale and intervals, the max also rises to the sums once they pass kLargeSum, and
// where it was too low nevertheless, it follows the blocks from there on, in steps of at least
// 2^kSlack.
#pragma once

#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/wgmma/forward/coords.cuh"

namespace regard {

template <KernelConfig kConfig>
struct WarpgroupSoftmax {
  using L = MmaLanes<kConfig.type>;
  using Coords = WarpgroupCoords<kConfig>;
  using Scores = typename Coords::Scores;
  using Out = typename Coords::Out;
  static constexpr int kKeyBlocks = Coords::kKeyBlocks;
  static constexpr Features kOn = full_tile_features(kConfig);
  static constexpr bool kPlain = is_plain(kOn) && !tests_pairs(kOn);
  // Weights become f16 or bf16, and out adds up as many times a value as their sum says.
  static constexpr float kMaxSum = kConfig.type == Type::f16 ? 0x1p14f : 0x1p40f;
  static constexpr float kLargeSum = kConfig.type == Type::f16 ? kMaxSum : 0x1p10f;
  static constexpr float kSlack = 8;

  SoftmaxRow<L> rows[2];  // each lane has its own part of a sum until sum_over_lanes
  float shrink[2];        // factor of earlier results since the max rose last

  REGARD_DEVICE void clear() { rows[0] = rows[1] = empty_softmax<L>(); }

  // The max of a row over the four lanes that hold it, in up to eight chains to hide latency.
  static REGARD_DEVICE float maximum(const Scores& scores, int half) {
    constexpr int kChains = smaller(8, 2 * kKeyBlocks);
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
    return max_over_lanes(most[0]);
  }
  static REGARD_DEVICE float max_over_lanes(float x) {
    const float pair = max_of(x, shuffle_xor(x, 1));
    return max_of(pair, shuffle_xor(pair, 2));
  }

  // --------------------------------------------------------------------------------- running max

  // Raises the max to that of the block, and by at least `least`, if this is more than `slack`.
  REGARD_DEVICE void raise(const Scores& scores, float exponent, const float (&least)[2],
                           float slack) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = maximum(scores, half) * exponent, before = rows[half].max;
      if constexpr (kPlain) {
        raise_to(half, max_of(max_of(most, before), before + least[half]));
      } else {
        const float top = max_of(most, before + least[half]);
        raise_to(half, top > before + slack ? top : before);
      }
    }
  }
  REGARD_DEVICE void raise_to_sums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SoftmaxRow<L>& row = rows[half];
      raise_to(half, row.max + log2_of(max_of(max_over_lanes(row.sum), 1.0f)));
    }
  }
  REGARD_DEVICE void raise_to(int half, float max) {
    SoftmaxRow<L>& row = rows[half];
    const float before = row.max;
    row.max = max;
    shrink[half] = ex2_approx(before - subtractable<L>(row.max));
    if (row.max == before) shrink[half] = 1;
    row.sum *= shrink[half];
  }
  REGARD_DEVICE void keep_max() { shrink[0] = shrink[1] = 1; }

  // Whether some row of the warp has seen no key yet, or only lowest biases, which other biases
  // cannot be measured by.
  REGARD_DEVICE bool lacks_max() const {
    constexpr float kNone = -infinity<float>(), kLow = -0x1p100f;
    if constexpr (!kConfig.features.bias) {
      return any_in_warp(rows[0].max == kNone || rows[1].max == kNone);
    }
    return any_in_warp(rows[0].max <= kLow || rows[1].max <= kLow);
  }

  // ------------------------------------------------------------------------------- weights, sums

  REGARD_DEVICE bool has_overflowed() const { return has_sum_from(kMaxSum); }
  REGARD_DEVICE bool has_large_sum() const { return has_sum_from(kLargeSum); }
  REGARD_DEVICE bool has_sum_from(float least) const {
    return any_in_warp(rows[0].sum >= least || rows[1].sum >= least);
  }

  // Turns the logits of blocks [kFrom, kTo) into weights; `exponent`: log2(e) times the
  // unit of a row's logits.
  template <int kFrom, int kTo>
  REGARD_DEVICE void make_weights(Scores& scores, const float (&exponent)[2]) {
    const float max[2] = {subtractable<L>(rows[0].max), subtractable<L>(rows[1].max)};
#pragma unroll
    for (int n = kFrom; n < kTo; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[0][n][half * 2 + e];
          score = weight_at<L>(score, exponent[half], max[half]);
        }
        rows[half].sum += scores[0][n][half * 2] + scores[0][n][half * 2 + 1];
      }
    }
  }

  // Earlier results follow the max.
  REGARD_DEVICE void rescale(Out& out) const {
    if (!any_in_warp(shrink[0] != 1 || shrink[1] != 1)) return;
#pragma unroll
    for (int n = 0; n < Coords::kOutBlocks; ++n) {
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
  // A sink is a logit without a value.
  REGARD_DEVICE void add_sink(float sink) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shrink[half] = raise_reference<L>(rows[half], sink, float(kLog2E));
      rows[half].sum += weight_at<L>(sink, float(kLog2E), subtractable<L>(rows[half].max));
    }
  }
};

}  // namespace regard
