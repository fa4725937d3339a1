// What several rows or keys see together: a few intervals.
#pragma once

#include "semantics/mask.h"

namespace regard {

REGARD_INLINE Interval intersection(Interval a, Interval b) {
  return {larger(a.begin, b.begin), smaller(a.end, b.end)};
}
// The least interval that holds both.
REGARD_INLINE Interval hull(Interval a, Interval b) {
  if (a.empty()) return b;
  return b.empty() ? a : Interval{smaller(a.begin, b.begin), larger(a.end, b.end)};
}

// An index behind all others.
inline constexpr int64 kNone = int64(~uint64(0) >> 1);

// Disjoint intervals in ascending order, which hold all that was added, and nothing else unless
// that would take more of them than kMost: then those with the least gap are joined.
class IntervalSet {
 public:
  static constexpr int kMost = 8;

  REGARD_INLINE void clear() { count_ = 0; }
  REGARD_INLINE void add(Interval x) {
    if (x.empty()) return;
    int first = 0;
    while (first < count_ && parts_[first].end < x.begin) ++first;
    int end = first;  // of the parts that x joins
    while (end < count_ && parts_[end].begin <= x.end) x = hull(parts_[end++], x);
    replace(first, end, x);
    if (count_ > kMost) join_nearest();
  }
  REGARD_INLINE void add(const IntervalSet& other) {
    for (int n = 0; n < other.count_; ++n) add(other.parts_[n]);
  }

  // From the first to the last element that lies in x.
  REGARD_INLINE Interval within(Interval x) const {
    Interval found;
    for (int n = 0; n < count_; ++n) found = hull(found, intersection(parts_[n], x));
    return found;
  }
  // From the first to the last element.
  REGARD_INLINE Interval all() const {
    return count_ == 0 ? Interval{} : Interval{parts_[0].begin, parts_[count_ - 1].end};
  }
  REGARD_INLINE bool meets(Interval x) const {
    for (int n = 0; n < count_; ++n) {
      if (!intersection(parts_[n], x).empty()) return true;
    }
    return false;
  }
  // The first element from `begin` on; or kNone.
  REGARD_INLINE int64 first_from(int64 begin) const {
    for (int n = 0; n < count_; ++n) {
      if (parts_[n].end > begin) return larger(parts_[n].begin, begin);
    }
    return kNone;
  }
  // The last element before `end`; or -1.
  REGARD_INLINE int64 last_before(int64 end) const {
    for (int n = count_ - 1; n >= 0; --n) {
      if (parts_[n].begin < end) return smaller(parts_[n].end, end) - 1;
    }
    return -1;
  }

 private:
  // Puts x in the place of the parts from `first` to `end`.
  REGARD_INLINE void replace(int first, int end, Interval x) {
    const int step = 1 - (end - first);
    if (step > 0) {
      for (int n = count_; n-- > end;) parts_[n + step] = parts_[n];
    } else {
      for (int n = end; n < count_; ++n) parts_[n + step] = parts_[n];
    }
    parts_[first] = x;
    count_ += step;
  }
  REGARD_INLINE void join_nearest() {
    int nearest = 0;
    int64 least = parts_[1].begin - parts_[0].end;
    for (int n = 1; n + 1 < count_; ++n) {
      const int64 gap = parts_[n + 1].begin - parts_[n].end;
      if (gap < least) nearest = n, least = gap;
    }
    replace(nearest, nearest + 2, hull(parts_[nearest], parts_[nearest + 1]));
  }

  int count_ = 0;
  Interval parts_[kMost + 1];  // one more while one is added
};

}  // namespace regard
