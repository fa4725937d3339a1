// The online softmax of f32, where weights become a hi and a lo f16 part.
#pragma once

#include "cuda/kernels/tile/wgmma/forward/softmax.cuh"

namespace regard {

// The running max follows the blocks in steps of at least 2^kStep, and stays 2^kHead below the true
// one: weights reach 2^14, so that the two parts keep what is 2^-35 of a row's largest weight.
template <KernelConfig kConfig>
struct F32Softmax : WarpgroupSoftmax<kConfig> {
  using Base = WarpgroupSoftmax<kConfig>;
  using Base::rows;
  using typename Base::L, typename Base::Scores;
  static constexpr float kHead = 10, kStep = 4;

  // exponent: of each of the lane's two rows.
  REGARD_DEVICE void raise(const Scores& scores, const float (&exponent)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = Base::maximum(scores, half) * exponent[half] - kHead;
      const float before = rows[half].max;
      this->raise_to(half, most > before + kStep ? most : before);
    }
  }
};

}  // namespace regard
