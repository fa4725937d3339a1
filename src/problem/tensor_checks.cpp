// What one tensor must satisfy, and how it becomes a View.
#include "problem/tensor_checks.hpp"

#include <algorithm>
#include <limits>

#include "problem/overlap.hpp"
#include "problem/refuse.hpp"

namespace regard {
namespace {

bool has_elements(const Tensor& tensor) {
  for (std::size_t axis = 0; axis < rank_of(tensor); ++axis) {
    if (tensor.sizes[axis] == 0) return false;
  }
  return true;
}

bool same_sizes(const Tensor& a, const Tensor& b) {
  return a.rank == b.rank && std::equal(a.sizes.begin(), a.sizes.begin() + a.rank, b.sizes.begin());
}

Tensor only_sizes(const Tensor& tensor) {
  Tensor shape = tensor;
  std::int64_t dense = 1;
  for (std::size_t axis = rank_of(shape); axis-- > 0;) {
    shape.strides[axis] = dense;
    if (__builtin_mul_overflow(dense, shape.sizes[axis], &dense)) dense = 1;
  }
  return shape;
}

// The stride of an axis with one element may be any number, and must not be used.
std::int64_t stride_of(const Tensor& tensor, std::size_t axis) {
  return tensor.sizes[axis] > 1 ? tensor.strides[axis] : 0;
}

}  // namespace

void check_shape(const char* name, const Tensor& tensor, int rank, const char* wanted) {
  require(tensor.type <= Type::i32, name, int(tensor.type), "is no such type");
  require(tensor.rank >= 0, name, tensor, "needs as many strides as sizes");
  require(tensor.rank == rank, name, tensor, wanted);
  __int128 span = 1;
  for (std::size_t axis = 0; axis < rank_of(tensor); ++axis) {
    const std::int64_t size = tensor.sizes[axis];
    require(size >= 0, name, tensor, "sizes must not be negative");
    require(size <= std::numeric_limits<std::int32_t>::max(), name, tensor,
            "sizes must be below 2^31");
    const __int128 stride = tensor.strides[axis];
    if (size > 0) span += (size - 1) * (stride < 0 ? -stride : stride);
  }
  // The span in bytes must fit an address, so that no offset can overflow.
  require(span * __int128(size_of(tensor.type)) < __int128(1) << 62, name, tensor,
          "spans more memory than there is");
}

void check_last_stride(const char* name, const Tensor& tensor) {
  const std::size_t last = rank_of(tensor) - 1;
  require(tensor.sizes[last] <= 1 || tensor.strides[last] == 1 || !has_elements(tensor), name,
          tensor, "the last stride must be 1");
}

void check_data(const char* name, const Tensor& tensor) {
  if (!tensor.given() || !has_elements(tensor)) return;
  require(tensor.data != nullptr, name, "null", "must point to data");
  require(reinterpret_cast<std::uintptr_t>(tensor.data) % size_of(tensor.type) == 0, name,
          static_cast<const void*>(tensor.data), "must be aligned to its elements; a copy is");
}

View row_view(const char* name, const Tensor& tensor, const Tensor& like, bool packed,
              Access access) {
  check_shape(name, tensor, like.rank, "must have as many dimensions as q");
  if (!same_sizes(tensor, like)) refuse(name, tensor, "must be " + to_string(only_sizes(like)));
  check_last_stride(name, tensor);
  if (access == Access::write) check_overlap(name, tensor);
  return checked_row_view(tensor, packed);
}

View checked_row_view(const Tensor& tensor, bool packed) {
  const auto s = [&](std::size_t axis) { return stride_of(tensor, axis); };
  return {.data = tensor.data,
          .type = tensor.type,
          .strides = packed ? Strides{.batch = 0, .head = s(1), .row = s(0), .column = 1}
                            : Strides{.batch = s(0), .head = s(1), .row = s(2), .column = 1}};
}

View lse_view(const char* name, const Tensor& tensor, const Problem& p, Access access) {
  const Type wanted = computes_in_f64(p) ? f64 : f32;
  if (tensor.type != wanted) refuse(name, tensor, std::string("must be ") + name_of(wanted));
  const Sizes& n = p.sizes;
  const Tensor like = p.packed ? Tensor(nullptr, wanted, {n.heads_q, n.rows_q})
                               : Tensor(nullptr, wanted, {n.batch, n.heads_q, n.len_q});
  check_shape(name, tensor, like.rank, p.packed ? "must be (Hq, total_q)" : "must be (B, Hq, Sq)");
  if (!same_sizes(tensor, like)) refuse(name, tensor, "must be " + to_string(like));
  if (access == Access::write) check_overlap(name, tensor);
  const auto s = [&](std::size_t axis) { return stride_of(tensor, axis); };
  return {.data = tensor.data,
          .type = tensor.type,
          .strides = p.packed ? Strides{.batch = 0, .head = s(0), .row = s(1), .column = 0}
                              : Strides{.batch = s(0), .head = s(1), .row = s(2), .column = 0}};
}

View broadcast_view(const char* name, const Tensor& tensor,
                    const std::array<std::int64_t, 4>& full) {
  require(tensor.rank <= 4, name, tensor, "must have at most 4 dimensions");
  check_shape(name, tensor, tensor.rank, "");
  std::int64_t strides[4] = {0, 0, 0, 0};
  const std::size_t absent = 4 - rank_of(tensor);
  for (std::size_t axis = absent; axis < 4; ++axis) {
    const std::int64_t size = tensor.sizes[axis - absent];
    if (size != 1 && size != full[axis]) {
      refuse(name, tensor,
             "must broadcast to " +
                 to_string(Tensor(nullptr, tensor.type, {full[0], full[1], full[2], full[3]})));
    }
    if (size != 1) strides[axis] = tensor.strides[axis - absent];
  }
  return {.data = tensor.data,
          .type = tensor.type,
          .strides = {strides[0], strides[1], strides[2], strides[3]}};
}

SpanView span_view(const char* name, const Tensor& tensor, const Problem& p, Side side) {
  const Sizes& s = p.sizes;
  const bool of_keys = side == Side::keys;
  require(tensor.type == i32, name, tensor, "must be i32");
  require(tensor.rank >= 0, name, tensor, "needs as many strides as sizes");
  require(tensor.rank >= 1 && tensor.rank <= 4, name, tensor, "must have 1 to 4 dimensions");
  const std::int64_t ends = tensor.sizes[rank_of(tensor) - 1];
  require(ends % 2 == 0 && ends >= 2 && ends <= 2 * kMostSpans, name, tensor,
          "the last dimension must hold 1 to 8 spans, a begin and an end each");
  check_last_stride(name, tensor);
  SpanView spans{.view = {}, .count = int32(ends / 2)};
  if (!p.packed) {
    spans.view =
        broadcast_view(name, tensor, {s.batch, s.heads_q, of_keys ? s.len_k : s.len_q, ends});
    return spans;
  }
  const std::int64_t rows = of_keys ? s.rows_k : s.rows_q;
  check_shape(name, tensor, 3, "packed sequences need (Hq or 1, total, 2 n)");
  if ((tensor.sizes[0] != 1 && tensor.sizes[0] != s.heads_q) || tensor.sizes[1] != rows) {
    refuse(name, tensor,
           "must be " + to_string(Tensor(nullptr, i32, {s.heads_q, rows, ends})) +
               ", or have one head");
  }
  spans.view = {.data = tensor.data,
                .type = i32,
                .strides = {.head = stride_of(tensor, 0), .row = stride_of(tensor, 1)}};
  return spans;
}

View head_view(const char* name, const Tensor& tensor, const Sizes& sizes, bool per_batch) {
  check_shape(name, tensor, per_batch ? 2 : 1, per_batch ? "must be (B, Hq)" : "must be (Hq)");
  const std::size_t head = per_batch ? 1 : 0;
  if (tensor.sizes[head] != sizes.heads_q || (per_batch && tensor.sizes[0] != sizes.batch)) {
    refuse(name, tensor,
           "must have " + std::to_string(sizes.heads_q) + " heads" +
               (per_batch ? " in " + std::to_string(sizes.batch) + " batches" : ""));
  }
  return {
      .data = tensor.data,
      .type = tensor.type,
      .strides = {.batch = per_batch ? stride_of(tensor, 0) : 0, .head = stride_of(tensor, head)}};
}

View like_view(const char* name, const Tensor& tensor, const Tensor& bias, const Problem& p) {
  check_shape(name, tensor, bias.rank, "must have as many dimensions as the bias");
  if (!same_sizes(tensor, bias)) refuse(name, tensor, "must be " + to_string(only_sizes(bias)));
  check_overlap(name, tensor);
  const Sizes& s = p.sizes;
  return broadcast_view(name, tensor, {s.batch, s.heads_q, s.len_q, s.len_k});
}

}  // namespace regard
