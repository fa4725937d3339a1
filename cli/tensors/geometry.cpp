// Offsets and visibility, written from docs/semantics.md and sharing no code with the library.
#include "tensors/geometry.hpp"

#include <algorithm>
#include <cmath>

namespace regard::cli {

Shape shape_of(const Attention& a) {
  Shape shape;
  shape.packed = a.cu_seqlens_q.given();
  if (shape.packed) {
    shape.batch = a.cu_seqlens_q.sizes[0] - 1;
    shape.heads_q = a.q.sizes[1];
    shape.heads_kv = a.k.sizes[1];
    shape.len_q = a.max_seqlen_q;
    shape.len_k = a.max_seqlen_k;
    shape.dim = a.q.sizes[2];
    shape.dim_v = a.v.sizes[2];
  } else {
    shape.batch = a.q.sizes[0];
    shape.heads_q = a.q.sizes[1];
    shape.heads_kv = a.k.sizes[1];
    shape.len_q = a.q.sizes[2];
    shape.len_k = a.k.sizes[2];
    shape.dim = a.q.sizes[3];
    shape.dim_v = a.v.sizes[3];
  }
  return shape;
}

namespace {

Index integer_at(const Tensor& tensor, Index index) {
  return static_cast<const std::int32_t*>(tensor.data)[index * tensor.strides[0]];
}

}  // namespace

Sequence sequence_of(const Attention& a, const Shape& shape, Index b) {
  Sequence s{shape.len_q, shape.len_k, 0, 0, b};
  if (a.cu_seqlens_q.given()) {
    s.first_q = integer_at(a.cu_seqlens_q, b);
    s.len_q = integer_at(a.cu_seqlens_q, b + 1) - s.first_q;
  }
  if (a.cu_seqlens_k.given()) {
    s.first_k = integer_at(a.cu_seqlens_k, b);
    s.len_k = integer_at(a.cu_seqlens_k, b + 1) - s.first_k;
  }
  if (a.seqused_q.given()) s.len_q = integer_at(a.seqused_q, b);
  if (a.seqused_k.given()) s.len_k = integer_at(a.seqused_k, b);
  return s;
}

PairStrides::PairStrides(const Tensor& tensor) {
  Index* const strides[] = {&b, &h, &i, &j};
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.sizes[axis] != 1) *strides[4 - tensor.rank + axis] = tensor.strides[axis];
  }
}

namespace {

bool has_positions(const Attention& a) { return a.q_positions.given() || a.k_position != 0; }

Index position_of_row(const Attention& a, const Sequence& s, Index i) {
  const Tensor& t = a.q_positions;
  if (!t.given()) return i;
  const Index block = i / 128 * t.strides[t.rank - 1];
  const Index at = block + (t.rank == 2 ? s.b * t.strides[0] : 0);
  return Index{static_cast<const std::int32_t*>(t.data)[at]} + i % 128;
}

}  // namespace

Index distance_of(const Attention& a, const Sequence& s, Index i, Index j) {
  if (has_positions(a)) return position_of_row(a, s, i) - (a.k_position + j);
  return i + s.len_k - s.len_q - j;
}

Interval visible_keys(const Attention& a, const Sequence& s, Index i) {
  const bool by_index = a.causal == Causal::top_left && !has_positions(a);
  const Index diagonal = by_index ? i : distance_of(a, s, i, 0);
  Index right = a.window.right;
  if (a.causal != Causal::none) right = 0;
  Interval keys{0, s.len_k};
  if (a.window.left >= 0) keys.begin = std::clamp<Index>(diagonal - a.window.left, 0, s.len_k);
  if (right >= 0) keys.end = std::clamp<Index>(diagonal + right + 1, 0, s.len_k);
  return keys;
}

namespace {

// Whether one of the spans of `row`, packed `first` rows further, holds x.
bool a_span_holds(const Tensor& spans, bool packed, Index b, Index h, Index first, Index row,
                  Index x) {
  const PairStrides at(spans);
  const Index offset = at.offset(b, h, packed ? first + row : row, 0);  // packed: at.b is 0
  const auto* const ends = static_cast<const std::int32_t*>(spans.data) + offset;
  for (Index n = 0; n < spans.sizes[spans.rank - 1]; n += 2) {
    if (ends[n] <= x && x < ends[n + 1]) return true;
  }
  return false;
}

}  // namespace

bool spans_show(const Attention& a, const Shape& shape, const Sequence& s, Index b, Index h,
                Index i, Index j) {
  const bool packed = shape.packed;
  return (!a.row_spans.given() || a_span_holds(a.row_spans, packed, b, h, s.first_q, i, j)) &&
         (!a.key_spans.given() || a_span_holds(a.key_spans, packed, b, h, s.first_k, j, i));
}

double scale_of(const Attention& a, const Shape& shape) {
  return a.scale ? *a.scale : 1 / std::sqrt(static_cast<double>(std::max<Index>(shape.dim, 1)));
}

}  // namespace regard::cli
