// The last kernel of a backward pass: dq and dbias from their f32 sums; and rows of dq and keys
// with a result that is not finite, again from their visible pairs alone.
#pragma once

#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/gradients_simt.cuh"

namespace regard {

// A tile of rows of dq. Its flags stay in the block's shared memory.
template <KernelConfig kConfig>
REGARD_DEVICE void finish_rows(const KernelParams& params, int head, int tile) {
  constexpr KernelConfig kSums = sums_part(kConfig);
  if constexpr (!kConfig.flags_nonfinite) {
    convert_dq<kSums>(params, head, tile, nullptr);
  } else {
    constexpr KernelConfig kAgain = fixup_part(kConfig, Kernel::query_gradient);
    constexpr int kRows = kAgain.tiling.rows, kTiles = converted_rows(kConfig) / kRows;
    uint8* const flags = &shared_memory<uint8>() + finish_flags_at(kConfig);
    if (!any_in_block(convert_dq<kSums>(params, head, tile, flags))) return;
    for (int n = 0; n < kTiles; ++n) {
      OwnTile<kAgain> own(params, head, tile * kTiles + n);
      own.flags = flags + n * kRows;
      if (any_in_block(thread_index() < kRows && own.flagged(thread_index()))) {
        query_gradient_tile(params, own);
      }
    }
  }
}

template <KernelConfig kConfig>
REGARD_DEVICE void finish_keys(const KernelParams& params, int block) {
  constexpr KernelConfig kAgain = fixup_part(kConfig, Kernel::key_gradient);
  each_flagged_tile<kAgain>(params, block,
                            [&](const OwnTile<kAgain>& own) { key_gradient_tile(params, own); });
}

template <KernelConfig kConfig>
REGARD_DEVICE void finish(const KernelParams& params) {
  const FinishBlocks blocks = finish_blocks(params.problem, kConfig);
  // A grid has fewer than 2^31 blocks.
  int block = int(block_index());
  if constexpr (kConfig.sums_dim > 0) {
    const int tiles = int(blocks.row_tiles);
    if (block < blocks.rows) return finish_rows<kConfig>(params, block / tiles, block % tiles);
    block -= int(blocks.rows);
  }
  if constexpr (finishes_keys(kConfig)) {
    if (block < blocks.keys) return finish_keys<kConfig>(params, block);
    block -= int(blocks.keys);
  }
  if constexpr (kConfig.dbias.how != BiasGradient::none) {
    const int tiles = int(blocks.dbias_tiles);
    convert_dbias<kConfig>(params, block / tiles, block % tiles);
  }
}

}  // namespace regard
