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

// Rows or sums of f32: as many bytes at once as a thread can load.
template <Type kTo>
REGARD_DEVICE void write_vectors(const Problem& p, const RowPlaces& at) {
  constexpr int kCount = 4;
  for (int64 d = lane_index() * kCount; d < p.sizes.dim; d += 32 * kCount) {
    const int64 count = p.sizes.dim - d;
    float x[kCount], y[kCount];
    load_vector<Type::f32>(x, p.q, at.first + d, count, true);
    if (p.k.given()) {
      load_vector<Type::f32>(y, p.k, at.second + d, count, true);
#pragma unroll
      for (int e = 0; e < kCount; ++e) x[e] += y[e];
    }
    store_vector<kTo>(p.out, at.to + d, count, true, x);
  }
}

REGARD_DEVICE bool has_whole_vectors(const View& view) {
  return view.strides.column == 1 && is_aligned(view);
}

// Where a row is, in the order of memory: rows of a head may follow each other, or heads of a row,
// as in keys that ranks exchange. In 32 bits: the launch requires fewer than 2^31 rows, and a
// division of 64 bits takes longer than a row.
REGARD_DEVICE RowPlaces row_places(const Problem& p, uint32 row) {
  const uint32 heads = uint32(p.sizes.heads_q), batch = uint32(p.sizes.batch);
  const uint32 len = uint32(p.sizes.len_q);
  uint32 b, h, i;
  if (p.out.strides.row < p.out.strides.head) {
    const uint32 head = row / len;
    b = head / heads;
    h = head - b * heads, i = row - head * len;
  } else {
    const uint32 entry = row / heads;
    i = entry / batch;
    h = row - entry * heads, b = entry - i * batch;
  }
  return {.first = offset_of(p.q.strides, b, h, 0, i),
          .second = offset_of(p.k.strides, b, h, 0, i),
          .to = offset_of(p.out.strides, b, h, 0, i)};
}

// Into `out`, from `q`, and `k` where it is given, all (batch, heads_q, len_q, dim); added if the
// problem accumulates.
template <KernelConfig kConfig>
REGARD_DEVICE void write_rows(const KernelParams& params) {
  using Real = RealOf<kConfig.type>;
  const Problem& p = params.problem;
  const Sizes& s = p.sizes;
  const uint32 rows = uint32(s.batch * s.heads_q * s.len_q);
  const uint32 begin = uint32(block_index()) * kConfig.tiling.rows;
  const bool by_vectors = kConfig.type == Type::f32 && !p.accumulate && p.q.type == Type::f32 &&
                          has_whole_vectors(p.q) && has_whole_vectors(p.out) &&
                          (!p.k.given() || has_whole_vectors(p.k));
#pragma unroll 1
  for (int n = warp_index(); n < kConfig.tiling.rows; n += kConfig.tiling.warps) {
    const uint32 row = begin + n;
    if (row >= rows) return;
    const RowPlaces at = row_places(p, row);
    if (p.out.type == Type::boolean) {
      copy_bools(p, at);
    } else if (by_vectors && p.out.type == Type::f16) {
      write_vectors<Type::f16>(p, at);
    } else if (by_vectors && p.out.type == Type::bf16) {
      write_vectors<Type::bf16>(p, at);
    } else if (by_vectors) {
      write_vectors<Type::f32>(p, at);
    } else {
      write_elements<Real>(p, at);
    }
  }
}

}  // namespace regard
