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

// The columns in [begin, end), counted from the lane's first one.
template <class Bits>
REGARD_DEVICE Bits columns_between(int begin, int end) {
  return low_bits<Bits>(lane_columns_before(end)) & ~low_bits<Bits>(lane_columns_before(begin));
}

// The columns in a line's spans; the lane's first one is `first` of the sequence of `length`.
template <class Bits>
REGARD_DEVICE Bits columns_in(const Spans& of_line, int first, int length) {
  Bits seen = 0;
#pragma unroll 1
  for (int n = 0; n < of_line.count; ++n) {
    const int begin = clamp_to(of_line.ends[2 * n], 0, length) - first;
    const int end = clamp_to(of_line.ends[2 * n + 1], 0, length) - first;
    seen |= columns_between<Bits>(begin, end);
  }
  return seen;
}

// Those of eight neighbouring lines, from `first` on, that lie in a span.
REGARD_DEVICE uint32 lines_in(const ShortInterval& span, int first) {
  const int begin = clamp_to(span.begin, first, first + 8) - first;
  const int end = clamp_to(span.end, first, first + 8) - first;
  return ((1u << end) - 1) & ~((1u << begin) - 1);
}

// Clears the bits of columns whose spans do not hold the line. Columns past the end, and lines past
// theirs, may get any bits. There is a column at least: length is not 0. spans_of_column(column)
// returns a column's spans. lines[n] of lane l is that of lane 0 plus l / 4.
//
// The warp reads each column's spans once: lane l has columns l, l + 32 ..., and makes eight bits
// of a column for each n. A shuffle brings four such bytes, of which a lane keeps a bit each.
template <int kBlocks, class Bits, int kLines, class SpansOf>
REGARD_DEVICE void keep_columns_around(Bits (&seen)[kLines], const int (&lines)[kLines], int first,
                                       int length, SpansOf spans_of_column) {
  constexpr int kParts = (kBlocks + 3) / 4;  // of 32 columns
  constexpr int kWords = (kParts * kLines + 3) / 4;
  const int lane_column = lane_index() % 4 * 2, first_of_tile = first - lane_column;
  int first_lines[kLines];
#pragma unroll
  for (int line = 0; line < kLines; ++line) first_lines[line] = shuffle(lines[line], 0);
  uint32 of_column[kWords] = {}, of_lane[kWords] = {};  // byte part * kLines + line
  const int count = spans_of_column(0).count;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    ShortInterval spans[kParts] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int column = smaller(first_of_tile + part * 32 + lane_index(), length - 1);
      const int32* const ends = spans_of_column(column).ends + 2 * n;
      spans[part] = {ends[0], ends[1]};
    }
#pragma unroll
    for (int byte = 0; byte < kParts * kLines; ++byte) {
      of_column[byte / 4] |= lines_in(spans[byte / kLines], first_lines[byte % kLines])
                             << byte % 4 * 8;
    }
  }
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
    const int lane = bit / 2 * 8 + bit % 2 + lane_column;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      of_lane[word] |= (shuffle(of_column[word], lane) >> lane_index() / 4 & 0x01010101) << bit;
    }
  }
#pragma unroll
  for (int line = 0; line < kLines; ++line) {
    Bits shown = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int byte = part * kLines + line;
      shown |= Bits(of_lane[byte / 4] >> byte % 4 * 8 & 0xff) << part * 8;
    }
    seen[line] &= shown;
  }
}

}  // namespace regard
