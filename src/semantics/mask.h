// Which keys a query sees: one interval per row, from which everything else follows.
//
// diag(i) = i (top left) or i + len_k - len_q (bottom right); with positions, that of row i less
// that of key 0. Row i sees the keys j with diag - left <= j <= diag + right. Both ends never
// decrease with i.
#pragma once

#include "semantics/sequence.h"

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

// The same of a sequence whose rows may have positions.
REGARD_INLINE Interval visible_keys(const MaskParams& mask, const Sequence& s, int64 i) {
  if (!s.positions.given) return visible_keys(mask, i, s.len_q, s.len_k);
  const int64 diag = s.positions.of_row(i) - s.positions.first_key;
  return {mask.left < 0 ? 0 : clamp_to<int64>(diag - mask.left, 0, s.len_k),
          mask.right < 0 ? s.len_k : clamp_to<int64>(diag + mask.right + 1, 0, s.len_k)};
}
REGARD_INLINE Interval visible_queries(const MaskParams& mask, const Sequence& s, int64 j) {
  if (!s.positions.given) return visible_queries(mask, j, s.len_q, s.len_k);
  const int64 at = s.positions.first_key + j;
  return {mask.right < 0 ? 0 : s.positions.rows_before(at - mask.right, s.len_q),
          mask.left < 0 ? s.len_q : s.positions.rows_before(at + mask.left + 1, s.len_q)};
}

// Sum of clamp(i + shift, 0, limit) over i in [0, count).
REGARD_INLINE double clamped_sum(int64 shift, int64 count, int64 limit) {
  const int64 rising = clamp_to<int64>(-shift, 0, count);
  const int64 level = clamp_to<int64>(limit - shift, rising, count);
  const double steps = double(level - rising), first = double(rising + shift);
  return steps * first + steps * (steps - 1) / 2 + double(count - level) * double(limit);
}

// Pairs that the intervals of `rows` neighbouring rows leave visible, the first with this diagonal.
REGARD_INLINE double visible_pairs(const MaskParams& mask, int64 first_diag, int64 rows,
                                   int64 len_k) {
  const double ends = mask.right < 0 ? double(rows) * double(len_k)
                                     : clamped_sum(first_diag + mask.right + 1, rows, len_k);
  return ends - (mask.left < 0 ? 0 : clamped_sum(first_diag - mask.left, rows, len_k));
}
// The same of all rows of a sequence.
REGARD_INLINE double visible_pairs(const MaskParams& mask, const Sequence& s) {
  const Positions& at = s.positions;
  if (!at.given) {
    return visible_pairs(mask, diagonal_shift(mask, s.len_q, s.len_k), s.len_q, s.len_k);
  }
  if (!at.rows) return visible_pairs(mask, -at.first_key, s.len_q, s.len_k);
  double pairs = 0;
  for (int64 i = 0; i < s.len_q; i += kPositionBlock) {
    pairs += visible_pairs(mask, at.of_row(i) - at.first_key, smaller(kPositionBlock, s.len_q - i),
                           s.len_k);
  }
  return pairs;
}

}  // namespace regard
