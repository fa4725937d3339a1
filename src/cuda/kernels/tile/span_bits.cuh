// What mask and spans show of a lane's scores: a bit for each column that the lane has of a line.
//
// Forward, a line is a query row and its columns are keys; backward (transposed) a line is a key
// and its columns are query rows. Of every eight columns a lane has two neighbours; bit 2 n + e is
// column 8 n + e, counted from the lane's first.
#pragma once

#include "cuda/kernels/tile/score_tile.cuh"
#include "semantics/spans.h"

namespace regard {

// Bits of kBlocks times eight columns.
template <bool kIsShort>
struct LaneBitsOf {
  using Type = uint64;
};
template <>
struct LaneBitsOf<true> {
  using Type = uint32;
};
template <int kBlocks>
using LaneBits = typename LaneBitsOf<(kBlocks <= 16)>::Type;

// How many of a lane's columns lie before column x.
REGARD_DEVICE int lane_columns_before(int x) { return x <= 0 ? 0 : x / 8 * 2 + smaller(x % 8, 2); }
template <class Bits>
REGARD_DEVICE Bits low_bits(int count) {
  return count >= int(8 * sizeof(Bits)) ? ~Bits(0) : (Bits(1) << count) - 1;
}

// The columns in a line's spans; the lane's first one is `first` of the sequence of `length`.
template <class Bits>
REGARD_DEVICE Bits columns_in(const Spans& of_line, int first, int length) {
  Bits seen = 0;
#pragma unroll 1
  for (int n = 0; n < of_line.count; ++n) {
    const Interval span = of_line[n];
    const int begin = int(clamp_to<int64>(span.begin, 0, length)) - first;
    const int end = int(clamp_to<int64>(span.end, 0, length)) - first;
    seen |= low_bits<Bits>(lane_columns_before(end)) & ~low_bits<Bits>(lane_columns_before(begin));
  }
  return seen;
}

// Clears the bits of columns whose spans do not hold the line. Columns past the end may get any
// bits. spans_of_column(column) returns a column's spans.
//
// The warp reads each column's spans once: lane l has those of columns l, l + 32 ..., and the other
// lanes get them by shuffles.
template <int kBlocks, class Bits, int kLines, class SpansOf>
REGARD_DEVICE void keep_columns_around(Bits (&seen)[kLines], const int (&lines)[kLines], int first,
                                       int length, SpansOf spans_of_column) {
  constexpr int kParts = (kBlocks + 3) / 4;  // of 32 columns
  const int lane_column = lane_index() % 4 * 2, first_of_tile = first - lane_column;
  const int count = spans_of_column(0).count;
  Bits shown[kLines] = {};
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    ShortInterval spans[kParts] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int column = first_of_tile + part * 32 + lane_index();
      if (column < length) {
        const Interval span = spans_of_column(column)[n];
        spans[part] = {int(span.begin), int(span.end)};
      }
    }
#pragma unroll
    for (int bit = 0; bit < 2 * kBlocks; ++bit) {
      const int lane = bit % 8 / 2 * 8 + bit % 2 + lane_column;
      const int begin = shuffle(spans[bit / 8].begin, lane);
      const int end = shuffle(spans[bit / 8].end, lane);
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        if (begin <= lines[line] && lines[line] < end) shown[line] |= Bits(1) << bit;
      }
    }
  }
#pragma unroll
  for (int line = 0; line < kLines; ++line) seen[line] &= shown[line];
}

}  // namespace regard
