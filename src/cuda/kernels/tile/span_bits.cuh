// What spans show of a lane's scores: a bit for each column that the lane has of a line.
//
// Lines are rows of the accumulators and columns their columns: rows and keys forward, keys and
// rows backward, where scores are transposed. Of every eight columns a lane has two neighbours; bit
// 2 n + e is column 8 n + e, counted from the lane's first.
#pragma once

#include "cuda/kernels/ptx.cuh"
#include "semantics/spans.h"

namespace regard {

// How many of a lane's columns lie before column x.
REGARD_DEVICE int lane_columns_before(int x) { return x <= 0 ? 0 : x / 8 * 2 + smaller(x % 8, 2); }
REGARD_DEVICE uint64 low_bits_64(int count) {
  return count >= 64 ? ~uint64(0) : (uint64(1) << count) - 1;
}

// The columns in a line's spans; the lane's first one is `first` of the sequence of `length`.
REGARD_DEVICE uint64 columns_in(const Spans& of_line, int first, int length) {
  uint64 seen = 0;
#pragma unroll 1
  for (int n = 0; n < of_line.count; ++n) {
    const Interval span = of_line[n];
    const int begin = int(clamp_to<int64>(span.begin, 0, length)) - first;
    const int end = int(clamp_to<int64>(span.end, 0, length)) - first;
    seen |= low_bits_64(lane_columns_before(end)) & ~low_bits_64(lane_columns_before(begin));
  }
  return seen;
}

// Clears the bits of columns whose spans do not hold the line. Columns past the end are left as
// they are. spans_of_column(column) returns a column's spans.
template <int kBlocks, int kLines, class SpansOf>
REGARD_DEVICE void keep_columns_around(uint64 (&seen)[kLines], const int (&lines)[kLines],
                                       int first, int length, SpansOf spans_of_column) {
#pragma unroll 1
  for (int bit = 0; bit < 2 * kBlocks; ++bit) {
    const int column = first + bit / 2 * 8 + bit % 2;
    if (column >= length) continue;
    const Spans spans = spans_of_column(column);
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      if (!spans.contain(lines[line])) seen[line] &= ~(uint64(1) << bit);
    }
  }
}

}  // namespace regard
