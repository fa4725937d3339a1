// Which part of a problem each block of a GPU kernel works on, and how they share dq.
#pragma once

#include "plan/cuda/kernel/divisor.h"
#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard {

// A kernel's blocks in one dimension: for each group of heads, each tile of each of its heads.
// Heads of a group are interleaved, so that their tiles run together and share the L2 cache.
struct BlockGrid {
  int32 heads = 1;   // batch times heads (query heads, kv heads where a tile serves them all)
  int32 tiles = 1;   // of a head
  int32 splits = 1;  // blocks that share a tile
  int32 heads_per_group = 1;
  int32 batch = 1;  // > 1: the batch entries of a head follow one another, for a bias they share

  REGARD_INLINE int64 blocks() const { return int64(heads) * tiles * splits; }

  bool operator==(const BlockGrid&) const = default;
};

struct BlockCoords {
  int32 head;  // b * heads of a batch entry + h
  int32 tile;
  int32 split;
};

// All of it in 32 bits: a grid has fewer than 2^31 blocks.
REGARD_INLINE BlockCoords block_coords(const BlockGrid& grid, int64 number) {
  const int32 block = int32(number);
  const int32 per_head = grid.tiles * grid.splits;
  if (grid.heads_per_group == 1 &&
      grid.batch == 1) {  // fewer divisions, which decoding would notice
    const int32 head = block / per_head, rest = block - head * per_head;
    const int32 split = grid.splits == 1 ? 0 : rest / grid.tiles;
    return {.head = head, .tile = rest - split * grid.tiles, .split = split};
  }
  const int32 group = block / (per_head * grid.heads_per_group);
  const int32 first = group * grid.heads_per_group;
  const int32 heads = smaller(grid.heads_per_group, grid.heads - first);
  const int32 rest = block - first * per_head;
  const int32 tile = rest / heads;
  const int32 index = first + rest % heads;
  return {.head = index % grid.batch * (grid.heads / grid.batch) + index / grid.batch,
          .tile = tile % grid.tiles,
          .split = tile / grid.tiles};
}

// What blocks divide by to find their place: a grid's numbers, and the problem's.
struct GridDivisors {
  Divisor head;   // blocks of a head
  Divisor tiles;  // of a head
  Divisor group;  // blocks of a group of heads
  Divisor heads_per_group;
  Divisor entry;        // heads of a batch entry
  Divisor query_heads;  // of a key head
  Divisor rows;         // of a head of q

  bool operator==(const GridDivisors&) const = default;
};
GridDivisors divisors_of(const BlockGrid&, const Sizes&);

// The same by divisors_of(grid, sizes).
REGARD_INLINE BlockCoords block_coords(const BlockGrid& grid, const GridDivisors& by,
                                       int64 number) {
  int32 head = 0, rest = 0;
  if (grid.heads_per_group == 1) {
    const Divided at = divide(int32(number), by.head);
    head = at.quotient, rest = at.rest;
  } else {
    const Divided at = divide(int32(number), by.group);
    const int32 first = at.quotient * grid.heads_per_group, left = grid.heads - first;
    if (left >= grid.heads_per_group) {
      const Divided in_group = divide(at.rest, by.heads_per_group);
      head = first + in_group.rest, rest = in_group.quotient;
    } else {
      head = first + at.rest % left, rest = at.rest / left;
    }
  }
  if (grid.batch > 1) head = head % grid.batch * (grid.heads / grid.batch) + head / grid.batch;
  if (grid.splits == 1) return {.head = head, .tile = rest, .split = 0};
  const Divided at = divide(rest, by.tiles);
  return {.head = head, .tile = at.rest, .split = at.quotient};
}

// The same for a grid without splits, in two divisions: a thread that computes it alone
// needs some hundred clocks for each.
REGARD_INLINE BlockCoords block_coords_unsplit(const BlockGrid& grid, int64 number) {
  const uint32 block = uint32(number);
  const uint32 group = block / uint32(grid.tiles * grid.heads_per_group);
  const int32 first = int32(group) * grid.heads_per_group;
  const int32 heads = smaller(grid.heads_per_group, grid.heads - first);
  const int32 rest = int32(block) - first * grid.tiles;
  const int32 tile = heads == 1 ? rest : int32(uint32(rest) / uint32(heads));
  const int32 index = first + rest - tile * heads;
  if (grid.batch == 1) return {.head = index, .tile = tile, .split = 0};
  return {.head = index % grid.batch * (grid.heads / grid.batch) + index / grid.batch,
          .tile = tile,
          .split = 0};
}

// KernelConfig::split_q: the blocks of a tile of keys share its iterations, which are the tiles of
// rows of one query head after another. Whole heads go to a block where the additions of a head
// have an order, or a head's dbias is summed.
REGARD_INLINE bool splits_whole_heads(const KernelConfig& c) {
  return c.ordered_dq || c.dbias.how != BiasGradient::none;
}
// The first iteration of a split; that of split `splits` is the end.
REGARD_INLINE int32 first_iteration(const KernelConfig& c, int32 heads, int32 tiles, int32 splits,
                                    int32 split) {
  const int32 unit = splits_whole_heads(c) ? tiles : 1;
  const int32 units = splits_whole_heads(c) ? heads : heads * tiles;
  return (units / splits * split + smaller(units % splits, split)) * unit;
}
// A row of the partial sums of dk, which dv follows: both begin at 16 bytes.
REGARD_INLINE int64 partial_dk_columns(const Sizes& s) { return round_up(s.dim, 4); }
REGARD_INLINE int64 partial_dkv_columns(const Sizes& s) {
  return partial_dk_columns(s) + round_up(s.dim_v, 4);
}

// dq sums have units of 16 rows; each sequence begins with a new unit.
REGARD_INLINE int64 dq_rows(const Problem& p) {
  return p.packed ? round_up(p.sizes.rows_q + 16 * p.sizes.batch + 16, 16)
                  : p.sizes.batch * round_up(p.sizes.len_q, 16);
}

// The bytes of what the delta kernel clears: semaphores of dq, of at most two blocks for each tile
// of 32 rows; flags of dk and dv of each key; and sums of dbias.
REGARD_INLINE int64 dq_semaphores_of_head(const Problem& p) {
  return 2 * divide_up(p.sizes.len_q, 32);
}
REGARD_INLINE int64 dq_semaphore_bytes(const Problem& p) {
  return p.sizes.batch * p.sizes.heads_q * dq_semaphores_of_head(p) * 4;
}
REGARD_INLINE int64 key_flag_bytes(const Problem& p) {
  return p.sizes.heads_kv * p.sizes.rows_k * 2;
}
// Rows begin at 16 bytes, for additions by pairs and fours.
REGARD_INLINE int64 dbias_sums_row(const Problem& p) {
  return p.bias_sizes[3] > 1 ? round_up(p.bias_sizes[3], 4) : 1;
}
REGARD_INLINE int64 dbias_sums_bytes(const Problem& p) {
  return p.bias_sizes[0] * p.bias_sizes[1] * p.bias_sizes[2] * dbias_sums_row(p) * 4;
}

// Rows of lse in the row terms. Those of delta begin after them. A tile, of so many rows at most,
// is read whole, and may reach past the last row of either.
inline constexpr int64 kRowsOfTermTile = 128;
REGARD_INLINE int64 term_rows(const Problem& p) {
  return p.sizes.heads_q * dq_rows(p) + kRowsOfTermTile;
}

}  // namespace regard
