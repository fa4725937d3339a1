// From f32 to two f16 parts: see plan/cuda/kernel/hi_lo_layout.h.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx.cuh"
#include "plan/cuda/kernel/hi_lo_layout.h"

namespace regard {

REGARD_DEVICE float power_of_two(int exponent) { return float_of(uint32(exponent + 127) << 23); }

// scale = 2^s, with 2^s largest in [2^14, 2^15), or as near as 2^s and 2^-s are normal numbers.
// factor = 2^-s, or 0 if largest is 0.
struct HiLoScale {
  float scale, factor;
};
REGARD_DEVICE HiLoScale hi_lo_scale(float largest) {
  constexpr int kMost = 126;
  if (largest == 0) return {1, 0};
  const int exponent = smaller(127 + 14 - int(bits_of(largest) >> 23), kMost);
  return {power_of_two(exponent), power_of_two(-exponent)};
}

// Two neighbouring elements; a is in the lower half of each word.
struct HiLo {
  uint32 hi, lo;
};
REGARD_DEVICE HiLo split_hi_lo(float a, float b) {
  const uint32 hi = pack<F16>(a, b);
  return {hi, pack<F16>(a - widen<F16>(uint16(hi)), b - widen<F16>(uint16(hi >> 16)))};
}

// [heads_q][rows]: what each row of dq may lose by the split. It follows the row terms.
REGARD_DEVICE float* dq_losses(const KernelParams& params) {
  const Problem& p = params.problem;
  return reinterpret_cast<float*>(static_cast<HiLoRowTerm*>(params.buffers.row_terms) +
                                  2 * p.sizes.heads_q * hi_lo_term_rows(p));
}

}  // namespace regard
