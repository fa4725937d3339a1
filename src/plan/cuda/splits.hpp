// Split-KV: how many blocks share the keys of a tile of query rows, so that few tiles of many keys
// fill the chip.
#pragma once

#include "plan/cuda/chip.hpp"
#include "plan/cuda/tiling.hpp"

namespace regard {

// The number whose blocks end first; each block has two key tiles at least. `tiles`: of query rows,
// over all heads; `key_tiles`: of a tile of rows.
int splits_for(const KernelConfig&, const Chip&, const TilingRequest&, int64 tiles,
               int64 key_tiles);

// Whether the last block of a tile merges its splits: where that takes less time than a launch.
bool last_split_merges(const KernelConfig&, const TilingRequest&, int64 splits);

}  // namespace regard
