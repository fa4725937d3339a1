// Which keys a query sees: one interval per row, from which everything else follows.
//
// diag(i) = i (top left) or i + len_k - len_q (bottom right); row i sees the keys j with
// diag - left <= j <= diag + right. Both ends never decrease with i.
#pragma once

#include "semantics/portable.h"

namespace regard {

struct MaskParams {
  int64 left = -1;  // -1 = unbounded
  int64 right = -1;
  bool top_left = false;

  bool operator==(const MaskParams&) const = default;
};

struct Interval {
  int64 begin = 0;
  int64 end = 0;

  REGARD_INLINE bool empty() const { return end <= begin; }
  REGARD_INLINE bool contains(int64 x) const { return begin <= x && x < end; }
};

REGARD_INLINE int64 diagonal_shift(const MaskParams& mask, int64 len_q, int64 len_k) {
  return mask.top_left ? 0 : len_k - len_q;
}

REGARD_INLINE Interval visible_keys(const MaskParams& mask, int64 i, int64 len_q, int64 len_k) {
  const int64 diag = i + diagonal_shift(mask, len_q, len_k);
  return {mask.left < 0 ? 0 : clamp_to<int64>(diag - mask.left, 0, len_k),
          mask.right < 0 ? len_k : clamp_to<int64>(diag + mask.right + 1, 0, len_k)};
}

REGARD_INLINE Interval visible_queries(const MaskParams& mask, int64 j, int64 len_q, int64 len_k) {
  const int64 row = j - diagonal_shift(mask, len_q, len_k);
  return {mask.right < 0 ? 0 : clamp_to<int64>(row - mask.right, 0, len_q),
          mask.left < 0 ? len_q : clamp_to<int64>(row + mask.left + 1, 0, len_q)};
}

// Sum of clamp(i + shift, 0, limit) over i in [0, count).
REGARD_INLINE double clamped_sum(int64 shift, int64 count, int64 limit) {
  const int64 rising = clamp_to<int64>(-shift, 0, count);
  const int64 level = clamp_to<int64>(limit - shift, rising, count);
  const double steps = double(level - rising), first = double(rising + shift);
  return steps * first + steps * (steps - 1) / 2 + double(count - level) * double(limit);
}

// Pairs that the intervals of all len_q rows leave visible.
REGARD_INLINE double visible_pairs(const MaskParams& mask, int64 len_q, int64 len_k) {
  const int64 shift = diagonal_shift(mask, len_q, len_k);
  const double ends = mask.right < 0 ? double(len_q) * double(len_k)
                                     : clamped_sum(shift + mask.right + 1, len_q, len_k);
  return ends - (mask.left < 0 ? 0 : clamped_sum(shift - mask.left, len_q, len_k));
}

}  // namespace regard
