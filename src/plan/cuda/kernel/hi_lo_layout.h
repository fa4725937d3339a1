// Where scratch memory has f32 tensors as hi and lo parts of f16, for wgmma.
//
// x = (hi + lo) / scale, where hi and lo have 11 bits each, and scale is a power of two that brings
// the largest value below 2^15. Forward, each row of q has a scale, and each unit of k and of v
// (the keys of a tile). Backward, each row of every tensor, dout included, has one. Memory keeps
// the factor 1 / scale in f32. Each sequence begins at a whole unit, and its last unit is filled
// with 0.
#pragma once

#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard {

inline constexpr int kHiLoParts = 2;
inline constexpr int kHiLoBackwardUnit = 128;  // rows; the most keys of a backward tile

// The parts of a tile in shared memory.
REGARD_INLINE int hi_lo_parts(const KernelConfig& c) {
  return c.products == Products::f16x3 ? kHiLoParts : 1;
}

// One tensor: [kHiLoParts][heads][rows][columns] of f16.
struct HiLoTensor {
  int64 heads = 0;
  int64 rows = 0;     // a multiple of the unit
  int64 columns = 0;  // the head size of the tiles
  int64 begin = 0;    // of the hi part, in bytes

  REGARD_INLINE int64 elements() const { return heads * rows * columns; }  // of a part
};

struct alignas(8) KeyFactors {
  float key, value;
};

// What a backward block reads of a query row: one with lse, and one with delta / factor of dout.
// `factors` holds the upper halves of the factors of q and of dout. (The lower half of a power of
// two is 0.)
struct alignas(8) HiLoRowTerm {
  float value;
  uint32 factors;
};

struct HiLoLayout {
  // Offsets in bytes. The KeyFactors come first: [heads_kv][units; backward: rows].
  int64 query_factors = 0;  // [heads_q][rows] of f32; backward: in the row terms
  HiLoTensor q, k, v, dout;
  int64 size = 0;
};

// The rows of a head, and the first row of a sequence.
REGARD_INLINE int64 hi_lo_rows(const Problem& p, int64 rows, int64 len, int64 unit) {
  return p.packed ? (rows / unit + p.sizes.batch + 2) * unit : p.sizes.batch * round_up(len, unit);
}
template <class Int>
REGARD_INLINE Int first_hi_lo_row(const Problem& p, Int b, Int first, Int len, Int unit) {
  return p.packed ? (first / unit + b) * unit : b * ((len + unit - 1) / unit * unit);
}

// c: the configuration of the main kernel or of split_f32.
REGARD_INLINE HiLoLayout hi_lo_layout(const Problem& p, const KernelConfig& c) {
  const Sizes& s = p.sizes;
  const int64 unit = p.backward ? kHiLoBackwardUnit : c.tiling.keys;
  const int64 dim = c.dim, dim_v = c.dim_v;
  const int64 rows_q = hi_lo_rows(p, s.rows_q, s.len_q, unit);
  const int64 rows_k = hi_lo_rows(p, s.rows_k, s.len_k, unit);
  HiLoLayout x;
  x.q = {.heads = s.heads_q, .rows = rows_q, .columns = dim};
  x.k = {.heads = s.heads_kv, .rows = rows_k, .columns = dim};
  x.v = {.heads = s.heads_kv, .rows = rows_k, .columns = dim_v};
  if (p.backward) x.dout = {.heads = s.heads_q, .rows = rows_q, .columns = dim_v};
  const auto take = [&](int64& begin, int64 bytes) {
    begin = x.size;
    x.size += round_up(bytes, 256);
  };
  int64 key_factors;
  take(key_factors, s.heads_kv * rows_k / (p.backward ? 1 : unit) * int64(sizeof(KeyFactors)));
  take(x.query_factors, p.backward ? 0 : s.heads_q * rows_q * 4);
  take(x.q.begin, kHiLoParts * x.q.elements() * 2);
  take(x.k.begin, kHiLoParts * x.k.elements() * 2);
  take(x.v.begin, kHiLoParts * x.v.elements() * 2);
  take(x.dout.begin, kHiLoParts * x.dout.elements() * 2);
  return x;
}

// The row terms of the backward pass: [lse, delta][heads_q][rows]. Then [heads_q][rows] of f32: the
// sum of the factors that the row's tiles of dS^T had for dq.
REGARD_INLINE int64 hi_lo_term_rows(const Problem& p) {
  return hi_lo_rows(p, p.sizes.rows_q, p.sizes.len_q, kHiLoBackwardUnit);
}

}  // namespace regard
