// The tile scheduler of the wgmma forward kernel: which tile of query rows a block takes next.
//
// Where tiles differ in length (intervals, packed batches, tile maps), blocks take them from a
// counter in global memory, unless each tile has its own block; else block i takes tiles i, i +
// blocks, ... The first tile of a block always has the block's index.
//
// A packed sequence may have fewer tiles than the grid has for it, and looking at a tile without
// rows takes about as long as a short tile. Where sequences are short and heads many, a block
// therefore takes a whole head of a sequence at once.
//
// A block that took a tile while it still has a long one before it would keep it from the others.
// An index is therefore fetched shortly before the end of the tile before, but early enough for the
// atomic to return in time.
//
// Where blocks share a tile's keys or columns, what is said of tiles holds for these shares.
//
// The counter needs no clearing (nonce_counter.cuh). A launch fetches exactly `count` times: count
// - blocks times with a tile (or head), and once past the end for each block.
#pragma once

#include "cuda/kernels/tile/nonce_counter.cuh"
#include "cuda/kernels/tile/row_part.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/wgmma/forward/memory.cuh"

namespace regard {

// One thread of the block calls this.
template <KernelConfig kConfig>
struct TileScheduler {
  using Memory = ForwardMemory<kConfig>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys;

  const KernelParams& params;
  // Blocks of keys that are left to load of a tile when the index of the next one is fetched.
  static constexpr int kFetchAhead = 3;

  int index = int(block_index());  // of the next tile; ~index of the last one, if not yet fetched
  int tiles_left = 0;              // of the head that the block has taken
  const HeadOrder<kConfig> heads = HeadOrder<kConfig>::of(params);

  // The next tile that has rows; false, and 0 blocks, where there is none. If the tile is short,
  // the index of the one behind it is fetched too, except for a block's first tile, whose loads
  // must not wait for the atomic.
  REGARD_DEVICE bool next(ForwardTile<kConfig>& tile, bool is_first) {
    const int count = index_count();
    for (;;) {
      if (tiles_left == 0) {
        fetch();
        if (index >= count) break;
        index = ~index;
        tiles_left = takes_heads() ? grid().tiles : 1;
      }
      --tiles_left;
      if (describe(tile, ~index)) {
        if (!is_first && tile.blocks <= kFetchAhead) fetch();
        return true;
      }
    }
    tile.blocks = 0;
    return false;
  }
  // Fetches the index of the next tile, unless that has been done.
  REGARD_DEVICE void fetch() {
    if (index >= 0 || tiles_left > 0) return;
    const int last = ~index;
    if (last == int(block_index())) begin(index_count());
    index = after(last);
  }

  // Divides anew each time: the producer has few registers.
  REGARD_DEVICE int kv_head(const ForwardTile<kConfig>& tile) const {
    uint32 heads = uint32(params.problem.sizes.heads_kv);
    make_opaque(heads);
    return tile.head / int(uint32(params.problem.sizes.heads_q) / heads);
  }

 private:
  REGARD_DEVICE BlockGrid grid() const {
    BlockGrid grid = params.grid;
    uint32 tiles = uint32(grid.tiles);
    make_opaque(tiles);
    grid.tiles = int32(tiles);
    return grid;
  }

  // Whether an index is that of a head, whose tiles a block takes from the last to the first.
  REGARD_DEVICE bool takes_heads() const {
    constexpr int kMostTiles = 4, kLeastHeads = 4;  // a block: enough for blocks to end together
    if constexpr (!kConfig.varlen || !counts_tiles(kConfig) || kConfig.tile_map ||
                  shares_tiles(kConfig)) {
      return false;
    }
    return grid().tiles <= kMostTiles && grid().heads >= kLeastHeads * int(block_count());
  }
  REGARD_DEVICE int index_count() const {
    if constexpr (shares_tiles(kConfig)) return grid().heads * grid().tiles * grid().splits;
    return takes_heads() ? grid().heads : grid().heads * grid().tiles;
  }

  // Before a block's first fetch.
  REGARD_DEVICE void begin(int count) const {
    if constexpr (!counts_tiles(kConfig)) return;
    NonceCounter{params.buffers.tile_counter, params.nonce}.begin(uint32(count));
  }
  // The index of the tile after `last`. Nothing waits for it here.
  REGARD_DEVICE int after(int last) const {
    if constexpr (!counts_tiles(kConfig)) return last + int(block_count());
    return int(block_count()) + int(NonceCounter{params.buffers.tile_counter, params.nonce}.next());
  }

  REGARD_DEVICE BlockCoords coords_of(int mine) const {
    BlockGrid all = grid();
    if (takes_heads()) {
      all.tiles = 1;
      BlockCoords coords = block_coords_unsplit(all, mine);
      coords.tile = tiles_left;
      return coords;
    }
    if constexpr (kConfig.tile_order) return heads.coords(params, mine);
    BlockCoords coords = block_coords(params, mine);
    // The last rows see the most keys under a causal mask: they begin first.
    if constexpr (kConfig.features.interval) coords.tile = all.tiles - 1 - coords.tile;
    return coords;
  }

  // False where the tile has no rows.
  REGARD_DEVICE bool describe(ForwardTile<kConfig>& tile, int mine) const {
    const Problem& p = params.problem;
    BlockCoords coords = coords_of(mine);
    const auto [b, head] = divide(coords.head, params.by.entry);
    const ShortSequence seq = short_sequence<kConfig>(p, b);
    if constexpr (kConfig.tile_order) {
      coords.tile = tile_of_rank<kConfig>(params, b, head, seq.first_q, seq.len_q, coords.tile);
    }
    const int first_row = coords.tile * kRows;
    if (first_row >= seq.len_q) return false;
    const int row_count = smaller(kRows, seq.len_q - first_row);
    int begin = 0, end = seq.len_k;
    if constexpr (kConfig.features.interval) {
      const auto band = band_of<kConfig>(p, seq, b);
      begin = band.begin_of(first_row);
      end = band.end_of(first_row + row_count - 1);
    }
    // The parts of f32, and a map, have no block behind a sequence.
    if constexpr (Memory::kParts > 1 || kConfig.tile_map)
      begin = smaller(begin, larger(seq.len_k - 1, 0));
    ForwardTile<kConfig> x;
    x.first_block = begin / kKeys;
    x.blocks = (end + kKeys - 1) / kKeys - x.first_block;
    x.b = b;
    x.head = head;
    x.first_row = first_row;
    x.row_count = row_count;
    x.len_q = seq.len_q;
    x.len_k = seq.len_k;
    x.first_q = seq.first_q;
    x.first_k = seq.first_k;
    if constexpr (kConfig.tile_map) count_visible(x, coords.tile);
    if constexpr (shares_tiles(kConfig)) x.share = coords.split;
    if constexpr (kConfig.split_kv) {
      tile = x;
      uint32 index = 0;
      make_opaque(index);  // or all of x stays in registers
      return take_share((&tile)[index]);
    }
    // Rows that see no key walk over one block all the same.
    x.blocks = larger(1, x.blocks);
    tile = x;
    return true;
  }
  // Shortens the walk to the blocks of this split. Where it has none, writes its part at once, and
  // returns false.
  REGARD_DEVICE bool take_share(ForwardTile<kConfig>& tile) const {
    const ShortInterval share = tiles_of_split({0, tile.blocks}, params.grid.splits, tile.share);
    tile.blocks = share.end - share.begin;
    if (tile.blocks == 0) {
      write_empty_part(tile);
      return false;
    }
    if constexpr (kConfig.tile_map) {
      begin_walk_at(tile, share.end);
    } else {
      tile.first_block += share.begin;
    }
    return true;
  }
  REGARD_DEVICE void write_empty_part(const ForwardTile<kConfig>& tile) const {
    const Sequence seq{.first_q = tile.first_q};
    const int64 first_row = int64(tile.head) * params.problem.sizes.rows_q +
                            flat_row(params.problem, seq, tile.b, tile.first_row);
    RowPart* part = row_part(params, part_index(params, tile.share, first_row));
#pragma unroll 1
    for (int left = tile.row_count; left > 0; --left) *part++ = part_without_values();
  }
  // The walk begins with visible block number `end` - 1 of the tile.
  REGARD_DEVICE void begin_walk_at(ForwardTile<kConfig>& tile, int end) const {
    const auto map = TileMap<kConfig>::at(params, tile.map_row);
    int word = tile.first_block / kTilesOfMapWord;
    uint32 mask = ~0u << tile.first_block % kTilesOfMapWord;
    for (;; ++word, mask = ~0u) {
      auto bits = map.bits(word);
      bits.visible &= mask;
      const int count = count_bits(bits.visible);
      if (count < end) {
        end -= count;
        continue;
      }
      for (int more = count - end; more > 0; --more) {
        bits.visible ^= 0x80000000u >> leading_zeros(bits.visible);
      }
      tile.last_word = word;
      tile.last_bits = {bits.visible, bits.full};
      return;
    }
  }
  REGARD_DEVICE void count_visible(ForwardTile<kConfig>& tile, int index) const {
    const int begin = tile.first_block, end = begin + tile.blocks;
    tile.map_row = int(map_row(params.problem, kConfig, tile.b, tile.head, tile.first_q, index));
    const auto map = TileMap<kConfig>::at(params, tile.map_row);
    // Rows that see no key walk over one block all the same, and hide every pair of it. Of a
    // sequence without keys there is nothing that a partial block could read.
    const uint32 bit = 1u << begin % kTilesOfMapWord;
    tile.last_word = begin / kTilesOfMapWord;
    tile.last_bits = {bit, tile.len_k == 0 ? bit : 0};
    tile.blocks = 0;
#pragma unroll 2  // loads at once
    for (int word = begin / kTilesOfMapWord; word * kTilesOfMapWord < end; ++word) {
      const int first = word * kTilesOfMapWord;
      const auto bits = map.bits(word);
      const uint32 visible = bits.visible & map.bit_range(begin - first, end - first);
      if (visible == 0) continue;
      tile.blocks += count_bits(visible);
      tile.last_word = word;
      tile.last_bits = {visible, bits.full};
    }
  }
};

}  // namespace regard
