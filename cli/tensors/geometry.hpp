// Where rows and pairs of an Attention live: sizes, sequences, element offsets, visibility.
#pragma once

#include "tensors/array.hpp"

namespace regard::cli {

struct Shape {
  Index batch = 0, heads_q = 0, heads_kv = 0;
  Index len_q = 0, len_k = 0;  // the longest sequences, if packed
  Index dim = 0, dim_v = 0;
  bool packed = false;

  Index group() const { return heads_kv > 0 ? heads_q / heads_kv : 0; }
  double pairs() const { return double(batch) * double(heads_q) * double(len_q) * double(len_k); }
};

// Trusts the ranks: call it after the library or the builder has checked the Attention.
Shape shape_of(const Attention& attention);

// One batch entry: its real lengths, its number and, packed, the row at which it begins.
struct Sequence {
  Index len_q = 0, len_k = 0, first_q = 0, first_k = 0, b = 0;
};
Sequence sequence_of(const Attention& attention, const Shape& shape, Index b);

// Element offset of row `row` in q, k, v, out and their gradients.
inline Index row_offset(const Tensor& t, bool packed, Index b, Index h, Index first, Index row) {
  return packed ? (first + row) * t.strides[0] + h * t.strides[1]
                : b * t.strides[0] + h * t.strides[1] + row * t.strides[2];
}

// Element offset of a row's value in lse and dlse.
inline Index lse_offset(const Tensor& t, bool packed, Index b, Index h, Index first, Index row) {
  return packed ? h * t.strides[0] + (first + row) * t.strides[1]
                : b * t.strides[0] + h * t.strides[1] + row * t.strides[2];
}

// Strides by (b, h, i, j) of a tensor that broadcasts to (B, Hq, Sq, Sk).
struct PairStrides {
  Index b = 0, h = 0, i = 0, j = 0;

  explicit PairStrides(const Tensor& tensor);
  Index offset(Index batch, Index head, Index row, Index column) const {
    return batch * b + head * h + row * i + column * j;
  }
};

// The keys that the causal mask, the window and the lengths leave visible to row i.
struct Interval {
  Index begin = 0, end = 0;
};
Interval visible_keys(const Attention& attention, const Sequence& sequence, Index i);

// How far row i stands behind key j: by positions, or from the ends of their sequences.
Index distance_of(const Attention& attention, const Sequence& sequence, Index i, Index j);

// Whether row_spans and key_spans, where they are given, show query i and key j to each other.
bool spans_show(const Attention& attention, const Shape& shape, const Sequence& sequence, Index b,
                Index h, Index i, Index j);

double scale_of(const Attention& attention, const Shape& shape);

}  // namespace regard::cli
