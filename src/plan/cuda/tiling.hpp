// The tiles of GPU kernels: tables by head size, and what of them fits a chip.
#pragma once

#include "plan/cuda/chip.hpp"
#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

// Bytes of shared memory.
struct SharedLimits {
  int64 block = 0;
  int64 multiprocessor = 0;
};

// What a tiling is chosen for, beside the config itself.
struct TilingWish {
  int64 dim = 0;  // head sizes as the problem has them
  int64 dim_v = 0;
  int64 rows = 0;   // forward: of a head, at most; few rows get low tiles
  int64 keys = 0;   // of a sequence
  int64 heads = 0;  // forward: that have so many rows; so do few tiles
  int64 multiprocessors = 0;
  SharedLimits limits;
  const Tiling* forced = nullptr;  // members above 0 replace those of the table
};

enum class Fit : uint8 {
  fits,
  no_room,     // needs more shared memory than a block may use
  impossible,  // the tiling that is forced is none that the kernel can have
};

// Sets tiling, dim and dim_v of an mma kernel, forward or backward.
Fit take_mma_tiling(KernelConfig&, const TilingWish&);

// Sets the tiling of a simt kernel; dim and dim_v are set.
Fit take_simt_tiling(KernelConfig&, const TilingWish&);

// Head sizes of an mma kernel's tiles: whole steps of every product, in each of the slices.
int mma_head_size(const KernelConfig&, int64 size, bool sliced);

// Dynamic shared memory of a kernel.
int64 shared_bytes_of(const KernelConfig&);

// Blocks that a multiprocessor surely holds at once.
int64 resident_blocks(const KernelConfig&, int64 shared_bytes, const Chip&);

// How many blocks share the keys of a tile of rows, so that a few tiles of many keys fill the chip:
// the number whose blocks end first. Each has two key tiles at least.
int splits_for(const KernelConfig&, const Chip&, const TilingWish&, int64 blocks, int64 key_tiles);

// Whether the last block of a tile merges its splits: where that is sooner done than a launch.
bool last_split_merges(const KernelConfig&, const TilingWish&, int64 splits);

}  // namespace regard
