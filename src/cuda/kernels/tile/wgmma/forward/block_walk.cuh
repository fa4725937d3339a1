// The walk of a tile of rows over its blocks of keys, from the last block to the first. With a tile
// map, the bits of the word at which the walk stands are in registers, so that most steps read no
// memory.
#pragma once

#include "cuda/kernels/tile/wgmma/forward/memory.cuh"

namespace regard {

// kShared: the lanes of a warp walk together, and the walk is warp-uniform.
template <KernelConfig kConfig, bool kShared = false, bool kMapped = kConfig.tile_map>
struct BlockWalk {
  int index = 0;  // of the present block

  REGARD_DEVICE void begin(const ForwardTile<kConfig>& tile) {
    index = tile.first_block + tile.blocks - 1;
  }
  REGARD_DEVICE VisibleTile block() const { return {index, true}; }
  REGARD_DEVICE void advance(const KernelParams&, const ForwardTile<kConfig>&) { --index; }
};

template <KernelConfig kConfig, bool kShared>
struct BlockWalk<kConfig, kShared, true> {
  using Bits = typename TileMap<kConfig>::Bits;

  Bits bits{};    // visible: the present block and those before it
  int first = 0;  // index of the word's first block

  REGARD_DEVICE void begin(const ForwardTile<kConfig>& tile) {
    first = uniform(tile.last_word) * kTilesOfMapWord;
    bits = {uniform(tile.last_bits.visible), uniform(tile.last_bits.full)};
  }
  REGARD_DEVICE VisibleTile block() const {
    const int bit = kTilesOfMapWord - 1 - leading_zeros(bits.visible);
    return {first + bit, (bits.full >> bit & 1) != 0};
  }
  // Moves to the block before. There must be one.
  REGARD_DEVICE void advance(const KernelParams& params, const ForwardTile<kConfig>& tile) {
    bits.visible ^= 0x80000000u >> leading_zeros(bits.visible);
#pragma unroll 1
    while (bits.visible == 0) {
      first -= kTilesOfMapWord;
      const Bits read = TileMap<kConfig>::at(params, tile.map_row).bits(first / kTilesOfMapWord);
      bits = {uniform(read.visible), uniform(read.full)};
    }
  }

 private:
  static REGARD_DEVICE int uniform(int x) { return kShared ? shuffle(x, 0) : x; }
  static REGARD_DEVICE uint32 uniform(uint32 x) { return uint32(uniform(int(x))); }
};

}  // namespace regard
