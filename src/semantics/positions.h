// Where the rows and keys of a call stand in a longer sequence, of which the call has a part.
//
// The rows of a block of 128 are consecutive there, and blocks are in increasing order, so that
// positions increase with the row. Causal masks, windows, ALiBi and dropout go by positions.
#pragma once

#include "semantics/portable.h"

namespace regard {

inline constexpr int64 kPositionBlock = 128;  // rows

struct Positions {
  bool given = false;           // else a position is an index
  const int32* rows = nullptr;  // of the first row of each block; null: row i stands at i
  int64 first_key = 0;          // of key 0
  int32 first_batch = 0;        // added to b and h where dropout counts them
  int32 first_head = 0;

  REGARD_INLINE int64 of_row(int64 i) const {
    return rows ? rows[i / kPositionBlock] + i % kPositionBlock : i;
  }
  // How many of `count` rows stand before a position.
  REGARD_INLINE int64 rows_before(int64 position, int64 count) const {
    if (!rows) return clamp_to<int64>(position, 0, count);
    int64 low = 0,
          high = divide_up(count, kPositionBlock);  // blocks that begin before it: at least
    while (low < high) {                            // `low`, at most `high`
      const int64 middle = (low + high) / 2;
      if (rows[middle] < position) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == 0) return 0;
    const int64 block = low - 1, own = smaller(position - rows[block], kPositionBlock);
    return smaller(block * kPositionBlock + own, count);
  }

  bool operator==(const Positions&) const = default;
};

}  // namespace regard
