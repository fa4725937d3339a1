// Shared memory of the wgmma backward kernel, for the planner and the kernel. wgmma_layout.h says
// what a panel is.
#pragma once

#include "plan/cuda/kernel/mma_layout.h"
#include "plan/cuda/kernel/tile_map_layout.h"
#include "plan/cuda/kernel/wgmma_layout.h"
#include "semantics/score.h"

namespace regard {

inline constexpr int kRowTermBytes = 16;  // of lse or delta of a row: eight 16-bit terms
inline constexpr int kDscoreBuffers = 2;
inline constexpr int kDscoreSizeBytes = 8 * 4;  // f32: the largest dS^T of each warp
inline constexpr int kMostPairTermBuffers = 2;
inline constexpr int kMostBackwardStages = 3;
inline constexpr int kBackwardTaskBytes = 64;
inline constexpr int kRowTilesAtOnce = 4;
inline constexpr int kBlocksOfCluster[] = {8, 6, 4, 3, 2};

// Wide kernels have tiles of 64 keys: one warpgroup makes P^T and dv, another dS^T and dk, because
// each gradient fills a warpgroup's registers. Head sizes above 128 need that; in f32, head sizes
// above 64, or if shared memory has no room for 128 keys.
REGARD_INLINE bool is_wide(const KernelConfig& c) {
  if (c.products == Products::f16x3) return c.tiling.keys == kWarpgroupRows;
  return c.dim > 128 || c.dim_v > 128;
}
REGARD_INLINE int row_term_bytes(const KernelConfig& c) {
  return c.products == Products::f16x3 ? int(sizeof(HiLoRowTerm)) : kRowTermBytes;
}

// Whether a fourth warpgroup makes dbias. Else the dq warpgroup does, because score terms next to
// the bias leave no registers for a fourth.
REGARD_INLINE bool has_dbias_warpgroup(const KernelConfig& c) {
  const Features& f = c.features;
  return c.dbias.how != BiasGradient::none &&
         (larger(c.dim, c.dim_v) <= 64 || !(tests_pairs(f) || f.alibi || f.dropout));
}
// Whether a fourth warpgroup generates the dropout bits, one for each weight. Else the warpgroups
// that make P^T do: next to a warpgroup for dbias, and in the wide kernel.
REGARD_INLINE bool has_backward_dropout_warpgroup(const KernelConfig& c) {
  return c.features.dropout && c.products == Products::direct && !is_wide(c) &&
         !has_dbias_warpgroup(c);
}
REGARD_INLINE int backward_warps(const KernelConfig& c) {
  return has_dbias_warpgroup(c) || has_backward_dropout_warpgroup(c) ? 16 : 12;
}

// dk's product reads Q until the next iteration, so that Q needs a stage more than dO. (The wide
// kernel frees each stage of Q by a barrier.)
REGARD_INLINE int query_stages(const KernelConfig& c) {
  return c.tiling.stages + (is_wide(c) ? 0 : 1);
}
// The columns of dq that one block of a CTA pair makes, and that it loads of the other's keys.
REGARD_INLINE int peer_columns(const KernelConfig& c) { return c.cta_pair ? c.dim / 2 : 0; }
// Buffers of dS^T (wide: of P^T before it) that take turns. A CTA pair has as many for dS^T of the
// other block. Next to eight panels of K and V shared memory has room for one of each, and
// registers for one part of dq.
REGARD_INLINE int dscore_turns(const KernelConfig& c) {
  return c.cta_pair && panels_of(c.dim) + panels_of(c.dim_v) > 7 ? 1 : kDscoreBuffers;
}
REGARD_INLINE int dscore_buffers(const KernelConfig& c) {
  return dscore_turns(c) * (c.cta_pair ? 2 : 1);
}
REGARD_INLINE int pair_term_buffers(const KernelConfig& c) {
  return is_wide(c) ? 1 : kMostPairTermBuffers;
}

// Whether lse and delta are terms that the products add. This works if only a positive factor lies
// between the product and its use. Else they are read in f32. (With a bias, lse / scale may be too
// large for the terms.)
REGARD_INLINE bool adds_lse_by_product(const Features& f) { return is_plain(f); }
REGARD_INLINE bool adds_delta_by_product(const Features& f) { return !f.dropout; }

// Whether the backward kernel writes dbias in f32: because dbias is f32, or to f32 sums.
REGARD_INLINE bool writes_f32_dbias(const KernelConfig& c) {
  return c.dbias.how != BiasGradient::store || c.dbias.is_f32 || c.bias.type == Type::f32;
}
// A cluster's sum of dS^T passes through shared memory as one 16-bit part if dbias has 16 bits;
// else as two, which are far more accurate than the dS^T that they are summed from.
REGARD_INLINE int dbias_parts(const KernelConfig& c) { return writes_f32_dbias(c) ? 2 : 1; }
// The keys of a group that a dbias warpgroup moves at once: 32 if they have 16 bits and each block
// of a cluster has whole groups, else 16.
REGARD_INLINE int dbias_group(const KernelConfig& c) {
  return !writes_f32_dbias(c) && c.tiling.keys / 32 % c.cluster == 0 ? 32 : 16;
}
REGARD_INLINE int dbias_term_bytes(const KernelConfig& c) {
  return c.cluster > 1 ? 2 * dbias_parts(c) * panel_bytes(dbias_group(c)) : 0;
}

// A dq semaphore orders the additions to a head's dq, for so many tiles of rows. The blocks of a
// CTA pair add to different columns, and have a semaphore each.
REGARD_INLINE int semaphore_tiles(const KernelConfig& c) {
  return c.family == Family::wgmma ? 2 : 1;
}
REGARD_INLINE int blocks_at_once(const KernelConfig& c) { return c.cta_pair ? 2 : 1; }
REGARD_INLINE int64 dq_semaphores(const KernelConfig& c, int64 len_q) {
  return divide_up(len_q, semaphore_tiles(c) * c.tiling.rows) * blocks_at_once(c);
}

struct BackwardWgmmaLayout {
  int keys = 0;       // panels of [keys]
  int values = 0;     // panels of [keys]; at the end, staging of dv and dk
  int peer_keys = 0;  // CTA pair: panels of the other block's [keys]
  int queries = 0;    // the first stage, panels of [rows]
  int query_bytes = 0;
  int douts = 0;  // the first stage, panels of [rows]
  int dout_bytes = 0;
  int lse = 0;      // [query stages][rows] row terms
  int delta = 0;    // [stages][rows]
  int dscores = 0;  // the first buffer: dS^T, panels of [keys]; wide, f32: P^T before it
  int dscore_bytes = 0;
  int dscore_sizes = 0;  // f32: [buffers][warps], the largest dS^T
  int dbias_terms = 0;   // cluster over the batch: two buffers of sums of a group of keys
  int bias = 0;          // [pair term buffers][rows][keys], as mma_layout.h says
  int mask = 0;          // [pair term buffers][rows][keys]
  int mask_bits = 0;     // [query stages], as tile_map_layout.h says
  int dropout_bits = 0;  // a word for each thread of warpgroups 1 and 2
  int task = 0;          // BackwardTask
  int row_tiles = 0;     // kRowTilesAtOnce x 8 bytes, where the loads bring their tile along
  int barriers = 0;
  int size = 0;
};

// With a tile map, the warpgroup that loads tiles of rows says which they are. In a wide block
// several warpgroups load.
REGARD_INLINE bool loads_bring_tiles(const KernelConfig& c) { return c.tile_map && !is_wide(c); }

inline constexpr int kBackwardBarriers = 2 + (kMostBackwardStages + 1) + 3 * kMostBackwardStages +
                                         3 * kDscoreBuffers + kMostPairTermBuffers +
                                         kDscoreBuffers + 1 + kDscoreBuffers + 1;

REGARD_INLINE BackwardWgmmaLayout backward_wgmma_layout(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  BackwardWgmmaLayout x;
  const int parts = hi_lo_parts(c);
  x.query_bytes = parts * panels_of(c.dim) * panel_bytes(t.rows);
  x.dout_bytes = parts * panels_of(c.dim_v) * panel_bytes(t.rows);
  x.dscore_bytes = parts * panels_of(t.rows) * panel_bytes(t.keys);
  x.values = parts * panels_of(c.dim) * panel_bytes(t.keys);
  x.peer_keys = x.values + parts * panels_of(c.dim_v) * panel_bytes(t.keys);
  x.queries = x.peer_keys + panels_of(peer_columns(c)) * panel_bytes(t.keys);
  x.douts = x.queries + query_stages(c) * x.query_bytes;
  x.lse = x.douts + t.stages * x.dout_bytes;
  // In a CTA pair lse and delta share 16 bytes.
  x.delta = c.cta_pair ? x.lse : x.lse + query_stages(c) * t.rows * row_term_bytes(c);
  x.dscores = int(round_up(x.delta + t.stages * t.rows * row_term_bytes(c), 1024));
  x.dscore_sizes = x.dscores + dscore_buffers(c) * x.dscore_bytes;
  x.dbias_terms = x.dscore_sizes + (parts > 1 ? kDscoreBuffers * kDscoreSizeBytes : 0);
  x.bias = x.dbias_terms + dbias_term_bytes(c);
  x.mask = x.bias + pair_term_buffers(c) * bias_bytes(c);
  x.mask_bits = x.mask + pair_term_buffers(c) * mask_bytes(c);
  x.dropout_bits = x.mask_bits + (c.mask.as_bits ? query_stages(c) * mask_tile_bytes(c) : 0);
  x.task = x.dropout_bits + (has_backward_dropout_warpgroup(c) ? 256 * 4 : 0);
  x.row_tiles = x.task + kBackwardTaskBytes;
  x.barriers = x.row_tiles + (loads_bring_tiles(c) ? kRowTilesAtOnce * 8 : 0);
  x.size = x.barriers + kBackwardBarriers * 8;
  return x;
}

REGARD_INLINE int64 backward_wgmma_shared(const KernelConfig& c) {
  return backward_wgmma_layout(c).size;
}

}  // namespace regard
