// factor tanh(x) for x below kSmall in size, without the exponential: the odd polynomial nearest to
// tanh there that begins with its argument. With f32 rounding it is 2e-7 of the factor away from it
// at most.
#pragma once

#include "cuda/kernels/ptx.cuh"

namespace regard {

class SmallTanh {
 public:
  static constexpr double kSmall = 0.875;
  // Arguments are in such units that the small ones are below 2: the first bit of their exponents,
  // and of many arguments' bits together, says whether one is not; NaN has it too.
  static constexpr float kUnit = float(2 / kSmall);

  explicit REGARD_DEVICE SmallTanh(float factor) {
    constexpr double kTerms[kCount] = {1,
                                       -0.3333175778388977,
                                       0.13308227062225342,
                                       -0.05255128815770149,
                                       0.018103979527950287,
                                       -0.003750116564333439};
    double power = kSmall / 2;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      terms_[k] = factor * float(kTerms[k] * power);
      power *= kSmall / 2 * (kSmall / 2);
    }
  }

  REGARD_DEVICE float add(float x, float to) const {
    const float square = x * x;
    float sum = terms_[kCount - 1];
#pragma unroll
    for (int k = kCount - 2; k >= 0; --k) sum = fma_of(sum, square, terms_[k]);
    return fma_of(x, sum, to);
  }

  static REGARD_DEVICE bool is_large(uint32 bits) { return (bits & 0x40000000) != 0; }

 private:
  static constexpr int kCount = 6;
  float terms_[kCount];
};

}  // namespace regard
