// Shared memory of the wgmma backward kernel, for the planner and the kernel. Tiles lie in panels,
// as wgmma_layout.h says.
#pragma once

#include "plan/cuda/kernel/mma_layout.h"
#include "plan/cuda/kernel/wgmma_layout.h"
#include "semantics/score.h"

namespace regard {

inline constexpr int kRowTermBytes = 16;  // of a row's lse, and of its delta: eight 16-bit terms
inline constexpr int kDscoreBuffers = 2;
inline constexpr int kDscoreSizeBytes = 8 * 4;  // of planes: the largest of each warp's dS^T
inline constexpr int kMostPairTermBuffers = 2;
inline constexpr int kMostBackwardStages = 3;
inline constexpr int kBackwardTaskBytes = 64;
inline constexpr int kBlocksOfCluster[] = {8, 6, 4, 3, 2};

// Head sizes above 128: dk and dv of 64 keys fill the registers of two warpgroups, of which one has
// S^T and dv, the other dP^T and dk. So do they of planes of f32 above 64, and where shared memory
// has no room for planes of 128 keys.
REGARD_INLINE bool is_wide(const KernelConfig& c) {
  if (c.products == Products::f16x3) return c.tiling.keys == kWarpgroupRows;
  return c.dim > 128 || c.dim_v > 128;
}
REGARD_INLINE int row_term_bytes(const KernelConfig& c) {
  return c.products == Products::f16x3 ? int(sizeof(HiLoRowTerm)) : kRowTermBytes;
}

// Whether a warpgroup of its own makes dbias. Else that of dq does: where terms beside the bias
// leave no registers for a fourth.
REGARD_INLINE bool has_dbias_warpgroup(const KernelConfig& c) {
  const Features& f = c.features;
  return c.dbias.how != BiasGradient::none &&
         (larger(c.dim, c.dim_v) <= 64 || !(f.mask || f.alibi || f.dropout));
}
// Whether one draws which weights are dropped, of which there are two a word for each pair of a
// thread's. Else those that have the weights do: beside a warpgroup for dbias, and in the wide
// kernel.
REGARD_INLINE bool has_backward_dropout_warpgroup(const KernelConfig& c) {
  return c.features.dropout && c.products == Products::direct && !is_wide(c) &&
         !has_dbias_warpgroup(c);
}
REGARD_INLINE int backward_warps(const KernelConfig& c) {
  return has_dbias_warpgroup(c) || has_backward_dropout_warpgroup(c) ? 16 : 12;
}

// Q is needed until dk has it, a tile longer than dO; but in the wide kernel each stage is given
// back on its own.
REGARD_INLINE int query_stages(const KernelConfig& c) {
  return c.tiling.stages + (is_wide(c) ? 0 : 1);
}
// Columns of dq that a block of a pair makes, and of K that it takes from the other block's keys.
REGARD_INLINE int peer_columns(const KernelConfig& c) { return c.cta_pair ? c.dim / 2 : 0; }
REGARD_INLINE int pair_term_buffers(const KernelConfig& c) {
  return is_wide(c) ? 1 : kMostPairTermBuffers;
}

// What key warpgroups ask of the delta kernel: lse and delta as terms of a product's sum, where
// nothing but a positive factor lies between the product and them; else as they are, in f32. An lse
// beside a bias may be so large that its product with 1 / scale has no place in the sum.
REGARD_INLINE bool adds_lse_by_product(const Features& f) { return is_plain(f); }
REGARD_INLINE bool adds_delta_by_product(const Features& f) { return !f.dropout; }

// The kernel's own elements of dbias, and f32 sums of it, are f32.
REGARD_INLINE bool writes_f32_dbias(const KernelConfig& c) {
  return c.dbias.how != BiasGradient::store || c.dbias.is_f32 || c.bias.type == Type::f32;
}
// The sum of a cluster's dS^T passes shared memory as one 16-bit term where dbias is of 16 bits;
// else as two, far closer to f32 than what they are summed from.
REGARD_INLINE int dbias_parts(const KernelConfig& c) { return writes_f32_dbias(c) ? 2 : 1; }
// Keys that are moved at once: 32 of 16 bits, where each block of a cluster has whole groups of
// them, else 16.
REGARD_INLINE int dbias_group(const KernelConfig& c) {
  return !writes_f32_dbias(c) && c.tiling.keys / 32 % c.cluster == 0 ? 32 : 16;
}
REGARD_INLINE int dbias_term_bytes(const KernelConfig& c) {
  return c.cluster > 1 ? 2 * dbias_parts(c) * panel_bytes(dbias_group(c)) : 0;
}

// Turns in which blocks add to a head's dq: of so many tiles of rows each. Blocks of a pair, which
// have columns of their own, take turns of their own.
REGARD_INLINE int semaphore_tiles(const KernelConfig& c) {
  return c.family == Family::wgmma ? 2 : 1;
}
REGARD_INLINE int blocks_at_once(const KernelConfig& c) { return c.cta_pair ? 2 : 1; }
REGARD_INLINE int64 dq_semaphores(const KernelConfig& c, int64 len_q) {
  return divide_up(len_q, semaphore_tiles(c) * c.tiling.rows) * blocks_at_once(c);
}

struct BackwardWgmmaLayout {
  int keys = 0;       // panels of [keys]
  int values = 0;     // panels of [keys]; later dv's and dk's on their way to memory
  int peer_keys = 0;  // paired: panels of the other block's [keys]
  int queries = 0;    // the first stage, panels of [rows]
  int query_bytes = 0;
  int douts = 0;  // the first stage, panels of [rows]
  int dout_bytes = 0;
  int lse = 0;      // [query stages][rows] row terms
  int delta = 0;    // [stages][rows]
  int dscores = 0;  // the first buffer: dS^T, a panel of [keys], a tile's rows across; wide: P^T
                    // before it
  int dscore_bytes = 0;
  int dscore_sizes = 0;  // of planes, of each buffer
  int dbias_terms = 0;   // in a cluster over the batch: sums of groups of keys, two in turn
  int bias = 0;          // [pair term buffers][rows][keys], as mma_layout.h says
  int mask = 0;          // [pair term buffers][rows][keys]
  int dropout_bits = 0;  // a word of each thread of the keys
  int task = 0;          // BackwardTask
  int barriers = 0;
  int size = 0;
};

inline constexpr int kBackwardBarriers = 2 + (kMostBackwardStages + 1) + 3 * kMostBackwardStages +
                                         3 * kDscoreBuffers + kMostPairTermBuffers + 2 +
                                         kDscoreBuffers + 1;

REGARD_INLINE BackwardWgmmaLayout backward_wgmma_layout(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  BackwardWgmmaLayout x;
  const int planes = hi_lo_parts(c);
  x.query_bytes = planes * panels_of(c.dim) * panel_bytes(t.rows);
  x.dout_bytes = planes * panels_of(c.dim_v) * panel_bytes(t.rows);
  x.dscore_bytes = planes * panel_bytes(t.keys);
  x.values = planes * panels_of(c.dim) * panel_bytes(t.keys);
  x.peer_keys = x.values + planes * panels_of(c.dim_v) * panel_bytes(t.keys);
  x.queries = x.peer_keys + panels_of(peer_columns(c)) * panel_bytes(t.keys);
  x.douts = x.queries + query_stages(c) * x.query_bytes;
  x.lse = x.douts + t.stages * x.dout_bytes;
  // Of a pair both are in the same rows.
  x.delta = c.cta_pair ? x.lse : x.lse + query_stages(c) * t.rows * row_term_bytes(c);
  x.dscores = int(round_up(x.delta + t.stages * t.rows * row_term_bytes(c), 1024));
  x.dscore_sizes = x.dscores + kDscoreBuffers * x.dscore_bytes;
  x.dbias_terms = x.dscore_sizes + (planes > 1 ? kDscoreBuffers * kDscoreSizeBytes : 0);
  x.bias = x.dbias_terms + dbias_term_bytes(c);
  x.mask = x.bias + pair_term_buffers(c) * bias_bytes(c);
  x.dropout_bits = x.mask + pair_term_buffers(c) * mask_bytes(c);
  x.task = x.dropout_bits + (has_backward_dropout_warpgroup(c) ? 256 * 4 : 0);
  x.barriers = x.task + kBackwardTaskBytes;
  x.size = x.barriers + kBackwardBarriers * 8;
  return x;
}

REGARD_INLINE int64 backward_wgmma_shared(const KernelConfig& c) {
  return backward_wgmma_layout(c).size;
}

}  // namespace regard
