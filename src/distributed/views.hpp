// Parts of tensors, which lie in the same memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "plan/count.h"
#include "regard/distributed.hpp"

namespace regard::distributed {

inline std::int64_t size_of_range(const Rows& range) { return range.end - range.begin; }

// The indices [begin, end) of one axis.
inline Tensor slice(Tensor x, int axis, const Rows& range) {
  const auto n = std::size_t(axis);
  x.sizes[n] = size_of_range(range);
  if (x.data && range.begin > 0) {
    x.data = static_cast<std::byte*>(x.data) +
             range.begin * x.strides[n] * std::int64_t(size_of(x.type));
  }
  return x;
}

// Some heads, or some rows, of a tensor (B, H, rows, columns).
inline Tensor heads_of(const Tensor& x, const Rows& heads) { return slice(x, 1, heads); }
inline Tensor rows_of(const Tensor& x, const Rows& rows) { return slice(x, 2, rows); }

// Whether a tensor that broadcasts to (B, Hq, rows, S) has a column for each key.
inline bool is_over_keys(const Tensor& x) {
  const bool has_columns = x.given() && x.rank >= 1 && x.rank <= Tensor::kMaxRank;
  return has_columns && x.sizes[std::size_t(x.rank - 1)] != 1;
}

// Whether a tensor that broadcasts to (B, Hq, rows, S) has values of its own for each head.
inline bool has_heads(const Tensor& x) {
  return x.given() && x.rank >= 3 && x.sizes[std::size_t(x.rank - 3)] != 1;
}

// The columns of these keys, unless it broadcasts over all.
inline Tensor columns(const Tensor& x, const Rows& keys) {
  return is_over_keys(x) ? slice(x, x.rank - 1, keys) : x;
}

// Adds the leading dimensions that are missing, of size 1.
inline Tensor in_four_dimensions(const Tensor& x) {
  Tensor wide = x;
  wide.rank = Tensor::kMaxRank;
  const int missing = Tensor::kMaxRank - x.rank;
  for (int axis = 0; axis < Tensor::kMaxRank; ++axis) {
    const bool is_new = axis < missing;
    wide.sizes[std::size_t(axis)] = is_new ? 1 : x.sizes[std::size_t(axis - missing)];
    wide.strides[std::size_t(axis)] = is_new ? 0 : x.strides[std::size_t(axis - missing)];
  }
  return wide;
}

// (B, H, rows) as (B, H, rows, 1).
inline Tensor with_one_column(Tensor x) {
  x.rank = Tensor::kMaxRank;
  x.sizes[3] = x.strides[3] = 1;
  return x;
}

inline Tensor without_column(Tensor x) {
  x.rank = Tensor::kMaxRank - 1;
  return x;
}

// Dense in row-major order, of the sizes of another one.
inline Tensor dense(void* memory, Type type, const Tensor& like) {
  Tensor x = like;
  x.data = memory;
  x.type = type;
  std::int64_t stride = 1;
  for (int axis = x.rank; axis-- > 0;) {
    x.strides[std::size_t(axis)] = stride;
    stride *= std::max<std::int64_t>(1, x.sizes[std::size_t(axis)]);
  }
  return x;
}

// The bytes of a dense tensor.
inline Count bytes_of(const Tensor& x) {
  Count bytes = std::int64_t(size_of(x.type));
  for (int axis = 0; axis < x.rank; ++axis) bytes = bytes * x.sizes[std::size_t(axis)];
  return bytes;
}

// (n, B, H, width), dense in memory, as (B, H, n, width): rows of neighbours follow each other.
inline Tensor rows_first(void* memory, Type type, std::int64_t batch, std::int64_t heads,
                         std::int64_t n, std::int64_t width) {
  return {memory, type, {batch, heads, n, width}, {heads * width, width, batch * heads * width, 1}};
}

}  // namespace regard::distributed
