// What each block of rows sees of the keys, or each block of keys of the rows; and which blocks see
// some of an interval, without a look at the others.
#pragma once

#include "plan/cpu/kernel/interval_set.h"

namespace regard {

// A tree of sets. Set n holds what sets 2 n and 2 n + 1 hold; the last `leaves` of them, a power of
// two, are those of the blocks. `Set` is an IntervalSet, or what a test counts with.
template <class Set = IntervalSet>
struct BlockSets {
  const Set* sets = nullptr;  // from set 0 on, which is not used; null: not known
  int64 leaves = 0;

  REGARD_INLINE bool known() const { return sets != nullptr; }
  REGARD_INLINE const Set& operator[](int64 block) const { return sets[leaves + block]; }

  // The first block from `begin` on that sees some of x; or kNone.
  REGARD_INLINE int64 first_from(int64 begin, Interval x) const {
    if (begin >= leaves) return kNone;
    int64 n = leaves + begin;
    for (;;) {
      if (!sets[n].meets(x)) {
        while (n % 2 == 1) n /= 2;  // nothing follows below the parent of a second child
        if (n == 0) return kNone;
        ++n;
      } else if (n < leaves) {
        n = 2 * n;
      } else {
        return n - leaves;
      }
    }
  }
  // The last block before `end` that sees some of x; or -1.
  REGARD_INLINE int64 last_before(int64 end, Interval x) const {
    if (end <= 0) return -1;
    int64 n = leaves + end - 1;
    for (;;) {
      if (!sets[n].meets(x)) {
        while (n > 1 && n % 2 == 0) n /= 2;
        if (n == 1) return -1;
        --n;
      } else if (n < leaves) {
        n = 2 * n + 1;
      } else {
        return n - leaves;
      }
    }
  }
};

// The leaves of a tree for so many blocks; it has twice as many sets.
REGARD_INLINE int64 leaves_for(int64 blocks) {
  int64 leaves = 1;
  while (leaves < blocks) leaves *= 2;
  return leaves;
}

}  // namespace regard
