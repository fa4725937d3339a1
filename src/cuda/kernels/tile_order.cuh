// The order in which own tiles of a main kernel begin (tile_map_layout.h): the last block of a
// sequence that has made its part of the tile map compares the tiles.
#pragma once

#include "cuda/kernels/tile/nonce_counter.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/tile_map.cuh"

namespace regard {

template <KernelConfig kConfig>
struct TileOrder {
  static constexpr bool kOfKeys = maps_keys(kConfig);
  static constexpr int kOwn = own_tile(kConfig), kOther = other_tile(kConfig);
  static constexpr int kThreads = kConfig.tiling.warps * 32;
  // Tiles of keys of about one length begin in the order of their keys, because neighbours then
  // read the same rows at the same time.
  static constexpr int kClasses = 16;

  const KernelParams& params;
  const ShortSequence seq;
  const int b;
  const int sequence;  // among those with map rows
  const int64 row;     // of the map: of the sequence's first tile

  REGARD_DEVICE void run() const {
    if (!is_last_block()) return;
    const int tiles = ((kOfKeys ? seq.len_k : seq.len_q) + kOwn - 1) / kOwn;
    int32* const counts = map_counts<kConfig>(params) + row;
    int32* const order = map_order<kConfig>(params) + row;
#pragma unroll 1
    for (int tile = thread_index(); tile < tiles; tile += kThreads) counts[tile] = count(tile);
    sync_block();
    const auto [most, sum] = most_and_sum(counts, tiles);
    if (thread_index() == 0) write_last_heads(most, sum);
    if constexpr (kOfKeys) {
      sync_block();
#pragma unroll 1
      for (int tile = thread_index(); tile < tiles; tile += kThreads) {
        counts[tile] = counts[tile] * kClasses / most;
      }
      sync_block();
    }
#pragma unroll 1
    for (int tile = thread_index(); tile < tiles; tile += kThreads) {
      order[rank_of(tile, counts, tiles)] = tile;
    }
  }

 private:
  REGARD_DEVICE bool is_last_block() const {
    int& is_last = shared_memory<int>();
    sync_block();  // shared memory has been read
    if (thread_index() == 0) {
      fence_device();
      const uint32 blocks = uint32(params.grid.tiles) * uint32(params.grid.splits);
      const NonceCounter arrivals{
          params.buffers.tile_map + map_arrivals_at(params.problem, kConfig) + sequence,
          params.nonce};
      arrivals.begin(blocks);
      is_last = arrivals.next() == blocks - 1;
      fence_device();
    }
    sync_block();
    return is_last != 0;
  }

  // The tiles of the other side that are visible to an own tile, as far as intervals say.
  REGARD_DEVICE ShortInterval other_tiles(int tile) const {
    if constexpr (kOfKeys) return row_tiles_of_keys<kConfig>(params.problem, seq, b, tile);
    const int first = tile * kOwn, last = smaller(first + kOwn, seq.len_q) - 1;
    ShortInterval keys{0, seq.len_k};
    if constexpr (kConfig.features.interval) {
      const auto band = band_of<kConfig>(params.problem, seq, b);
      keys = {band.begin_of(first), band.end_of(last)};
    }
    return {keys.begin / kOther, (keys.end + kOther - 1) / kOther};
  }
  REGARD_DEVICE int count(int tile) const {
    using Map = TileMap<kConfig>;
    const ShortInterval others = other_tiles(tile);
    const uint64* const bits =
        params.buffers.tile_map + (row + tile) * map_words(params.problem, kConfig);
    int sum = 0;
#pragma unroll 4
    for (int word = others.begin / kTilesOfMapWord; word * kTilesOfMapWord < others.end; ++word) {
      const int first = word * kTilesOfMapWord;
      sum += count_bits(uint32(load_relaxed(bits + word)) &
                        Map::bit_range(others.begin - first, others.end - first));
    }
    return sum;
  }
  struct MostAndSum {
    int most, sum;  // at least 1
  };
  static REGARD_DEVICE MostAndSum most_and_sum(const int32* counts, int tiles) {
    int most = 1, sum = 0;
#pragma unroll 8
    for (int tile = 0; tile < tiles; ++tile) {
      most = larger(most, counts[tile]);
      sum += counts[tile];
    }
    return {most, larger(sum, 1)};
  }
  // As many heads as keep all multiprocessors busy for one and a half times as long as the longest
  // tile takes.
  REGARD_DEVICE void write_last_heads(int most, int sum) const {
    const int64 halves = int64(multiprocessor_count()) * most * 3;
    params.buffers.tile_map[map_last_heads_at(params.problem, kConfig) + sequence] =
        uint64(divide_up(halves, 2 * int64(sum)));
  }
  // How many tiles begin before this one.
  static REGARD_DEVICE int rank_of(int tile, const int32* counts, int tiles) {
    const int32 own = counts[tile];
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < tiles; ++other) {
      rank += counts[other] > own || (counts[other] == own && other < tile);
    }
    return rank;
  }
};

}  // namespace regard
