// From f32 to pairs of f16 terms: see plan/plane_layout.h.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx.cuh"
#include "plan/plane_layout.h"

namespace regard {

REGARD_DEVICE float power_of_two(int exponent) { return float_of(uint32(exponent + 127) << 23); }

// 2^s such that 2^s largest is in [2^14, 2^15), or as near as 2^s and 2^-s are normal numbers; and
// its factor, 2^-s, or 0 where there is nothing to multiply.
struct PlaneScale {
  float scale, factor;
};
REGARD_DEVICE PlaneScale plane_scale(float largest) {
  constexpr int kMost = 126;
  if (largest == 0) return {1, 0};
  const int exponent = smaller(127 + 14 - int(bits_of(largest) >> 23), kMost);
  return {power_of_two(exponent), power_of_two(-exponent)};
}

// Two neighbours, of which a is the lower half of each word.
struct PlanePair {
  uint32 high, low;
};
REGARD_DEVICE PlanePair split_in_planes(float a, float b) {
  const uint32 high = pack<F16>(a, b);
  return {high, pack<F16>(a - widen<F16>(uint16(high)), b - widen<F16>(uint16(high >> 16)))};
}

// What the rows of dq may lose by planes, after their terms: see plane_layout.h.
REGARD_DEVICE float* dq_losses(const KernelParams& params) {
  const Problem& p = params.problem;
  return reinterpret_cast<float*>(static_cast<PlaneRowTerm*>(params.buffers.row_terms) +
                                  2 * p.sizes.heads_q * plane_term_rows(p));
}

}  // namespace regard
