// The online softmax of f32 on warpgroups: weights become pairs of f16 terms.
#pragma once

#include "cuda/kernels/tile/wgmma/warpgroup_softmax.cuh"

namespace regard {

// References follow the maxima, by steps of 2^kRise and more, 2^kHead below them: weights reach
// 2^14, and f16 terms keep what is 2^-35 of a row's largest.
template <KernelConfig kConfig>
struct PlaneSoftmax : WarpgroupSoftmax<kConfig> {
  using Base = WarpgroupSoftmax<kConfig>;
  using Base::rows, Base::shrink;
  using typename Base::L, typename Base::Scores;
  static constexpr float kHead = 10, kRise = 4;

  // exponent: of each of the lane's two rows.
  REGARD_DEVICE void raise(const Scores& scores, const float (&exponent)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SoftmaxRow<L>& row = rows[half];
      const float most = Base::maximum(scores, half) * exponent[half] - kHead;
      const float before = row.max;
      row.max = most > before + kRise ? most : before;
      shrink[half] = ex2_approx(before - subtractable<L>(row.max));
      if (row.max == before) shrink[half] = 1;
      row.sum *= shrink[half];
    }
  }

  REGARD_DEVICE void make_weights(Scores& scores, const float (&exponent)[2]) {
    const float reference[2] = {subtractable<L>(rows[0].max), subtractable<L>(rows[1].max)};
#pragma unroll
    for (int n = 0; n < Base::kKeyBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[0][n][half * 2 + e];
          score = weight_at<L>(score, exponent[half], reference[half]);
        }
        rows[half].sum += scores[0][n][half * 2] + scores[0][n][half * 2 + 1];
      }
    }
  }
};

}  // namespace regard
