// Which tiles the intervals of a mask leave to be visited. The planner and the kernels take these
// and no others, so that time is in proportion to what is visible.
#pragma once

#include "plan/cpu/kernel/tiling.h"
#include "semantics/mask.h"

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

}  // namespace regard
