// Deterministic gradients: how many tiles of keys add to the dq of some rows before a block's turn
// comes, where they need not be neighbours: with a tile map, or with positions. A count of what
// blocks really visit holds for any table of positions, so that none makes a block wait forever.
#pragma once

#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/tile_map.cuh"

namespace regard {

template <KernelConfig kConfig>
inline constexpr bool kCountsTurns =
    kConfig.tile_map || (kConfig.features.positions && kConfig.features.interval);

// How many of the key tiles [begin, end), each of kKeyTiles of the kernel's, visit one of kTiles
// tiles of rows, from `row_tile` on. `first_map_row`: of the query head's first tile of keys. All
// lanes of a warp call this.
template <KernelConfig kConfig, int kTiles, int kKeyTiles = 1>
REGARD_DEVICE int visiting_key_tiles(const KernelParams& params, const ShortSequence& seq, int b,
                                     int64 first_map_row, int row_tile, int begin, int end) {
  static_assert(kTilesOfMapWord % kTiles == 0 && (kKeyTiles == 1 || !kConfig.tile_map));
  const int word = row_tile / kTilesOfMapWord, shift = row_tile % kTilesOfMapWord;
  int sum = 0;
#pragma unroll 1
  for (int tile = begin + lane_index(); tile < end; tile += 32) {
    uint32 visible = (1u << kTiles) - 1;
    if constexpr (kConfig.tile_map) {
      visible &= TileMap<kConfig>::at(params, first_map_row + tile).bits(word).visible >> shift;
    }
    // Also without intervals: where sequences overlap, a map row has bits behind the end of one.
    const ShortInterval rows = row_tiles_of_keys<kConfig, kKeyTiles>(params.problem, seq, b, tile);
    visible &= TileMap<kConfig>::bit_range(rows.begin - row_tile, rows.end - row_tile);
    sum += visible != 0;
  }
  return sum_of_warp(sum);
}

}  // namespace regard
