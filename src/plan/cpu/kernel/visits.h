// Which tiles the intervals of a mask leave to be visited. The planner and the kernels take these
// and no others, so that time is in proportion to what is visible.
#pragma once

#include "plan/cpu/kernel/block_sets.h"
#include "plan/cpu/kernel/tiling.h"
#include "semantics/mask.h"
#include "semantics/spans.h"

namespace regard {

// The keys that the rows of a sequence see together.
REGARD_INLINE Interval seen_keys(const MaskParams& mask, const Sequence& s) {
  if (s.len_q < 1) return {};
  return {visible_keys(mask, s, 0).begin, visible_keys(mask, s, s.len_q - 1).end};
}

// Backward: the row blocks of a query head (packed GQA: of all heads of the group) that a chunk of
// keys visits. The first chunk visits all of them, because rows that see nothing need their dq too.
// Between the first and the last chunk that a block's rows see, each chunk visits it, though rows
// on both sides of a gap in their positions may see nothing there.
REGARD_INLINE Interval visited_blocks(const MaskParams& mask, const RowBlocks& blocks,
                                      const Sequence& s, Interval keys) {
  const Interval all{0, blocks.packs_gqa ? blocks.count() : blocks.per_head()};
  if (keys.begin == 0) return all;
  if (blocks.packs_gqa) {
    const Interval seen = seen_keys(mask, s);
    return seen.begin < keys.end && keys.begin < seen.end ? all : Interval{};
  }
  const Interval rows{visible_queries(mask, s, keys.begin).begin,
                      visible_queries(mask, s, keys.end - 1).end};
  if (rows.empty() && !s.positions.rows) return {};
  return {rows.begin / blocks.block, divide_up(rows.end, blocks.block)};
}

REGARD_INLINE void add_spans(IntervalSet& set, const Spans& spans, Interval within) {
  for (int n = 0; n < spans.count; ++n) set.add(intersection(spans[n], within));
}

// What spans say of the blocks of a query head. Where it is known, both of the searches below go by
// it, so that they agree on which blocks of rows and of keys meet.
struct SpanReach {
  BlockSets<> keys_of_rows;  // backward: the keys that row spans show to each block of rows
  BlockSets<> rows_of_keys;  // the rows to which key spans show some of each block of keys
};

// The first block of keys from `block` on that has some of the keys `seen` by rows and, as far as
// is known, spans that show some of its keys to these rows; or kNone.
template <class Blocks>
REGARD_INLINE int64 next_keys(const Blocks& blocks, const BlockSets<>& rows_of_keys,
                              const IntervalSet& seen, Interval rows, int64 block) {
  for (;;) {
    const int64 key = seen.first_from(blocks.begin(block));
    if (key == kNone) return kNone;
    block = blocks.of(key);
    const int64 next = rows_of_keys.known() ? rows_of_keys.first_from(block, rows) : block;
    if (next == block || next == kNone) return next;
    block = next;
  }
}

// Backward: the last of a head's blocks of rows before `end` that, as far as is known, sees some of
// a chunk of keys; or -1.
REGARD_INLINE int64 previous_rows(const RowBlocks& blocks, const SpanReach& reach, int64 chunk,
                                  Interval keys, int64 end) {
  for (;;) {
    const int64 block =
        reach.keys_of_rows.known() ? reach.keys_of_rows.last_before(end, keys) : end - 1;
    if (block < 0 || !reach.rows_of_keys.known()) return block;
    const int64 row = reach.rows_of_keys[chunk].last_before((block + 1) * blocks.block);
    if (row < 0) return -1;
    if (row >= block * blocks.block) return block;
    end = row / blocks.block + 1;
  }
}

}  // namespace regard
