// Deterministic gradients with a tile map: how many tiles of keys add to the dq of some rows before
// a block's turn comes.
#pragma once

#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/tile_map.cuh"

namespace regard {

// How many of the key tiles [begin, end) visit one of kTiles tiles of rows, from `row_tile` on.
// `first_map_row`: of the query head's first tile of keys. All lanes of a warp call this.
template <KernelConfig kConfig, int kTiles>
REGARD_DEVICE int visiting_key_tiles(const KernelParams& params, const ShortSequence& seq, int b,
                                     int64 first_map_row, int row_tile, int begin, int end) {
  static_assert(kTilesOfMapWord % kTiles == 0);
  const int word = row_tile / kTilesOfMapWord, shift = row_tile % kTilesOfMapWord;
  int sum = 0;
#pragma unroll 1
  for (int tile = begin + lane_index(); tile < end; tile += 32) {
    uint32 visible = TileMap<kConfig>::at(params, first_map_row + tile).bits(word).visible >> shift;
    // Also without intervals: where sequences overlap, a map row has bits behind the end of one.
    const ShortInterval rows = row_tiles_of_keys<kConfig>(params.problem, seq, b, tile);
    visible &= TileMap<kConfig>::bit_range(rows.begin - row_tile, rows.end - row_tile);
    sum += (visible & ((1u << kTiles) - 1)) != 0;
  }
  return sum_of_warp(sum);
}

}  // namespace regard
