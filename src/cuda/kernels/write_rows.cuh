// Rows of a tensor to another one of any type and strides, or added to what that one holds. Rows of
// bools are copied to bools.
#pragma once

#include "cuda/kernels/element.cuh"
#include "cuda/kernels/params.h"
#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

// From `q` to `out`, both (batch, heads_q, len_q, dim); added if the problem accumulates. A warp
// copies a row; the rows of one place in the sequence follow each other, as keys of ranks do.
template <KernelConfig kConfig>
REGARD_DEVICE void write_rows(const KernelParams& params) {
  using Real = RealOf<kConfig.type>;
  const Problem& p = params.problem;
  const Sizes& s = p.sizes;
  const int64 rows = s.batch * s.heads_q * s.len_q;
  const int64 first = int64(block_index()) * kConfig.tiling.rows;
#pragma unroll 1
  for (int n = warp_index(); n < kConfig.tiling.rows; n += kConfig.tiling.warps) {
    const int64 row = first + n;
    if (row >= rows) return;
    const int64 h = row % s.heads_q, b = row / s.heads_q % s.batch, i = row / s.heads_q / s.batch;
    const int64 from_row = offset_of(p.q.strides, b, h, 0, i),
                to_row = offset_of(p.out.strides, b, h, 0, i);
    if (p.out.type == Type::boolean) {
      for (int64 d = lane_index(); d < s.dim; d += 32) {
        static_cast<uint8*>(p.out.data)[to_row + d * p.out.strides.column] =
            static_cast<const uint8*>(p.q.data)[from_row + d * p.q.strides.column];
      }
      continue;
    }
#pragma unroll 4
    for (int64 d = lane_index(); d < s.dim; d += 32) {
      const int64 from = from_row + d * p.q.strides.column, to = to_row + d * p.out.strides.column;
      Real x = load_element<Real>(p.q.data, p.q.type, from);
      if (p.accumulate) x += load_element<Real>(p.out.data, p.out.type, to);
      store_element(p.out.data, p.out.type, to, x);
    }
  }
}

}  // namespace regard
