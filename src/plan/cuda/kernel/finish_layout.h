// The blocks and the shared memory of finish, the last kernel of a backward pass.
//
// Its blocks have tiles of rows, tiles of keys, or tiles of dbias. What is not finite is computed
// again as by the simt kernels query_gradient and key_gradient, in tiles of rows x keys.
#pragma once

#include "plan/cuda/kernel/simt_layout.h"

namespace regard {

inline constexpr int kDbiasRows = 8, kDbiasColumns = 256;  // of a tile of dbias

// The simt kernel that computes flagged rows or keys again.
REGARD_INLINE KernelConfig fixup_part(KernelConfig config, Kernel kernel) {
  config.kernel = kernel;
  config.only_flagged = true;
  return config;
}
// The sums of dq have the dim of the kernel that made them.
REGARD_INLINE KernelConfig sums_part(KernelConfig config) {
  config.dim = config.sums_dim;
  return config;
}

REGARD_INLINE bool finishes_keys(const KernelConfig& config) {
  return config.flags_nonfinite && (config.wanted.dk || config.wanted.dv);
}

// Rows of a tile, whose sums of dq are converted: 16 for each warp.
REGARD_INLINE int converted_rows(const KernelConfig& config) { return config.tiling.warps * 16; }

struct FinishBlocks {
  int64 row_tiles = 0;    // of a head of dq
  int64 dbias_tiles = 0;  // of a head of dbias
  int64 rows = 0;         // the first blocks
  int64 keys = 0;         // the next
  int64 dbias = 0;        // the last

  REGARD_INLINE int64 all() const { return rows + keys + dbias; }
};

REGARD_INLINE FinishBlocks finish_blocks(const Problem& p, const KernelConfig& config) {
  FinishBlocks blocks;
  if (config.sums_dim > 0) {
    blocks.row_tiles = divide_up(p.sizes.len_q, converted_rows(config));
    blocks.rows = p.sizes.batch * p.sizes.heads_q * blocks.row_tiles;
  }
  if (finishes_keys(config)) {
    blocks.keys = flagged_tile_blocks(p, fixup_part(config, Kernel::key_gradient));
  }
  if (config.dbias.how != BiasGradient::none) {
    blocks.dbias_tiles =
        divide_up(p.bias_sizes[2], kDbiasRows) * divide_up(p.bias_sizes[3], kDbiasColumns);
    blocks.dbias = p.bias_sizes[0] * p.bias_sizes[1] * blocks.dbias_tiles;
  }
  return blocks;
}

// Where the flags of a tile of rows begin, in bytes.
REGARD_INLINE int finish_flags_at(const KernelConfig& config) {
  return larger(simt_layout(fixup_part(config, Kernel::query_gradient)).size,
                simt_layout(fixup_part(config, Kernel::key_gradient)).size) *
         real_bytes(config.type);
}
REGARD_INLINE int finish_shared_bytes(const KernelConfig& config) {
  return config.flags_nonfinite ? finish_flags_at(config) + converted_rows(config) : 0;
}

}  // namespace regard
