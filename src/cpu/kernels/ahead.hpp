// Prefetching of rows next to other work.
#pragma once

#include "problem/problem.h"
#include "semantics/portable.h"

namespace regard {
namespace {

// Prefetches rows, a piece at each step. They go to the second cache, which can wait for more lines
// than the first. There may be no such rows.
struct Ahead {
  uint64 at = 0;
  int64 piece = 0;   // bytes
  int64 pieces = 1;  // of a row
  int64 gap = 0;     // bytes from the last piece of a row to the next row
  int64 left = pieces;

  // Rows of so many bytes, which begin `stride` bytes apart.
  REGARD_INLINE static Ahead of_bytes(uint64 first, int64 row, int64 stride, int64 piece) {
    const int64 pieces = divide_up(row, piece);
    return {first, piece, pieces, stride - pieces * piece};
  }
  // Rows of `dim` elements from an offset on, in pieces of so many elements.
  [[gnu::always_inline]] static Ahead of_rows(const View& view, int64 offset, int64 dim,
                                              int64 elements) {
    const int64 size = view.type == Type::f64 ? 8 : view.type == Type::f32 ? 4 : 2;
    return of_bytes(reinterpret_cast<uint64>(view.data) + uint64(offset * size), dim * size,
                    view.strides.row * size, elements * size);
  }

  [[gnu::always_inline]] void step() {
    __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
    at += uint64(piece);
    if (--left > 0) return;
    at += uint64(gap);
    left = pieces;
  }
};

}  // namespace
}  // namespace regard
