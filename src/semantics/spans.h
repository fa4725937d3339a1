// Spans: half-open intervals of indices, begin and end next to each other. What a row or key sees
// is the union of its spans; one that ends before it begins is empty, and any numbers are safe.
#pragma once

#include "semantics/features.h"
#include "semantics/mask.h"
#include "semantics/sequence.h"

namespace regard {

inline constexpr int kMostSpans = 8;

// The spans of one row of queries or keys.
struct Spans {
  const int32* ends = nullptr;  // begin, end, begin, end ...
  int count = 0;

  REGARD_INLINE Interval operator[](int n) const { return {ends[2 * n], ends[2 * n + 1]}; }
  REGARD_INLINE bool contain(int64 x) const {
    for (int n = 0; n < count; ++n) {
      if ((*this)[n].contains(x)) return true;
    }
    return false;
  }
};

// What row_spans or key_spans of a Problem (problem/problem.h) hold for a row of queries or keys.
template <class SpanView>
REGARD_INLINE Spans spans_of(const SpanView& spans, int64 b, int64 h, int64 first, int64 row) {
  const int64 at = offset_of(spans.view.strides, b, h, first, row);
  return {static_cast<const int32*>(spans.view.data) + at, spans.count};
}

// Whether the spans show query i and key j of a query head to each other.
template <class Problem>
REGARD_INLINE bool shown_by_spans(Features on, const Problem& p, const Sequence& seq, int64 b,
                                  int64 h, int64 i, int64 j) {
  if (on.row_spans && !spans_of(p.row_spans, b, h, seq.first_q, i).contain(j)) return false;
  return !on.key_spans || spans_of(p.key_spans, b, h, seq.first_k, j).contain(i);
}

}  // namespace regard
