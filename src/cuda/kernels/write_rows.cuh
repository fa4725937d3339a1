// Rows of a tensor to another one of any type and strides, or the sum of two to a third; or added
// to what that one holds. Rows of bools are copied to bools.
#pragma once

#include "cuda/kernels/tile/simt/row_vectors.cuh"
#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

// A row, by a warp: the first element of each tensor.
struct RowPlaces {
  int64 first, second, to;
};

REGARD_DEVICE void copy_bools(const Problem& p, const RowPlaces& at) {
  for (int64 d = lane_index(); d < p.sizes.dim; d += 32) {
    static_cast<uint8*>(p.out.data)[at.to + d * p.out.strides.column] =
        static_cast<const uint8*>(p.q.data)[at.first + d * p.q.strides.column];
  }
}

template <class Real>
REGARD_DEVICE void write_elements(const Problem& p, const RowPlaces& at) {
#pragma unroll 4
  for (int64 d = lane_index(); d < p.sizes.dim; d += 32) {
    const int64 to = at.to + d * p.out.strides.column;
    Real x = load_element<Real>(p.q.data, p.q.type, at.first + d * p.q.strides.column);
    if (p.k.given()) {
      x += load_element<Real>(p.k.data, p.k.type, at.second + d * p.k.strides.column);
    }
    if (p.accumulate) x += load_element<Real>(p.out.data, p.out.type, to);
    store_element(p.out.data, p.out.type, to, x);
  }
}

// Sums of f32: as many bytes at once as a thread can load.
template <Type kTo>
REGARD_DEVICE void write_sums(const Problem& p, const RowPlaces& at) {
  constexpr int kCount = 4;
  for (int64 d = lane_index() * kCount; d < p.sizes.dim; d += 32 * kCount) {
    const int64 count = p.sizes.dim - d;
    float x[kCount], y[kCount];
    load_vector<Type::f32>(x, p.q, at.first + d, count, true);
    load_vector<Type::f32>(y, p.k, at.second + d, count, true);
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[e] += y[e];
    store_vector<kTo>(p.out, at.to + d, count, true, x);
  }
}

REGARD_DEVICE bool has_whole_vectors(const View& view) {
  return view.strides.column == 1 && is_aligned(view);
}

// Into `out`, from `q`, and `k` where it is given, all (batch, heads_q, len_q, dim); added if the
// problem accumulates. The rows of one place in the sequence follow each other, as keys of ranks
// do.
template <KernelConfig kConfig>
REGARD_DEVICE void write_rows(const KernelParams& params) {
  using Real = RealOf<kConfig.type>;
  const Problem& p = params.problem;
  const Sizes& s = p.sizes;
  const int64 rows = s.batch * s.heads_q * s.len_q;
  const int64 begin = int64(block_index()) * kConfig.tiling.rows;
  const bool by_vectors = kConfig.type == Type::f32 && p.k.given() && !p.accumulate &&
                          p.q.type == Type::f32 && has_whole_vectors(p.q) &&
                          has_whole_vectors(p.k) && has_whole_vectors(p.out);
#pragma unroll 1
  for (int n = warp_index(); n < kConfig.tiling.rows; n += kConfig.tiling.warps) {
    const int64 row = begin + n;
    if (row >= rows) return;
    const int64 h = row % s.heads_q, b = row / s.heads_q % s.batch, i = row / s.heads_q / s.batch;
    const RowPlaces at{.first = offset_of(p.q.strides, b, h, 0, i),
                       .second = offset_of(p.k.strides, b, h, 0, i),
                       .to = offset_of(p.out.strides, b, h, 0, i)};
    if (p.out.type == Type::boolean) {
      copy_bools(p, at);
    } else if (by_vectors && p.out.type == Type::f16) {
      write_sums<Type::f16>(p, at);
    } else if (by_vectors && p.out.type == Type::bf16) {
      write_sums<Type::bf16>(p, at);
    } else if (by_vectors) {
      write_sums<Type::f32>(p, at);
    } else {
      write_elements<Real>(p, at);
    }
  }
}

}  // namespace regard
