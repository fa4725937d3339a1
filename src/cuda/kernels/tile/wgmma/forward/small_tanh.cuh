// factor * tanh(x) for |x| < kSmall without an exponential: a minimax odd polynomial of degree 11
// with leading coefficient 1; its error is at most 2e-7 of the factor in f32.
#pragma once

#include "cuda/kernels/ptx.cuh"

namespace regard {

class SmallTanh {
 public:
  static constexpr double kSmall = 0.875;
  // Arguments are multiplied by kUnit first, so that the small ones are below 2. Then one bit of
  // the exponent tells whether an argument, or the OR of many, is too large; NaN has it too.
  static constexpr float kUnit = float(2 / kSmall);

  explicit REGARD_DEVICE SmallTanh(float factor) {
    constexpr double kCoefficients[kCount] = {1,
                                              -0.3333175778388977,
                                              0.13308227062225342,
                                              -0.05255128815770149,
                                              0.018103979527950287,
                                              -0.003750116564333439};
    double power = kSmall / 2;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      coefficients_[k] = factor * float(kCoefficients[k] * power);
      power *= kSmall / 2 * (kSmall / 2);
    }
  }

  // to + factor * tanh(x / kUnit).
  REGARD_DEVICE float add(float x, float to) const {
    const float square = x * x;
    float sum = coefficients_[kCount - 1];
#pragma unroll
    for (int k = kCount - 2; k >= 0; --k) sum = fma_of(sum, square, coefficients_[k]);
    return fma_of(x, sum, to);
  }

  static REGARD_DEVICE bool is_large(uint32 bits) { return (bits & 0x40000000) != 0; }

 private:
  static constexpr int kCount = 6;
  float coefficients_[kCount];
};

}  // namespace regard
