// f32 tensors as pairs of f16 planes, for products of warpgroups: where they lie in scratch memory.
//
// x = (high + low) / scale, each of eleven bits, with a power of two that brings the largest value
// below 2^15: one for each row of q, one for each unit of keys (the keys of a tile) of k and of v;
// in the backward pass, which has dout besides, one for each row of every tensor. What is kept of
// it is its factor, 1 / scale, in f32. Sequences begin at whole units, and what is left of a
// sequence's last unit is 0.
#pragma once

#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard {

inline constexpr int kHiLoParts = 2;           // high, low
inline constexpr int kHiLoBackwardUnit = 128;  // of the backward pass: the most keys of a tile

// Of what a product takes from shared memory.
REGARD_INLINE int hi_lo_parts(const KernelConfig& c) {
  return c.products == Products::f16x3 ? kHiLoParts : 1;
}

// One tensor: [kHiLoParts][heads][rows][columns] of f16.
struct HiLoTensor {
  int64 heads = 0;
  int64 rows = 0;     // a multiple of the unit
  int64 columns = 0;  // the head size of the tiles
  int64 begin = 0;    // where they begin, in bytes

  REGARD_INLINE int64 elements() const { return heads * rows * columns; }  // of a plane
};

struct alignas(8) KeyFactors {
  float key, value;
};

// What a backward block reads of a query row, twice: with its lse, and with its delta / factor of
// dout. `factors`: the upper halves of those of q, then of dout, which a power of two ends with.
struct alignas(8) HiLoRowTerm {
  float value;
  uint32 factors;
};

struct HiLoLayout {
  // In bytes. First of all, [heads_kv][units; backward: rows] of KeyFactors.
  int64 query_factors = 0;  // [heads_q][rows] of f32; backward: in the row terms
  HiLoTensor q, k, v, dout;
  int64 size = 0;
};

// Rows of a head, and the first of a sequence's.
REGARD_INLINE int64 hi_lo_rows(const Problem& p, int64 rows, int64 len, int64 unit) {
  return p.packed ? (rows / unit + p.sizes.batch + 2) * unit : p.sizes.batch * round_up(len, unit);
}
template <class Int>
REGARD_INLINE Int first_hi_lo_row(const Problem& p, Int b, Int first, Int len, Int unit) {
  return p.packed ? (first / unit + b) * unit : b * ((len + unit - 1) / unit * unit);
}

// c: the main kernel's configuration, or that of the one that makes the planes.
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

// The row terms of the backward pass: [lse, delta][heads_q][rows]; then f32 of [heads_q][rows]: the
// sum of what the row's tiles of dS^T were scaled down by for dq.
REGARD_INLINE int64 hi_lo_term_rows(const Problem& p) {
  return hi_lo_rows(p, p.sizes.rows_q, p.sizes.len_q, kHiLoBackwardUnit);
}

}  // namespace regard
