// How a CPU kernel cuts attention into tiles, and what scratch memory a worker needs for it.
#pragma once

#include "plan/count.h"
#include "semantics/mask.h"

namespace regard {

// What the vectors of an instruction set offer for one type.
struct CpuShape {
  int lanes = 1;       // elements of a vector of sums
  int vectors = 1;     // vectors in a panel
  int pack = 1;        // elements of a row that one product step takes
  int real_size = 4;   // bytes of a sum
  int unit_size = 4;   // bytes of `pack` elements
  bool tiles = false;  // products in tile registers
  int terms = 1;       // whose sum is an element

  REGARD_INLINE int panel() const { return lanes * vectors; }  // query rows side by side

  bool operator==(const CpuShape&) const = default;
};

// None of these may change a result beyond rounding, nor depend on threads or on the batch, except
// a forward block_q, which changes no bit.
struct CpuTiling {
  CpuShape shape;
  int64 block_q = 0;  // query rows of a task: they share packed keys
  int64 block_k = 0;  // keys of a score tile
  int64 pack_k = 0;   // forward: keys that are packed for all rows of a task, whole blocks
  int64 chunk_k = 0;  // most keys of a backward task; and of a forward one whose few rows are split
};

// Backward, without tile registers: the keys of a block, and its rows unless columns are long.
inline constexpr int64 kBackwardBlock = 64;

// Forward: a sequence with at most so many rows for each key head has head elements in its lanes
// (few_rows.hpp), and f32 in place of pairs of bf16. More rows fill the lanes of a panel. Backward,
// in f32 and f64 arithmetic, S of such a sequence is summed as there.
REGARD_INLINE int64 most_few_rows(const CpuShape& s) {
  return s.lanes > 1 ? smaller<int64>(s.lanes, 8) : 0;
}
REGARD_INLINE bool has_few_rows(const CpuShape& s, int64 len_q, int64 group) {
  return len_q * group <= most_few_rows(s);
}
// Keys whose scores they have at once, and how many such blocks are a tile with its own sums.
inline constexpr int64 kFewRowsKeys = 32, kFewRowsBlocks = 8;

// Backward: a sequence whose rows for a key head are at most a vector has panels of one, in f32 and
// f64 arithmetic.
REGARD_INLINE int64 most_rows_of_one_vector(const CpuShape& s) {
  return s.lanes > 1 && s.vectors > 1 && s.pack == 1 && !s.tiles ? s.lanes : 0;
}
REGARD_INLINE bool fits_one_vector(const CpuShape& s, int64 len_q, int64 group) {
  const int64 most = most_rows_of_one_vector(s);
  return most > 0 && len_q * group <= most;
}
REGARD_INLINE CpuTiling of_one_vector(CpuTiling t) {
  t.shape.vectors = 1;
  t.block_q = t.shape.lanes;
  return t;
}

// The chunks of a sequence's keys in the backward pass: as few as chunk_k allows, and as even as
// whole blocks of keys are, because a chunk's sums of dq wait for those of the chunk before it.
struct KeyChunks {
  int64 len_k = 0;
  int64 block = 1;
  int64 blocks = 1;
  int64 count = 1;

  REGARD_INLINE KeyChunks(const CpuTiling& tiling, int64 length)
      : len_k(length),
        block(tiling.block_k),
        blocks(larger<int64>(1, divide_up(length, block))),
        count(larger<int64>(1, divide_up(length, tiling.chunk_k))) {}

  REGARD_INLINE int64 begin(int64 chunk) const { return chunk * blocks / count * block; }
  REGARD_INLINE Interval keys(int64 chunk) const {
    return {begin(chunk), smaller(begin(chunk + 1), len_k)};
  }
  // The chunk that has the key.
  REGARD_INLINE int64 of(int64 key) const { return ((key / block + 1) * count - 1) / blocks; }
};

// Upper bound of what a kernel keeps of one panel's rows.
inline constexpr int64 kPanelBytes = 2048;

// Query rows of one kv head, in blocks. Packed GQA: where a query head has fewer rows than a panel,
// the rows of all heads of the group follow one another: row r is query r % len_q of head r /
// len_q.
struct RowBlocks {
  int64 len_q = 0;
  int64 group = 1;
  int64 block = 1;
  bool packs_gqa = false;

  REGARD_INLINE RowBlocks(const CpuTiling& tiling, int64 length, int64 heads)
      : len_q(length),
        group(heads),
        block(tiling.block_q),
        packs_gqa(len_q < tiling.shape.panel()) {}

  REGARD_INLINE int64 per_head() const { return divide_up(len_q, block); }
  REGARD_INLINE int64 count() const {
    return packs_gqa ? divide_up(group * len_q, block) : group * per_head();
  }
  REGARD_INLINE int64 first_row(int64 index) const {
    return packs_gqa ? index * block : index / per_head() * len_q + index % per_head() * block;
  }
  // The block that begins with the row.
  REGARD_INLINE int64 of_row(int64 row) const {
    return packs_gqa ? row / block : row / len_q * per_head() + row % len_q / block;
  }
  REGARD_INLINE int64 rows(int64 index) const {
    return packs_gqa ? smaller(block, group * len_q - index * block)
                     : smaller(block, len_q - index % per_head() * block);
  }
};

using ScratchLayout = MemoryLayout<64>;  // of a worker's arrays: each on a cache line

struct HeadSizes {
  int64 dim = 0;
  int64 dim_v = 0;
};

// Elements and Units of one row, rounded up to whole vectors.
REGARD_INLINE int64 padded(const CpuShape& s, int64 dim) { return round_up(dim, s.lanes); }
REGARD_INLINE int64 units(const CpuShape& s, int64 dim) { return divide_up(dim, s.pack); }
REGARD_INLINE int64 padded_units(const CpuShape& s, int64 dim) {
  return round_up(units(s, dim), s.lanes);
}

// Arrays that stage the elementwise terms of one panel and key block.
struct StageScratch {
  int64 visible;  // [block_k] u64: bit r = row r sees the key
  int64 kept;     // [block_k] u64: bit r = dropout keeps it
  int64 shown;    // [block_k] u64: bit r = one of row r's spans shows the key
  int64 changes;  // [block_k + 1] u64: bit r = one span of row r begins or ends there
  int64 bias;     // [block_k][panel]
  int64 mask;     // [block_k][panel]
};
REGARD_INLINE StageScratch stage_scratch(ScratchLayout& l, const CpuTiling& t) {
  const int64 tile = t.block_k * t.shape.panel() * t.shape.real_size;
  return {.visible = l.take(t.block_k * 8),
          .kept = l.take(t.block_k * 8),
          .shown = l.take(t.block_k * 8),
          .changes = l.take((t.block_k + 1) * 8),
          .bias = l.take(tile),
          .mask = l.take(tile)};
}

// The partial result of one panel: what a split over keys leaves to be merged.
struct PartialLayout {
  int64 out;  // [padded(dim_v)][panel]
  int64 max;  // [panel]
  int64 sum;  // [panel]
  int64 size;
};
REGARD_INLINE PartialLayout partial_layout(const CpuTiling& t, HeadSizes d) {
  ScratchLayout l;
  const int64 row = int64(t.shape.panel()) * t.shape.real_size;
  const int64 out = l.take(padded(t.shape, d.dim_v) * row), max = l.take(row), sum = l.take(row);
  return {out, max, sum, l.size()};
}

// What few rows have in place of a panel's queries and tiles.
struct FewRowsScratch {
  int64 queries;  // [most_few_rows][padded(dim)]
  int64 sums;     // [most_few_rows][padded(dim_v)]
  int64 out;      // [most_few_rows][padded(dim_v)]
  int64 scores;   // [kFewRowsKeys][most_few_rows]
};
REGARD_INLINE FewRowsScratch few_rows_scratch(ScratchLayout& l, const CpuShape& s, HeadSizes d) {
  const int64 rows = most_few_rows(s) * s.real_size;
  FewRowsScratch x{};
  x.queries = l.take(rows * padded(s, d.dim));
  x.sums = l.take(rows * padded(s, d.dim_v));
  x.out = l.take(rows * padded(s, d.dim_v));
  x.scores = l.take(rows * kFewRowsKeys);
  return x;
}

struct ForwardScratch {
  StageScratch stage;
  int64 panels;   // [block_q / panel] Panel
  int64 partial;  // [block_q / panel] PartialLayout
  int64 queries;  // [block_q / panel][terms][units(dim)][panel] Unit
  int64 keys;     // [pack_k / block_k][terms][block_k][padded_units(dim)] Unit
  int64 values;   // [pack_k / block_k][terms][block_k / pack][padded(dim_v)] Unit; for tiles
                  // transposed
  int64 tiles;    // [kTileBuffers or 1][block_k][panel] scores, then weights
  FewRowsScratch few;
  int64 size;
};
// Tile products of a step run next to the exponentials of another.
inline constexpr int kTileBuffers = 2;
REGARD_INLINE ForwardScratch forward_scratch(const CpuTiling& t, HeadSizes d) {
  const CpuShape& s = t.shape;
  const int64 panels = divide_up(t.block_q, s.panel()), width = s.panel();
  ScratchLayout l;
  ForwardScratch x{};
  x.stage = stage_scratch(l, t);
  x.panels = l.take(panels * kPanelBytes);
  x.partial = l.take(panels * partial_layout(t, d).size);
  ScratchLayout few = l;
  x.queries = l.take(panels * s.terms * padded_units(s, d.dim) * width * s.unit_size);
  x.keys = l.take(t.pack_k * s.terms * padded_units(s, d.dim) * s.unit_size);
  x.values = l.take(units(s, t.pack_k) * s.terms * padded(s, d.dim_v) * s.unit_size);
  x.tiles = l.take((s.tiles ? kTileBuffers : 1) * t.block_k * width * s.real_size);
  x.few = few_rows_scratch(few, s, d);
  x.size = larger(l.size(), few.size());
  // GCC's own vectors for scalar lanes read an element past the last row of packed values.
  if (s.lanes == 1) x.size += round_up(padded(s, d.dim_v) * s.unit_size, 64);
  return x;
}

struct BackwardScratch {
  StageScratch stage;
  int64 panels;  // [block_q / panel] Panel
  // For tiles, keys, values, dk, dv, query_pairs, dout_pairs, weights and dscores consist of dense
  // tiles (vector_at).
  int64 keys;          // [terms][chunk_k][padded_units(dim)] Unit, pairs along the row
  int64 values;        // [terms][chunk_k][padded_units(dim_v)] Unit
  int64 key_pairs;     // [terms][chunk_k / pack][padded(dim)] Unit, pairs of keys; for tiles
                       // transposed
  int64 dk;            // [chunk_k][padded(dim)]
  int64 dv;            // [chunk_k][padded(dim_v)]
  int64 queries;       // [block_q / panel][terms][units(dim)][panel] Unit: transposed
  int64 douts;         // [block_q / panel][terms][units(dim_v)][panel] Unit: transposed
  int64 query_pairs;   // [terms][block_q / pack][padded(dim)] Unit: pairs of queries
  int64 dout_pairs;    // [terms][block_q / pack][padded(dim_v)] Unit
  int64 scores;        // [kTileBuffers or 1][block_k][panel]
  int64 dweights;      // [kTileBuffers or 1][block_k][panel]
  int64 weights;       // [terms][block_k][block_q / pack] Unit: Z P, pairs along the row
  int64 dscores;       // [terms][block_k][block_q / pack] Unit: ds
  int64 dscore_pairs;  // [terms][block_k / pack][panel] Unit: ds, pairs of keys; for tiles
                       // [block_q / panel][terms][chunk_k / pack][panel]; only where pack > 1
  int64 dq;            // [block_q / panel][padded(dim)][panel]
  FewRowsScratch few;  // only where pack is 1
  int64 size;
};
REGARD_INLINE BackwardScratch backward_scratch(const CpuTiling& t, HeadSizes d) {
  const CpuShape& s = t.shape;
  const int64 panels = divide_up(t.block_q, s.panel()), width = s.panel();
  const int64 wide = padded(s, d.dim), wide_v = padded(s, d.dim_v);
  const int64 unit = s.terms * s.unit_size;  // bytes
  ScratchLayout l;
  BackwardScratch x{};
  x.stage = stage_scratch(l, t);
  x.panels = l.take(panels * kPanelBytes);
  x.keys = l.take(t.chunk_k * padded_units(s, d.dim) * unit);
  x.values = l.take(t.chunk_k * padded_units(s, d.dim_v) * unit);
  x.key_pairs = s.pack == 1 ? x.keys : l.take(units(s, t.chunk_k) * wide * unit);
  x.dk = l.take(t.chunk_k * wide * s.real_size);
  x.dv = l.take(t.chunk_k * wide_v * s.real_size);
  x.queries = l.take(panels * padded_units(s, d.dim) * width * unit);
  x.douts = l.take(panels * padded_units(s, d.dim_v) * width * unit);
  x.query_pairs = l.take(panels * width / s.pack * wide * unit);
  x.dout_pairs = l.take(panels * width / s.pack * wide_v * unit);
  const int64 tile = (s.tiles ? kTileBuffers : 1) * t.block_k * width * s.real_size;
  x.scores = l.take(tile);
  x.dweights = l.take(tile);
  x.weights = l.take(t.block_k * panels * width / s.pack * unit);
  x.dscores = l.take(t.block_k * panels * width / s.pack * unit);
  const int64 pairs = s.tiles ? panels * units(s, t.chunk_k) : units(s, t.block_k);
  x.dscore_pairs = s.pack == 1 ? x.dscores : l.take(pairs * width * unit);
  x.dq = l.take(panels * wide * width * s.real_size);
  if (s.pack == 1) x.few = few_rows_scratch(l, s, d);
  x.size = l.size();
  return x;
}

}  // namespace regard
