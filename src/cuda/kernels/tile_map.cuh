// Makes the tile map of a mask (tile_map_layout.h): blocks for each own tile, which share the
// groups of eight tiles of the other side.
//
// A tile counts as visible where the bool mask shows one of its pairs, the spans of some row reach
// one of its keys, and the spans of some key reach one of its rows. That holds for every tile with
// a visible pair, and for few others. It counts as full where the mask shows every pair, and one
// span of each row, and of each key, covers the tile.
#pragma once

#include "cuda/kernels/mask_bits.cuh"
#include "cuda/kernels/tile/mask_bits.cuh"
#include "cuda/kernels/tile/score_tile.cuh"
#include "cuda/kernels/tile/tile_map.cuh"
#include "cuda/kernels/tile_order.cuh"

namespace regard {

template <KernelConfig kConfig>
struct MapBlock {
  static constexpr Features kOn = kConfig.features;
  static constexpr bool kOfKeys = maps_keys(kConfig);
  static constexpr bool kOwnSpans = kOfKeys ? kOn.key_spans : kOn.row_spans;
  static constexpr bool kOtherSpans = kOfKeys ? kOn.row_spans : kOn.key_spans;
  static constexpr int kOwn = own_tile(kConfig), kOther = other_tile(kConfig);
  static constexpr int kWarps = kConfig.tiling.warps, kThreads = kWarps * 32;
  static constexpr uint32 kGroupBits = (1u << kTilesOfMapGroup) - 1;
  using Map = TileMap<kConfig>;
  using Seen = SeenTiles;

  const Problem& p;
  const ShortSequence seq;
  const int b, h;
  const int first, end;  // of the own tile
  uint8* const bits;     // of the mask's pairs, if they are wanted

  REGARD_DEVICE int other_length() const { return kOfKeys ? seq.len_q : seq.len_k; }
  // Behind the last row (or key) of a group's tiles.
  REGARD_DEVICE int end_of_group(int first_tile) const {
    const int64 end = (int64(first_tile) + kTilesOfMapGroup) * kOther;
    return int(smaller<int64>(end, other_length()));
  }

  // ---------------------------------------------------------------------------------------- spans

  // The spans of a row (kOfKeys: of a key) of the own tile: which other tiles they reach.
  REGARD_DEVICE void add_own_spans(Seen& seen, int first_tile) const {
    const SpanView& view = kOfKeys ? p.key_spans : p.row_spans;
    const int length = other_length();
#pragma unroll 1
    for (int own = first + thread_index(); own < end; own += kThreads) {
      const Spans spans = spans_of(view, b, h, kOfKeys ? seq.first_k : seq.first_q, own);
      uint32 covered = 0;
#pragma unroll 1
      for (int n = 0; n < spans.count; ++n) {
        const int from = int(clamp_to<int64>(spans[n].begin, 0, length));
        const int to = int(clamp_to<int64>(spans[n].end, 0, length));
        if (from >= to) continue;
        seen.shown |=
            Map::bit_range(from / kOther - first_tile, (to - 1) / kOther + 1 - first_tile);
        const int last_whole = to == length ? (to - 1) / kOther + 1 : to / kOther;
        covered |=
            Map::bit_range((from + kOther - 1) / kOther - first_tile, last_whole - first_tile);
      }
      seen.hidden |= ~covered;
    }
  }
  // The spans of each key (kOfKeys: row) of the group's tiles: whether they reach the own tile.
  REGARD_DEVICE void add_other_spans(Seen& seen, int first_tile) const {
    const SpanView& view = kOfKeys ? p.row_spans : p.key_spans;
    const int last = end_of_group(first_tile);
#pragma unroll 4  // loads at once
    for (int other = first_tile * kOther + thread_index(); other < last; other += kThreads) {
      const Spans spans = spans_of(view, b, h, kOfKeys ? seq.first_q : seq.first_k, other);
      bool reaches = false, covers = false;
#pragma unroll 1
      for (int n = 0; n < spans.count; ++n) {
        const Interval span = spans[n];
        reaches = reaches || larger<int64>(span.begin, first) < smaller<int64>(span.end, end);
        covers = covers || (span.begin <= first && end <= span.end);
      }
      const uint32 bit = 1u << (other / kOther - first_tile);
      if (reaches) seen.shown |= bit;
      if (!covers) seen.hidden |= bit;
    }
  }

  // ----------------------------------------------------------------------------------------- mask

  // Bytes of a row of the mask that are read at once: 16, 4 or 1.
  static constexpr int kChunk = kConfig.mask.copy_bytes == 8 ? 4 : kConfig.mask.copy_bytes;

  REGARD_DEVICE static void add_bytes(Seen& seen, uint32 bit, uint32 bytes) {
    if (bytes != 0) seen.shown |= bit;
    if (((bytes - 0x01010101u) & ~bytes & 0x80808080u) != 0) seen.hidden |= bit;  // a byte is 0
  }
  REGARD_DEVICE static void add_chunk(Seen& seen, uint32 bit, const uint8* from) {
    if constexpr (kChunk == 16) {
      const Bits128 x = load_global_128(from);
#pragma unroll
      for (int w = 0; w < 4; ++w) add_bytes(seen, bit, x.word[w]);
    } else if constexpr (kChunk == 4) {
      add_bytes(seen, bit, *reinterpret_cast<const uint32*>(from));
    } else {
      add_byte(seen, bit, from);
    }
  }
  REGARD_DEVICE static void add_byte(Seen& seen, uint32 bit, const uint8* from) {
    (*from != 0 ? seen.shown : seen.hidden) |= bit;
  }

  // A mask that all rows, or all keys, share is read once, and what it says holds for all tiles.
  REGARD_DEVICE void add_mask(Seen& seen, int first_tile) const {
    const Strides& s = p.mask.strides;
    const ShortInterval own{first, end}, other{first_tile * kOther, end_of_group(first_tile)};
    ShortInterval rows = kOfKeys ? other : own, keys = kOfKeys ? own : other;
    const bool one_row = s.row == 0, one_key = s.column == 0;
    if (one_row) rows.end = smaller(rows.end, rows.begin + 1);
    if (one_key) keys.end = smaller(keys.end, keys.begin + 1);
    const int chunks = larger(keys.end - keys.begin + kChunk - 1, 0) / kChunk;
    const int count = larger(rows.end - rows.begin, 0) * chunks;
    const uint8* const mask = static_cast<const uint8*>(p.mask.data) + offset_of(s, b, h, 0, 0);
#pragma unroll 8  // loads at once
    for (int n = thread_index(); n < count; n += kThreads) {
      const int row = n / chunks, i = rows.begin + row;
      const int j = keys.begin + (n - row * chunks) * kChunk;
      const uint32 bit =
          (kOfKeys ? one_row : one_key) ? ~0u : 1u << ((kOfKeys ? i : j) / kOther - first_tile);
      const uint8* const from = mask + i * s.row + j * s.column;
      if (j + kChunk <= keys.end) {
        add_chunk(seen, bit, from);
      } else {
        for (int e = 0; j + e < keys.end; ++e) add_byte(seen, bit, from + e);
      }
    }
  }

  REGARD_DEVICE MaskPacker<kConfig> packer() const {
    const Strides& s = p.mask.strides;
    return {.mask = static_cast<const uint8*>(p.mask.data) + offset_of(s, b, h, 0, 0),
            .row = s.row,
            .column = s.column,
            .first = first,
            .end = end,
            .other_length = other_length(),
            .bits = bits};
  }

  // -------------------------------------------------------------------------------------- a group

  // What any thread has seen. `words`: a word of each warp, with the bits of both kinds.
  static REGARD_DEVICE Seen any_thread(const Seen& own, uint32* words) {
    static_assert(2 * kTilesOfMapGroup <= 32);
    uint32 both = (own.hidden << kTilesOfMapGroup | (own.shown & kGroupBits));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) both |= shuffle_xor(both, lanes);
    sync_block();  // the words before have been read
    if (lane_index() == 0) words[warp_index()] = both;
    sync_block();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) both |= words[warp];
    return {both & kGroupBits, both >> kTilesOfMapGroup & kGroupBits};
  }

  REGARD_DEVICE typename Map::Bits bits_of_group(int first_tile) const {
    uint32* const words = &shared_memory<uint32>();
    const int tiles = (other_length() + kOther - 1) / kOther;
    uint32 visible = Map::bit_range(0, smaller(tiles - first_tile, kTilesOfMapGroup)), hidden = 0;
    const auto take = [&](const Seen& own) {
      const Seen seen = any_thread(own, words);
      visible &= seen.shown;
      hidden |= seen.hidden;
    };
    if constexpr (kOwnSpans) {
      Seen seen;
      add_own_spans(seen, first_tile);
      take(seen);
    }
    if constexpr (kOtherSpans) {
      Seen seen;
      add_other_spans(seen, first_tile);
      take(seen);
    }
    if constexpr (kOn.mask) {
      Seen seen;
      if constexpr (kConfig.mask.as_bits) {
        packer().pack(seen, first_tile, smaller(first_tile + kTilesOfMapGroup, tiles));
      } else {
        add_mask(seen, first_tile);
      }
      take(seen);
    }
    return {visible, visible & ~hidden};
  }
};

template <KernelConfig kConfig>
REGARD_DEVICE void tile_map(const KernelParams& params) {
  using Block = MapBlock<kConfig>;
  const Problem& p = params.problem;
  const BlockCoords coords = block_coords(params, block_index());
  const int heads = int(map_heads(p)), b = coords.head / heads, h = coords.head % heads;
  const ShortSequence seq = short_sequence<kConfig>(p, b);
  const int length = Block::kOfKeys ? seq.len_k : seq.len_q, first = coords.tile * Block::kOwn;
  const int first_own = Block::kOfKeys ? seq.first_k : seq.first_q;
  if (first < length) {
    const int64 row = map_row(p, kConfig, b, h, first_own, coords.tile);
    const Block block{p,
                      seq,
                      b,
                      h,
                      first,
                      first + smaller(Block::kOwn, length - first),
                      mask_bits_of_row<kConfig>(params, row)};
    uint64* const to = params.buffers.tile_map + row * map_words(p, kConfig);
    const int groups = int(map_groups(p, kConfig));
#pragma unroll 1
    for (int group = coords.split; group < groups; group += params.grid.splits) {
      const auto bits = block.bits_of_group(group * kTilesOfMapGroup);
      if (thread_index() == 0) Block::Map::write_group(to, group, bits);
    }
  }
  if constexpr (kConfig.tile_order) {
    TileOrder<kConfig>{params, seq, b, coords.head, map_row(p, kConfig, b, h, first_own, 0)}.run();
  }
}

}  // namespace regard
