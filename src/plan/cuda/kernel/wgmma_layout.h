// Shared memory of the wgmma kernels: every byte, in one place for the planner and the kernels.
//
// Tiles lie in panels of 64 columns: a row of a panel is 128 bytes, whose eight pieces of 16 bytes
// are permuted by the row's number (the 128-byte swizzle of tensor maps and matrix descriptors). A
// panel begins at a multiple of 1024 bytes.
#pragma once

#include "plan/cuda/kernel/hi_lo_layout.h"
#include "plan/cuda/kernel/mma_layout.h"

namespace regard {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kWarpgroupRows = 64;   // of a product
inline constexpr int kTilesAtOnce = 4;      // tiles of rows that a block has taken
inline constexpr int kMostWgmmaStages = 4;  // of keys and of values
inline constexpr int kMostQuerySlots = 2;
inline constexpr int kWgmmaShared = 227 << 10;  // what a block may use at most

REGARD_INLINE int panels_of(int columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }
REGARD_INLINE int panel_bytes(int rows) { return rows * kPanelRowBytes; }

// Warpgroups of the forward kernel that multiply.
REGARD_INLINE int consumers_of(const Tiling& t) { return t.rows / kWarpgroupRows; }

// Forward: the columns of out that a block makes, and whether several blocks share a row's.
REGARD_INLINE int out_columns(const KernelConfig& c) { return c.dim_v / c.tiling.slices; }
REGARD_INLINE bool has_slices_of_blocks(const KernelConfig& c) {
  return c.family == Family::wgmma && c.kernel == Kernel::forward && c.tiling.slices > 1;
}
// Whether several blocks share a tile of rows: its keys, or its columns.
REGARD_INLINE bool shares_tiles(const KernelConfig& c) { return c.split_kv || c.tiling.slices > 1; }

// f32: the columns of P V of a block of keys that are accumulated at a time, next to out. Above 128
// columns both would not fit the registers, so that it is one panel of V after another.
REGARD_INLINE int f32_chunk_columns(const KernelConfig& c) {
  return c.dim_v <= 128 ? c.dim_v : kPanelColumns;
}

// Whether a warpgroup generates the dropout bits of the forward kernel. Otherwise the consumers do.
REGARD_INLINE bool has_dropout_warpgroup(const KernelConfig& c) {
  return c.features.dropout && c.products == Products::direct && consumers_of(c.tiling) == 2 &&
         c.tiling.keys <= 128 && out_columns(c) <= 192;
}
// The warps of a block, the producer's included.
REGARD_INLINE int forward_warps(const KernelConfig& c) {
  return 4 * (1 + consumers_of(c.tiling) + has_dropout_warpgroup(c));
}
// Shared memory for the dropout bits of one block of keys: two words a lane, for rows l / 4 and
// l / 4 + 8.
REGARD_INLINE int dropout_bytes(const KernelConfig& c) {
  return has_dropout_warpgroup(c) ? consumers_of(c.tiling) * 128 * 8 : 0;
}

// Whether the forward kernel's tiles differ in length, so that blocks take them from a counter.
// Where it computes rows again by itself, each tile has its own block.
REGARD_INLINE bool counts_tiles(const KernelConfig& c) {
  return c.family == Family::wgmma && !c.repeats_rows &&
         (c.features.interval || c.varlen || c.tile_map);
}

struct ForwardWgmmaLayout {
  int query_slots = 0;  // tiles of queries at once
  int out_panels = 0;   // of a tile of out on its way to memory; 0: straight from registers
  int queries = 0;      // the first slot: its parts, panels of [rows]
  int query_bytes = 0;  // of a slot
  int keys = 0;         // the first stage: its parts, panels of [keys]
  int key_bytes = 0;    // of a stage
  int values = 0;       // the first stage, likewise
  int value_bytes = 0;
  int out = 0;           // panels of [rows]
  int bias = 0;          // [rows][keys], staged by the warps that read it; by TMA: panels of [rows]
  int mask = 0;          // [rows][keys]
  int dropout_bits = 0;  // [2][consumer threads] words
  int tiles = 0;         // kTilesAtOnce x ForwardTile
  int barriers = 0;      // 8 bytes each
  int size = 0;
};

REGARD_INLINE int forward_tile_bytes(const KernelConfig& c) { return c.tile_map ? 64 : 48; }
inline constexpr int kMostConsumers = 4;  // warpgroups
inline constexpr int kMostConsumerWarps = 4 * kMostConsumers;
inline constexpr int kBarriers =
    2 * (kMostQuerySlots + 2 * kMostWgmmaStages) + kMostConsumerWarps + 1;

REGARD_INLINE ForwardWgmmaLayout forward_wgmma_layout(const KernelConfig& c, int query_slots,
                                                      int out_panels) {
  const Tiling& t = c.tiling;
  ForwardWgmmaLayout x;
  x.query_slots = query_slots;
  x.out_panels = out_panels;
  x.query_bytes = hi_lo_parts(c) * panels_of(c.dim) * panel_bytes(t.rows);
  x.key_bytes = hi_lo_parts(c) * panels_of(c.dim) * panel_bytes(t.keys);
  x.value_bytes = hi_lo_parts(c) * panels_of(out_columns(c)) * panel_bytes(t.keys);
  x.keys = query_slots * x.query_bytes;
  x.values = x.keys + t.stages * x.key_bytes;
  x.out = x.values + t.stages * x.value_bytes;
  x.bias = x.out + out_panels * panel_bytes(t.rows);
  x.mask = x.bias + (c.bias.by_tma ? panels_of(t.keys) * panel_bytes(t.rows) : bias_bytes(c));
  x.dropout_bits = x.mask + mask_bytes(c);
  x.tiles = x.dropout_bits + dropout_bytes(c);
  x.barriers = x.tiles + kTilesAtOnce * forward_tile_bytes(c);
  x.size = x.barriers + kBarriers * 8;
  return x;
}

// Two tiles of queries if there is room, so that the next one is loaded early; then as much of a
// tile of out as there is room for.
REGARD_INLINE ForwardWgmmaLayout forward_wgmma_layout(const KernelConfig& c) {
  const int panels = c.out_by_tma ? panels_of(c.dim_v) : 0;
  for (int slots = kMostQuerySlots; slots >= 1; --slots) {
    for (int out = panels; out >= (panels > 0 ? 1 : 0); --out) {
      const ForwardWgmmaLayout x = forward_wgmma_layout(c, slots, out);
      if (x.size <= kWgmmaShared) return x;
    }
  }
  return forward_wgmma_layout(c, 1, panels > 0 ? 1 : 0);
}

REGARD_INLINE int64 forward_wgmma_shared(const KernelConfig& c) {
  return forward_wgmma_layout(c).size;
}

}  // namespace regard
