// Shared memory and grids of the kernels without tensor cores, and of the small kernels around the
// main ones.
//
// Every product of a simt kernel is computed by 16 x 16 threads. A block owns a tile (query rows,
// or keys in key_gradient) and loops over tiles of the other side, the streamed ones. Head elements
// and columns pass through shared memory in chunks, so that its size hardly depends on head sizes.
#pragma once

#include "plan/cuda/kernel/block_grid.h"
#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard {

inline constexpr int kSimtSide = 16;
inline constexpr int kSimtThreads = kSimtSide * kSimtSide;
inline constexpr int kSimtColumns = 64;  // columns of a chunk of v, dout, q or k in sums over rows

REGARD_INLINE int real_bytes(Type type) { return type == Type::f64 ? 8 : 4; }

// Head elements of a chunk in sums over head elements: at most 128 bytes.
REGARD_INLINE int simt_chunk(Type type, int dim) {
  return smaller(int(round_up(dim, 8)), 128 / real_bytes(type));
}

// Shared memory of the simt kernels, in elements of the arithmetic. Rows are padded by 16 bytes,
// so that neighbouring rows lie in different banks.
struct SimtLayout {
  int own = 0;            // rows (or keys) that the block owns
  int streamed = 0;       // rows of the streamed tile
  int chunk_stride = 0;   // from row to row of a chunk
  int weight_stride = 0;  // from own row to own row of the weights
  int streamed_rows = 0;  // where each part begins; own rows and columns begin at 0
  int weights = 0;
  int size = 0;
};

REGARD_INLINE SimtLayout simt_layout(const KernelConfig& config) {
  const bool of_keys = config.kernel == Kernel::key_gradient;
  const int padding = 16 / real_bytes(config.type);
  SimtLayout at;
  at.own = of_keys ? config.tiling.keys : config.tiling.rows;
  at.streamed = of_keys ? config.tiling.rows : config.tiling.keys;
  at.chunk_stride =
      padding + larger(simt_chunk(config.type, config.dim), simt_chunk(config.type, config.dim_v));
  at.weight_stride = at.streamed + padding;
  at.streamed_rows = at.own * at.chunk_stride;
  at.weights = at.streamed_rows + at.streamed * at.chunk_stride;
  at.size = at.weights;
  if (config.kernel == Kernel::bias_gradient) {
    at.size = larger(at.size, kSimtSide * at.streamed);  // sums over the rows of a broadcast bias
  } else {
    at.weights = larger(at.weights, at.streamed * kSimtColumns);
    at.size = at.weights + at.own * at.weight_stride;
  }
  return at;
}

REGARD_INLINE bool has_simt_tiles(Kernel kernel) {
  return kernel == Kernel::forward || kernel == Kernel::key_gradient ||
         kernel == Kernel::query_gradient || kernel == Kernel::bias_gradient;
}

REGARD_INLINE bool makes_tile_map(Kernel kernel) {
  return kernel == Kernel::row_map || kernel == Kernel::key_map;
}

// Dynamic shared memory in bytes, of every kernel of family simt except finish (finish_layout.h).
REGARD_INLINE int64 simt_shared_bytes(const KernelConfig& config) {
  if (has_simt_tiles(config.kernel)) {
    return int64(simt_layout(config).size) * real_bytes(config.type);
  }
  if (config.kernel == Kernel::split_f32 || makes_tile_map(config.kernel)) {
    return config.tiling.warps * 4;
  }
  // A sum of every thread; four of them.
  const int bytes = config.kernel == Kernel::sink_gradient ? 8
                    : config.kernel == Kernel::combine     ? 16
                                                           : 0;
  return config.tiling.warps * 32 * bytes;
}

// Columns that a block sums up for each of its rows.
REGARD_INLINE int64 simt_sums(Kernel kernel, int dim, int dim_v) {
  switch (kernel) {
    case Kernel::forward:
      return dim_v;
    case Kernel::query_gradient:
      return dim;
    case Kernel::key_gradient:
      return dim + dim_v;
    default:
      return 0;
  }
}

// Registers of a thread that hold sums, at most.
REGARD_INLINE int simt_words(Type type) { return type == Type::f64 ? 32 : 64; }

// A block that cannot hold all of its sums computes them in several passes, each a loop of its own
// over a slice of the columns.
REGARD_INLINE int simt_passes(const KernelConfig& config) {
  const int own = config.kernel == Kernel::key_gradient ? config.tiling.keys : config.tiling.rows;
  const int64 words =
      own * simt_sums(config.kernel, config.dim, config.dim_v) * real_bytes(config.type) / 4;
  int passes = 1;
  const int64 most = simt_words(config.type) * kSimtThreads;
  while (words > passes * most) passes *= 2;
  return passes;
}
// Columns of a pass.
REGARD_INLINE int simt_slice(int columns, int passes) {
  return passes == 1 ? columns : int(round_up(divide_up(columns, passes), kSimtColumns));
}

// Threads that share a row in delta, combine and combine_dkv: a power of two.
REGARD_INLINE int lanes_of_row(int dim_v, int elements_of_lane) {
  int lanes = 1;
  while (lanes < 32 && lanes * elements_of_lane < dim_v) lanes *= 2;
  return lanes;
}

// What one block of a kernel of family simt works on: heads (batch times heads) and the tiles of
// each. Empty problems have none.
REGARD_INLINE int64 simt_own_heads(const Problem& p, const KernelConfig& config) {
  switch (config.kernel) {
    case Kernel::key_gradient:
    case Kernel::combine_dkv:
      return p.sizes.batch * p.sizes.heads_kv;
    case Kernel::bias_gradient:
      return p.bias_sizes[0] * p.bias_sizes[1];
    case Kernel::sink_gradient:
      return p.sizes.heads_q;
    default:
      return p.sizes.batch * p.sizes.heads_q;
  }
}
REGARD_INLINE int64 simt_own_tiles(const Problem& p, const KernelConfig& config) {
  switch (config.kernel) {
    case Kernel::key_gradient:
    case Kernel::combine_dkv:
      return divide_up(p.sizes.len_k, config.tiling.keys);
    case Kernel::bias_gradient:
      return divide_up(p.bias_sizes[2], config.tiling.rows) *
             divide_up(p.bias_sizes[3], config.tiling.keys);
    case Kernel::sink_gradient:
      return 1;
    default:
      return divide_up(p.sizes.len_q, config.tiling.rows);
  }
}

// Tiles that a block of a fix-up kernel checks: it mostly finds no flag, and many blocks that
// find nothing would take longer.
inline constexpr int kFlaggedTiles = 64;
REGARD_INLINE int64 flagged_tile_blocks(const Problem& p, const KernelConfig& config) {
  return divide_up(simt_own_heads(p, config) * simt_own_tiles(p, config), kFlaggedTiles);
}

}  // namespace regard
