// How main kernels read the bits of a mask's pairs (tile_map_layout.h).
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx.cuh"
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

// A lane's bits of the lines that it has of a tile; nothing where a mask is not read as bits.
template <KernelConfig kConfig, int kLines, bool kOn = kConfig.mask.as_bits>
struct MaskBits {
  template <class LineOf>
  REGARD_DEVICE void read(const KernelParams&, int64, int, LineOf) {}
};

template <KernelConfig kConfig, int kLines>
struct MaskBits<kConfig, kLines, true> {
  static constexpr int kLaneBytes = mask_lane_bytes(kConfig);
  uint32 words[kLines][kLaneBytes == 8 ? 2 : 1];

  // `tile`: of the other side. line_of(n) returns the line's number in the own tile.
  template <class LineOf>
  REGARD_DEVICE void read(const KernelParams& params, int64 map_row, int tile, LineOf line_of) {
    const uint8* const from = mask_bits_of_row<kConfig>(params, map_row) +
                              int64(tile) * mask_tile_bytes(kConfig) +
                              lane_index() % 4 * kLaneBytes;
#pragma unroll
    for (int n = 0; n < kLines; ++n) {
      const uint8* const at = from + line_of(n) * mask_line_bytes(kConfig);
      if constexpr (kLaneBytes == 2) {
        words[n][0] = *reinterpret_cast<const uint16*>(at);
      } else {
#pragma unroll
        for (int w = 0; w < kLaneBytes / 4; ++w) {
          words[n][w] = reinterpret_cast<const uint32*>(at)[w];
        }
      }
    }
  }
  // Leaves out the lane's first columns, of a multiple of eight of the tile.
  REGARD_DEVICE void skip(int columns) {
    static_assert(kLaneBytes <= 4);
#pragma unroll
    for (int n = 0; n < kLines; ++n) words[n][0] >>= columns / 4;
  }
  // Whether the mask shows column e of eight columns, counted from the tile's first.
  REGARD_DEVICE bool has(int line, int eight, int e) const {
    return (words[line][eight / 16] >> (eight % 16 * 2 + e) & 1) != 0;
  }
};

}  // namespace regard
