// Which tiles the intervals of a mask leave to be visited. The planner and the kernels take these
// and no others, so that time is in proportion to what is visible.
#pragma once

#include "plan/cpu/kernel/tiling.h"
#include "semantics/mask.h"

namespace regard {

// The keys that the rows of a sequence see together.
REGARD_INLINE Interval seen_keys(const MaskParams& mask, int64 len_q, int64 len_k) {
  if (len_q < 1) return {};
  return {visible_keys(mask, 0, len_q, len_k).begin,
          visible_keys(mask, len_q - 1, len_q, len_k).end};
}

// Backward: the row blocks of a query head (packed GQA: of all heads of the group) that a chunk of
// keys visits. The first chunk visits all of them, because rows that see nothing need their dq too.
REGARD_INLINE Interval visited_blocks(const MaskParams& mask, const RowBlocks& blocks, int64 len_k,
                                      Interval keys) {
  const int64 len_q = blocks.len_q;
  const Interval all{0, blocks.packs_gqa ? blocks.count() : blocks.per_head()};
  if (keys.begin == 0) return all;
  if (blocks.packs_gqa) {
    const Interval seen = seen_keys(mask, len_q, len_k);
    return seen.begin < keys.end && keys.begin < seen.end ? all : Interval{};
  }
  const Interval rows{visible_queries(mask, keys.begin, len_q, len_k).begin,
                      visible_queries(mask, keys.end - 1, len_q, len_k).end};
  if (rows.empty()) return {};
  return {rows.begin / blocks.block, divide_up(rows.end, blocks.block)};
}

}  // namespace regard
