// How main kernels read the tile map of a mask (tile_map_layout.h). Without a map every tile is
// visited, and none needs a test.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx.cuh"
#include "plan/cuda/kernel/tile_map_layout.h"

namespace regard {

// The visible tiles of each row of the map, and behind them the order of own tiles.
template <KernelConfig kConfig>
REGARD_DEVICE int32* map_counts(const KernelParams& params) {
  return reinterpret_cast<int32*>(params.buffers.tile_map + map_counts_at(params.problem, kConfig));
}
template <KernelConfig kConfig>
REGARD_DEVICE int32* map_order(const KernelParams& params) {
  return map_counts<kConfig>(params) + map_rows(params.problem, kConfig);
}

// The own tile that begins at the given rank of its sequence, which has the map rows of b and h.
// Sequences that overlap share map rows, and may spoil each other's order: any tile of the sequence
// is safe.
template <KernelConfig kConfig>
REGARD_DEVICE int tile_of_rank(const KernelParams& params, int64 b, int64 h, int64 first,
                               int length, int rank) {
  if constexpr (!kConfig.tile_order) return rank;
  const Problem& p = params.problem;
  const uint32 tiles = (uint32(length) + own_tile(kConfig) - 1) / own_tile(kConfig);
  if (uint32(rank) >= tiles) return rank;
  const int64 row = map_row(p, kConfig, b, h, first, 0);
  const int tile = map_order<kConfig>(params)[row + rank];
  return uint32(tile) < tiles ? tile : rank;
}

// Whether the own tiles of the last heads begin together. Not where a backward pass reads the bits
// of a mask: under the power limit, the kernel took 1.04 to 1.07 times the time.
template <KernelConfig kConfig>
inline constexpr bool kJoinsLastHeads =
    kConfig.tile_order && !(maps_keys(kConfig) && kConfig.mask.as_bits);

// The order in which own tiles begin, over heads: of the last heads the longest tiles begin first,
// then the next ones of these heads, and so on; others begin in groups, as everywhere.
template <KernelConfig kConfig>
struct HeadOrder {
  int first_joined = 0;  // of the last heads

  static REGARD_DEVICE HeadOrder of(const KernelParams& params) {
    if constexpr (!kJoinsLastHeads<kConfig>) return {};
    const Problem& p = params.problem;
    const BlockGrid& grid = params.grid;
    const int64 at = map_last_heads_at(p, kConfig) + map_heads(p) * map_batch(p) - 1;
    const int last = int(clamp_to<uint64>(params.buffers.tile_map[at], 1, uint64(grid.heads)));
    return {(grid.heads - last) / grid.heads_per_group * grid.heads_per_group};
  }

  REGARD_DEVICE BlockCoords coords(const KernelParams& params, int block) const {
    const BlockGrid& grid = params.grid;
    const int rest = block - first_joined * grid.tiles * grid.splits;
    if (!kJoinsLastHeads<kConfig> || rest < 0 || grid.batch > 1) return block_coords(params, block);
    const int joined = grid.heads - first_joined, tile = rest / joined;
    return {.head = first_joined + rest % joined,
            .tile = tile % grid.tiles,
            .split = tile / grid.tiles};
  }
};

// A tile of a walk over visible tiles.
struct VisibleTile {
  int index;
  bool is_full;  // mask and spans show every pair
};
// The same of a block of keys.
struct KeyBlock {
  int first_key;
  bool is_full;
};

// The sum of what the lanes of a warp counted.
REGARD_DEVICE int sum_of_warp(int count) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) count += shuffle_xor(count, lanes);
  return count;
}

template <KernelConfig kConfig>
struct TileMap {
  static constexpr bool kExists = kConfig.tile_map;

  // Bits of 32 neighbouring tiles.
  struct Bits {
    uint32 visible, full;
  };

  const uint64* row = nullptr;  // of the map

  static REGARD_DEVICE TileMap at(const KernelParams& params, int64 map_row) {
    if constexpr (!kExists) return {};
    return {params.buffers.tile_map + map_row * map_words(params.problem, kConfig)};
  }

  REGARD_DEVICE Bits bits(int word) const {
    const uint64 both = row[word];
    return {uint32(both), uint32(both >> 32)};
  }
  // The bits of a group in a row of the map.
  static REGARD_DEVICE void write_group(uint64* row, int group, const Bits& bits) {
    constexpr int kGroups = kTilesOfMapWord / kTilesOfMapGroup;
    uint8* const word = reinterpret_cast<uint8*>(row + group / kGroups) + group % kGroups;
    word[0] = uint8(bits.visible);
    word[kGroups] = uint8(bits.full);
  }
  // The first visible tile from `tile` on; `end` where there is none.
  REGARD_DEVICE VisibleTile first_from(int tile, int end) const {
    if constexpr (!kExists) return {tile, true};
#pragma unroll 1
    while (tile < end) {
      const Bits now = bits(tile / kTilesOfMapWord);
      const uint32 left = now.visible >> tile % kTilesOfMapWord;
      if (left != 0) {
        const int found = tile + lowest_bit(left);
        return {smaller(found, end), (now.full >> found % kTilesOfMapWord & 1) != 0};
      }
      tile = (tile / kTilesOfMapWord + 1) * kTilesOfMapWord;
    }
    return {end, true};
  }
  // A lane's part of the visible tiles of [begin, end), which a warp counts together.
  REGARD_DEVICE int count_of_lane(int begin, int end) const {
    int sum = 0;
    const int first_word = begin / kTilesOfMapWord + lane_index();
#pragma unroll 1
    for (int first = first_word * kTilesOfMapWord; first < end; first += 32 * kTilesOfMapWord) {
      const Bits now = bits(first / kTilesOfMapWord);
      sum += count_bits(now.visible & bit_range(begin - first, end - first));
    }
    return sum;
  }
  // The bits from `begin` to `end`, cut to a word.
  static REGARD_DEVICE uint32 bit_range(int begin, int end) {
    return low_bits(end) & ~low_bits(begin);
  }
  static REGARD_DEVICE uint32 low_bits(int count) {
    return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1;
  }
};

}  // namespace regard
