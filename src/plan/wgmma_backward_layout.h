// Shared memory of the wgmma backward kernel, for the planner and the kernel. Tiles lie in panels,
// as wgmma_layout.h says.
#pragma once

#include "plan/mma_layout.h"
#include "plan/wgmma_layout.h"
#include "semantics/score.h"

namespace regard {

inline constexpr int kRowTermBytes = 16;  // of a row's lse, and of its delta: eight 16-bit terms
inline constexpr int kDscoreBuffers = 2;
inline constexpr int kPairTermBuffers = 2;
inline constexpr int kMostBackwardStages = 3;
inline constexpr int kBackwardTaskBytes = 64;

// Q is needed until dk has it, a tile longer than dO.
REGARD_INLINE int query_stages(const Tiling& t) { return t.stages + 1; }

// What key warpgroups ask of the delta kernel: lse and delta as terms of a product's sum, where
// nothing but a positive factor lies between the product and them; else as they are, in f32. An lse
// beside a bias may be so large that its product with 1 / scale has no place in the sum.
REGARD_INLINE bool adds_lse_by_product(const Features& f) { return is_plain(f); }
REGARD_INLINE bool adds_delta_by_product(const Features& f) { return !f.dropout; }

struct BackwardWgmmaLayout {
  int keys = 0;     // panels of [keys]
  int values = 0;   // panels of [keys]; later dv's and dk's on their way to memory
  int queries = 0;  // the first stage, panels of [rows]
  int query_bytes = 0;
  int douts = 0;  // the first stage, panels of [rows]
  int dout_bytes = 0;
  int lse = 0;      // [query stages][rows] row terms
  int delta = 0;    // [stages][rows]
  int dscores = 0;  // the first buffer: dS^T, a panel of [keys], a tile's rows across
  int dscore_bytes = 0;
  int bias = 0;  // [pair term buffers][rows][keys], as mma_layout.h says
  int mask = 0;  // [pair term buffers][rows][keys]
  int task = 0;  // BackwardTask
  int barriers = 0;
  int size = 0;
};

inline constexpr int kBackwardBarriers =
    2 + (kMostBackwardStages + 1) + kMostBackwardStages + 2 * kDscoreBuffers + kPairTermBuffers;

REGARD_INLINE BackwardWgmmaLayout backward_wgmma_layout(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  BackwardWgmmaLayout x;
  x.query_bytes = panels_of(c.dim) * panel_bytes(t.rows);
  x.dout_bytes = panels_of(c.dim_v) * panel_bytes(t.rows);
  x.dscore_bytes = panel_bytes(t.keys);
  x.values = panels_of(c.dim) * panel_bytes(t.keys);
  x.queries = x.values + panels_of(c.dim_v) * panel_bytes(t.keys);
  x.douts = x.queries + query_stages(t) * x.query_bytes;
  x.lse = x.douts + t.stages * x.dout_bytes;
  x.delta = x.lse + query_stages(t) * t.rows * kRowTermBytes;
  x.dscores = x.delta + t.stages * t.rows * kRowTermBytes;
  x.bias = x.dscores + kDscoreBuffers * x.dscore_bytes;
  x.mask = x.bias + kPairTermBuffers * bias_bytes(c);
  x.task = x.mask + kPairTermBuffers * mask_bytes(c);
  x.barriers = x.task + kBackwardTaskBytes;
  x.size = x.barriers + kBackwardBarriers * 8;
  return x;
}

REGARD_INLINE int64 backward_wgmma_shared(const KernelConfig& c) {
  return backward_wgmma_layout(c).size;
}

}  // namespace regard
