// How main kernels read the bits of a mask's pairs (tile_map_layout.h).
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/tile/span_bits.cuh"
#include "plan/cuda/kernel/tile_map_layout.h"

namespace regard {

// The bits of a row of the map, which has those of a tile after those of another.
template <KernelConfig kConfig>
REGARD_DEVICE uint8* mask_bits_of_row(const KernelParams& params, int64 map_row) {
  if constexpr (!kConfig.mask.as_bits) return nullptr;
  const Problem& p = params.problem;
  const int64 at = mask_bits_at(p, kConfig) + map_row * mask_words_of_row(p, kConfig);
  return reinterpret_cast<uint8*>(params.buffers.tile_map + at);
}
// Those of one of its tiles.
template <KernelConfig kConfig>
REGARD_DEVICE const uint8* mask_bits_of_tile(const KernelParams& params, int64 map_row, int tile) {
  return mask_bits_of_row<kConfig>(params, map_row) + int64(tile) * mask_tile_bytes(kConfig);
}

// A lane's bits of a line of a tile.
template <KernelConfig kConfig>
REGARD_DEVICE auto read_mask_bits(const uint8* tile, int line) {
  const uint8* const from =
      tile + line * mask_line_bytes(kConfig) + lane_index() % 4 * mask_lane_bytes(kConfig);
  if constexpr (mask_lane_bytes(kConfig) == 2) {
    return uint32(*reinterpret_cast<const uint16*>(from));
  } else if constexpr (mask_lane_bytes(kConfig) == 4) {
    return *reinterpret_cast<const uint32*>(from);
  } else {
    return *reinterpret_cast<const uint64*>(from);
  }
}
// The same of a tile in shared memory.
template <KernelConfig kConfig>
REGARD_DEVICE uint32 read_mask_bits(SharedAddress tile, int line) {
  static_assert(mask_lane_bytes(kConfig) <= 4);
  const SharedAddress from =
      tile + line * mask_line_bytes(kConfig) + lane_index() % 4 * mask_lane_bytes(kConfig);
  return mask_lane_bytes(kConfig) == 2 ? load_shared_16(from) : load_shared_32(from);
}

}  // namespace regard
