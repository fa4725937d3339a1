// Shared memory of the mma kernels: every byte, in one place for the planner and the kernels.
//
// Eight rows of a matrix fragment lie in different banks: a tile's rows are followed by 16 unused
// bytes, or (swizzled) pieces of 16 bytes are permuted within each 128. The first works for every
// head size, and addresses differ by constants alone. The second keeps lines of 128 bytes whole,
// which asynchronous copies bring faster (H100: 3.07 instead of 2.91 TB/s).
#pragma once

#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

static_assert(kTypeCount == 7, "a type was added: its size in tiles, and the step of a product");
REGARD_INLINE int element_bytes(Type type) { return type == Type::f32 ? 4 : 2; }

// Elements of a row that one step of a product takes.
REGARD_INLINE int step_of(Type type) { return type == Type::f32 ? 8 : 16; }

REGARD_INLINE int tile_row_bytes(const KernelConfig& c, int columns) {
  return columns * element_bytes(c.type) + 16;
}

// The tiles that a kernel loops over: forward K and V, backward Q and dout. Where decoding waits
// for memory, and 192 and 256 columns in 16 bits: of narrower ones the addresses take more time
// than that gains, f32 has twice as many fragments, and 512 columns leave no registers.
REGARD_INLINE bool is_swizzled(const KernelConfig& c, int columns) {
  const bool is_wide = c.type != Type::f32 && columns > 128 && columns <= 256;
  return c.level >= 80 && columns * element_bytes(c.type) % 128 == 0 &&
         (c.tiling.key_warps > 1 || is_wide);
}
REGARD_INLINE int staged_row_bytes(const KernelConfig& c, int columns) {
  return tile_row_bytes(c, columns) - (is_swizzled(c, columns) ? 16 : 0);
}
// Swizzled tiles begin at a line. The tiles before them have 16 rows or more, each of whole pieces
// of 16 bytes, so that only stages have to be rounded up.
REGARD_INLINE int whole_lines(int bytes) { return (bytes + 127) / 128 * 128; }

// Staged bias: its elements as they are in memory, a row of keys for each query of the tile, or one
// row for all.
REGARD_INLINE bool stages_bias(const KernelConfig& c) {
  return c.features.bias && (c.bias.aligned || c.bias.one_row);
}
REGARD_INLINE int bias_rows(const KernelConfig& c) { return c.bias.one_row ? 1 : c.tiling.rows; }
REGARD_INLINE int bias_row_bytes(const KernelConfig& c) {
  return c.tiling.keys * element_bytes(c.bias.type) + 16;
}
REGARD_INLINE int bias_bytes(const KernelConfig& c) {
  return stages_bias(c) ? bias_rows(c) * bias_row_bytes(c) : 0;
}

// The staged mask: its bytes, likewise. Rows are an odd multiple of 16 bytes apart, so that eight
// of them lie in different banks. The wgmma kernel stages what copies in the background can bring.
REGARD_INLINE bool stages_mask(const KernelConfig& c) {
  const bool in_background = c.kernel == Kernel::backward || c.mask.copy_bytes >= 4;
  return c.features.mask && !c.mask.as_bits &&
         (c.family == Family::mma || (c.family == Family::wgmma && in_background));
}
REGARD_INLINE int mask_rows(const KernelConfig& c) { return c.mask.one_row ? 1 : c.tiling.rows; }
REGARD_INLINE int mask_row_bytes(const KernelConfig& c) { return (c.tiling.keys / 16 | 1) * 16; }
REGARD_INLINE int mask_bytes(const KernelConfig& c) {
  return stages_mask(c) ? mask_rows(c) * mask_row_bytes(c) : 0;
}

struct ForwardMmaLayout {
  int queries = 0;  // [rows][dim]; later the tile of out, [rows][dim_v]
  int stage = 0;    // the first stage
  int keys = 0;     // within a stage: [keys][dim]
  int values = 0;   // [keys][dim_v]
  int bias = 0;     // [rows][keys]
  int mask = 0;     // [rows][keys]
  int stage_bytes = 0;
  int key_warp_bytes = 0;  // the stages of one
  int size = 0;
};

// What a key warp or a split holds of a row: the sums of its columns, its running max and its sum.
REGARD_INLINE int partial_row_bytes(const KernelConfig& c) { return c.dim_v * 4 + 16; }

REGARD_INLINE ForwardMmaLayout forward_mma_layout(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  ForwardMmaLayout x;
  x.queries = 0;
  x.stage = t.rows * tile_row_bytes(c, larger(c.dim, c.dim_v));
  x.keys = 0;
  x.values = t.keys * staged_row_bytes(c, c.dim);
  x.bias = x.values + t.keys * staged_row_bytes(c, c.dim_v);
  x.mask = x.bias + bias_bytes(c);
  x.stage_bytes = whole_lines(x.mask + mask_bytes(c));
  x.key_warp_bytes = t.stages * x.stage_bytes;
  x.size = x.stage + t.key_warps * x.key_warp_bytes;
  // Parts of every row replace the stages once all keys are done.
  if (t.key_warps > 1)
    x.size = larger(x.size, x.stage + t.key_warps * t.rows * partial_row_bytes(c));
  return x;
}

// Bytes for the parts of the warps; the parts of one row in all splits must fit them too.
REGARD_INLINE int merge_room(const KernelConfig& c) {
  const ForwardMmaLayout x = forward_mma_layout(c);
  return x.size - x.stage;
}

// stream_k: what beginning and ending a head takes, in tiles of keys of every warp.
inline constexpr int kStreamStart = 4;

// How the warps of a backward block share a tile of dq, which has units of 16 rows and pairs of
// column blocks: each has units x pairs of them, as square as possible, so that operands are read
// least often.
struct DqShares {
  int unit_warps;  // that share the rows; the others share columns
  int units, pairs;

  REGARD_INLINE int reads() const { return units + pairs; }
};
REGARD_INLINE DqShares dq_shares(const KernelConfig& c, int unit_warps) {
  const int pairs = c.dim / 16, column_warps = c.tiling.warps / unit_warps;
  return {unit_warps, c.tiling.rows / 16 / unit_warps, (pairs + column_warps - 1) / column_warps};
}
REGARD_INLINE DqShares dq_shares(const KernelConfig& c) {
  DqShares best = dq_shares(c, 1);
  for (int n = 2; n * 16 <= c.tiling.rows && n <= c.tiling.warps; ++n) {
    if (c.tiling.rows / 16 % n != 0 || c.tiling.warps % n != 0) continue;
    const DqShares shares = dq_shares(c, n);
    if (shares.reads() <= best.reads()) best = shares;
  }
  return best;
}
// Pairs whose sums are in a warp's registers at once.
REGARD_INLINE int dq_pairs_at_once(const DqShares& x) {
  return x.pairs * x.units <= 8 ? x.pairs : 8 / x.units;
}

// P^T and dS^T in shared memory. Next to 256 columns of 128 rows there is no room for padding.
REGARD_INLINE bool is_exchange_swizzled(const KernelConfig& c) { return c.tiling.rows >= 128; }
REGARD_INLINE int exchange_row_bytes(const KernelConfig& c) {
  return tile_row_bytes(c, c.tiling.rows) - (is_exchange_swizzled(c) ? 16 : 0);
}

struct BackwardMmaLayout {
  int keys = 0;     // [keys][dim]; later the tile of dk
  int values = 0;   // [keys][dim_v]; later the tile of dv
  int weights = 0;  // [keys][rows]: Z P, only where warps share a tile's keys
  int dscores = 0;  // [keys][rows]
  int stage = 0;    // the first stage
  int queries = 0;  // within a stage: [rows][dim]
  int douts = 0;    // [rows][dim_v]
  int states = 0;   // [rows] RowState
  int bias = 0;     // [rows][keys]
  int mask = 0;     // [rows][keys]
  int stage_bytes = 0;
  int dq = 0;     // whole_keys: over dscores; of each warp 16 rows of the columns that it writes
  int again = 0;  // repeats_rows: flags of keys and rows whose results are not finite
  int size = 0;
};

// The flags: whether there is any, of each key two, and of each row one.
inline constexpr int kAgainHeader = 16, kMostRowsAgain = 512;
REGARD_INLINE int again_bytes(const KernelConfig& c) {
  return c.repeats_rows ? kAgainHeader + 2 * c.tiling.keys + kMostRowsAgain : 0;
}

REGARD_INLINE int dq_stage_row_bytes(const KernelConfig& c) {
  return tile_row_bytes(c, dq_shares(c).pairs * 16);
}
REGARD_INLINE int dq_stage_bytes(const KernelConfig& c) {
  return c.whole_keys ? c.tiling.warps * 16 * dq_stage_row_bytes(c) : 0;
}
// Whether a warp makes all of its dq at once, which whole_keys requires: results replace dS.
REGARD_INLINE bool makes_dq_at_once(const KernelConfig& c) {
  return dq_pairs_at_once(dq_shares(c)) == dq_shares(c).pairs;
}

REGARD_INLINE BackwardMmaLayout backward_mma_layout(const KernelConfig& c) {
  const Tiling& t = c.tiling;
  BackwardMmaLayout x;
  const int exchange = t.keys * exchange_row_bytes(c);
  x.keys = 0;
  x.values = t.keys * tile_row_bytes(c, c.dim);
  x.dscores = x.values + t.keys * tile_row_bytes(c, c.dim_v);
  x.dq = x.dscores;
  x.weights = x.dscores + larger(exchange, dq_stage_bytes(c));
  x.stage = x.weights + (t.slices > 1 ? exchange : 0);
  x.queries = 0;
  x.douts = t.rows * staged_row_bytes(c, c.dim);
  x.states = x.douts + t.rows * staged_row_bytes(c, c.dim_v);
  x.bias = x.states + t.rows * 8;
  x.mask = x.bias + bias_bytes(c);
  x.stage_bytes = whole_lines(x.mask + mask_bytes(c));
  x.again = x.stage + t.stages * x.stage_bytes;
  x.size = x.again + again_bytes(c);
  return x;
}

REGARD_INLINE int64 forward_mma_shared(const KernelConfig& c) { return forward_mma_layout(c).size; }
REGARD_INLINE int64 backward_mma_shared(const KernelConfig& c) {
  return backward_mma_layout(c).size;
}

}  // namespace regard
