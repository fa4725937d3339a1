// Makes the bits of a mask's pairs (tile_map_layout.h), next to the tile map.
#pragma once

#include "cuda/kernels/params.h"
#include "cuda/kernels/ptx.cuh"
#include "plan/cuda/kernel/tile_map_layout.h"

namespace regard {

// The tiles of a group in which a source shows some pair, and in which it may hide one.
struct SeenTiles {
  uint32 shown = 0, hidden = 0;
};

// Makes the bits of one own tile, with all threads of the block.
template <KernelConfig kConfig>
struct MaskPacker {
  static constexpr bool kOfKeys = maps_keys(kConfig);
  static constexpr int kOwn = own_tile(kConfig), kOther = other_tile(kConfig);
  static constexpr int kThreads = kConfig.tiling.warps * 32;
  static constexpr int kLaneBytes = mask_lane_bytes(kConfig), kLineBytes = mask_line_bytes(kConfig);
  static constexpr int kParts = kLaneBytes / 2;  // of 64 columns, 16 bits of a lane
  static_assert(kOwn % 16 == 0 && kOther % 16 == 0);

  // A line's bits: the halves of word [part][x] are those of lanes 2 x and 2 x + 1.
  using Line = uint32[kParts][2];

  const uint8* const mask;  // of the first row and key
  const int64 row, column;  // strides
  const int first, end;     // of the own tile
  const int other_length;
  uint8* const bits;  // of the own tile and the first tile of the other side

  REGARD_DEVICE void pack(SeenTiles& seen, int first_tile, int end_tile) const {
    constexpr int kLines = kOfKeys ? 4 : 1;  // at once
    constexpr int kItems = kOwn / kLines;    // of a tile
    const int count = (end_tile - first_tile) * kItems;
#pragma unroll 1
    for (int n = thread_index(); n < count; n += kThreads) {
      const int tile = first_tile + n / kItems, line = n % kItems * kLines;
      Line lines[kLines] = {};
      if constexpr (kOfKeys) {
        pack_keys(lines, line, tile * kOther);
      } else {
        pack_row(lines[0], line, tile * kOther);
      }
      write(lines, line, tile);
      look(seen, lines, line, tile, 1u << (tile - first_tile));
    }
  }

 private:
  // --------------------------------------------------------------------------- bytes of a mask

  // Bits 0, 8, 16 and 24: whether a byte is not 0.
  static REGARD_DEVICE uint32 flags_of(uint32 bytes) {
    return (((bytes & 0x7f7f7f7f) + 0x7f7f7f7f) | bytes) >> 7 & 0x01010101;
  }
  // Four neighbouring keys of a row, of which `left` exist. The others are hidden.
  REGARD_DEVICE uint32 four_bytes(const uint8* from, int left) const {
    if constexpr (kConfig.mask.copy_bytes >= 4) {
      if (left >= 4) return *reinterpret_cast<const uint32*>(from);
    }
    uint32 bytes = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < left) bytes |= uint32(from[e * column]) << 8 * e;
    }
    return bytes;
  }
  REGARD_DEVICE Bits128 sixteen_bytes(const uint8* from, int left) const {
    if constexpr (kConfig.mask.copy_bytes == 16) {
      if (left >= 16) return load_global_128(from);
    }
    Bits128 bytes;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      bytes.word[w] = left > 4 * w ? four_bytes(from + 4 * w * column, left - 4 * w) : 0;
    }
    return bytes;
  }

  // -------------------------------------------------------------------------------------- packing

  // Columns e and e + 1 of four: bits 0 and 1 for e = 0, bits 16 and 17 for e = 2.
  static REGARD_DEVICE uint32 pairs_of(uint32 bytes) {
    const uint32 flags = flags_of(bytes);
    return (flags | flags >> 7) & 0x00030003;
  }
  // Lines are rows, whose columns lie side by side.
  REGARD_DEVICE void pack_row(Line& to, int line, int first_key) const {
    if (first + line >= end) return;
    const uint8* const from = mask + (first + line) * row + first_key * column;
#pragma unroll
    for (int chunk = 0; chunk < kOther / 16; ++chunk) {
      const int left = other_length - first_key - chunk * 16;
      if (left <= 0) continue;
      const Bits128 x = sixteen_bytes(from + chunk * 16 * column, left);
      uint32* const lanes = to[chunk / 4];
      lanes[0] |= (pairs_of(x.word[0]) | pairs_of(x.word[2]) << 2) << chunk % 4 * 4;
      lanes[1] |= (pairs_of(x.word[1]) | pairs_of(x.word[3]) << 2) << chunk % 4 * 4;
    }
  }
  // Lines are four neighbouring keys, and columns rows.
  REGARD_DEVICE void pack_keys(Line (&to)[4], int line, int first_row) const {
    const int left = end - first - line;
    if (left <= 0) return;
    const uint8* const from = mask + first_row * row + (first + line) * column;
#pragma unroll
    for (int part = 0; part < kOther; part += 32) {
      uint32 flags[4] = {};  // of a lane's eight rows of 32: a byte for each key
#pragma unroll
      for (int r = 0; r < smaller(32, kOther - part); ++r) {
        if (first_row + part + r >= other_length) continue;
        const uint32 keys = flags_of(four_bytes(from + (part + r) * row, left));
        flags[r % 8 / 2] |= keys << (r / 8 * 2 + r % 2);
      }
#pragma unroll
      for (int key = 0; key < 4; ++key) {
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
          const uint32 byte = flags[lane] >> 8 * key & 0xff;
          to[key][part / 64][lane / 2] |= byte << (lane % 2 * 16 + part % 64 / 4);
        }
      }
    }
  }

  // --------------------------------------------------------------------------------------- results

  template <int kLines>
  REGARD_DEVICE void write(const Line (&lines)[kLines], int line, int tile) const {
    uint8* to = bits + int64(tile) * mask_tile_bytes(kConfig) + line * kLineBytes;
#pragma unroll
    for (int n = 0; n < kLines; ++n, to += kLineBytes) {
      const Line& x = lines[n];
      if constexpr (kParts == 1) {
        store_global_64(to, x[0][0], x[0][1]);
        continue;
      }
#pragma unroll
      for (int w = 0; w < kParts / 2; ++w) {  // of a lane
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
          const int shift = lane % 2 * 16;
          const uint32 low = x[2 * w][lane / 2] >> shift & 0xffff;
          const uint32 high = x[2 * w + (kParts > 1)][lane / 2] >> shift;
          reinterpret_cast<uint32*>(to)[lane * (kParts / 2) + w] = low | high << 16;
        }
      }
    }
  }
  template <int kLines>
  REGARD_DEVICE void look(SeenTiles& seen, const Line (&lines)[kLines], int line, int tile,
                          uint32 bit) const {
    const int columns = smaller(other_length - tile * kOther, kOther);
    const int exist = clamp_to(end - first - line, 0, kLines);
    int shown = 0;
#pragma unroll
    for (int n = 0; n < kLines; ++n) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        shown += count_bits(lines[n][part][0]) + count_bits(lines[n][part][1]);
      }
    }
    if (shown > 0) seen.shown |= bit;
    if (shown < exist * columns) seen.hidden |= bit;
  }
};

}  // namespace regard
