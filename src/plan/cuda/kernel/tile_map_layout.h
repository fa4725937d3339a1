// The tile map of a mask: which tiles of a main kernel hold a visible pair, and which hold visible
// pairs only, as far as the bool mask and spans say.
//
// The map has a row for each tile that a block of the main kernel owns: a tile of query rows
// forward, a tile of keys backward. A row has two bits for each tile of the other side, 32 tiles a
// word: visible in the lower half, full in the upper half. Heads and batch entries that share mask
// and spans share rows of the map.
//
// Behind the map are the bits of a mask's pairs, if the main kernel reads them
// (MaskForm::as_bits), as its lanes want them. A lane has two neighbouring columns of every eight
// of a tile (span_bits.cuh). Tiles lie as in the map. A line of a tile has a word of 16, 32 or 64
// bits for each of the four lanes that share it: bit 2 n + e is the lane's column e of block n.
// Forward, a line is a query row and its columns are keys; backward (transposed) a line is a key
// and its columns are query rows.
//
// Behind these is the order in which own tiles begin: those with the most visible tiles first, so
// that blocks end at about the same time. (Tiles of keys: by sixteenths of the largest number.)
// Behind it stands of how many heads at the end of a launch the tiles begin together: a long tile
// of the last head alone would begin when most multiprocessors have nothing left to do.
#pragma once

#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard {

inline constexpr int kTilesOfMapWord = 32;
inline constexpr int kTilesOfMapGroup = 8;  // whose bits are made together: a byte of each half

// Whether own tiles are tiles of keys: in the kernel that makes the map, and in the one that reads
// it.
REGARD_INLINE bool maps_keys(const KernelConfig& c) {
  return c.kernel == Kernel::key_map || c.kernel == Kernel::backward;
}
REGARD_INLINE int own_tile(const KernelConfig& c) {
  return maps_keys(c) ? c.tiling.keys : c.tiling.rows;
}
REGARD_INLINE int other_tile(const KernelConfig& c) {
  return maps_keys(c) ? c.tiling.rows : c.tiling.keys;
}

// The heads and batch entries that have map rows of their own.
REGARD_INLINE int64 map_heads(const Problem& p) {
  const Features& on = p.features;
  const bool differ = (on.mask && p.mask.strides.head != 0) ||
                      (on.row_spans && p.row_spans.view.strides.head != 0) ||
                      (on.key_spans && p.key_spans.view.strides.head != 0);
  return differ ? p.sizes.heads_q : 1;
}
REGARD_INLINE int64 map_batch(const Problem& p) {
  const Features& on = p.features;
  const bool differ = p.varlen || (on.mask && p.mask.strides.batch != 0) ||
                      (on.row_spans && p.row_spans.view.strides.batch != 0) ||
                      (on.key_spans && p.key_spans.view.strides.batch != 0);
  return differ ? p.sizes.batch : 1;
}

// Own tiles of the longest sequence, and map rows of a head over the batch.
REGARD_INLINE int64 own_tiles(const Problem& p, const KernelConfig& c) {
  return divide_up(maps_keys(c) ? p.sizes.len_k : p.sizes.len_q, own_tile(c));
}
REGARD_INLINE int64 map_rows_of_head(const Problem& p, const KernelConfig& c) {
  if (!p.packed) return map_batch(p) * own_tiles(p, c);
  return (maps_keys(c) ? p.sizes.rows_k : p.sizes.rows_q) / own_tile(c) + p.sizes.batch;
}
// `first`: the sequence's first row or key in a packed batch. Sequences begin with a row of their
// own.
REGARD_INLINE int64 map_row(const Problem& p, const KernelConfig& c, int64 b, int64 h, int64 first,
                            int64 tile) {
  const int64 of_entry = p.packed            ? first / own_tile(c) + b
                         : map_batch(p) == 1 ? 0
                                             : b * own_tiles(p, c);
  return (map_heads(p) == 1 ? 0 : h * map_rows_of_head(p, c)) + of_entry + tile;
}

REGARD_INLINE int64 other_tiles(const Problem& p, const KernelConfig& c) {
  return divide_up(maps_keys(c) ? p.sizes.len_q : p.sizes.len_k, other_tile(c));
}
REGARD_INLINE int64 map_words(const Problem& p, const KernelConfig& c) {
  return divide_up(other_tiles(p, c), kTilesOfMapWord);
}
REGARD_INLINE int64 map_groups(const Problem& p, const KernelConfig& c) {
  return map_words(p, c) * (kTilesOfMapWord / kTilesOfMapGroup);
}
inline constexpr int kMapWordBytes = 8;

REGARD_INLINE int64 map_rows(const Problem& p, const KernelConfig& c) {
  return map_heads(p) * map_rows_of_head(p, c);
}
// The sizes of a mask's bits, in bytes: of a lane, a line and a tile.
REGARD_INLINE int mask_lane_bytes(const KernelConfig& c) {
  return other_tile(c) <= 64 ? 2 : other_tile(c) <= 128 ? 4 : 8;
}
REGARD_INLINE int mask_line_bytes(const KernelConfig& c) { return 4 * mask_lane_bytes(c); }
REGARD_INLINE int mask_tile_bytes(const KernelConfig& c) {
  return own_tile(c) * mask_line_bytes(c);
}
// What lies behind the map, as offsets in its words. The bits begin at a multiple of 16 bytes.
REGARD_INLINE int64 mask_bits_at(const Problem& p, const KernelConfig& c) {
  return round_up(map_rows(p, c) * map_words(p, c), c.mask.as_bits ? 2 : 1);
}
REGARD_INLINE int64 mask_words_of_row(const Problem& p, const KernelConfig& c) {
  return c.mask.as_bits ? other_tiles(p, c) * (mask_tile_bytes(c) / kMapWordBytes) : 0;
}

// Behind the bits are, for each row, the visible tiles, then the order, as the tile of each rank of
// a sequence; then for each head and batch entry that has map rows, how many blocks have arrived.
REGARD_INLINE int64 map_counts_at(const Problem& p, const KernelConfig& c) {
  return mask_bits_at(p, c) + map_rows(p, c) * mask_words_of_row(p, c);
}
REGARD_INLINE int64 map_arrivals_at(const Problem& p, const KernelConfig& c) {
  return map_counts_at(p, c) + map_rows(p, c);
}
// And for each of these, how many heads begin together at the end.
REGARD_INLINE int64 map_last_heads_at(const Problem& p, const KernelConfig& c) {
  return map_arrivals_at(p, c) + map_heads(p) * map_batch(p);
}

}  // namespace regard
