// What the copy engine can be told of the tensors of a problem, and of its planes.
#include "plan/boxed_tensor.hpp"

#include <cstdint>

#include "plan/wgmma_layout.h"
#include "regard/tensor.hpp"

namespace regard {
namespace {

constexpr int kRowsOfStore = 16;  // a warp's

// Planes are in place of batch entries.
BoxedTensor boxed(const PlaneTensor& t, const void* planes, int box_rows) {
  const int64 row = t.columns * 2, head = t.rows * row;
  return {.data = static_cast<const uint8*>(planes) + t.planes,
          .type = Type::f16,
          .sizes = {t.columns, t.rows, t.heads, kPlanes},
          .strides = {2, row, head, t.heads * head},
          .box_columns = kPanelColumns,
          .box_rows = box_rows};
}

BoxedTensor boxed(const View& view, int64 columns, int64 rows, int64 heads, int64 batch,
                  int box_rows) {
  const int64 bytes = int64(size_of(view.type));
  const Strides& s = view.strides;
  BoxedTensor x{.data = view.data,
                .type = view.type,
                .sizes = {columns, rows, heads, batch},
                .strides = {bytes, s.row * bytes, s.head * bytes, s.batch * bytes},
                .box_columns = kPanelColumns,
                .box_rows = box_rows};
  // Where there is one of it, its stride means nothing.
  for (int i = 1; i < 4; ++i) {
    if (x.sizes[i] <= 1) x.strides[i] = round_up(columns * bytes, 16);
  }
  return x;
}

BoxedTensor boxed_bias(const Problem& p) {
  if (!p.features.bias) return {};
  const Strides& s = p.bias.strides;
  return boxed(p.bias, p.sizes.len_k, p.sizes.len_q, s.head == 0 ? 1 : p.sizes.heads_q,
               s.batch == 0 ? 1 : p.sizes.batch, kWarpgroupRows);
}

}  // namespace

ForwardBoxes forward_boxes(const Problem& p, const Tiling& tiling) {
  const Sizes& s = p.sizes;
  const int64 batch = p.packed ? 1 : s.batch;
  const int64 rows_q = p.packed ? s.rows_q : s.len_q, rows_k = p.packed ? s.rows_k : s.len_k;
  return {.q = boxed(p.q, s.dim, rows_q, s.heads_q, batch, tiling.rows),
          .k = boxed(p.k, s.dim, rows_k, s.heads_kv, batch, tiling.keys),
          .v = boxed(p.v, s.dim_v, rows_k, s.heads_kv, batch, tiling.keys),
          .out = boxed(p.out, s.dim_v, rows_q, s.heads_q, batch, kRowsOfStore),
          .bias = boxed_bias(p)};
}

ForwardBoxes plane_boxes(const Problem& p, const KernelConfig& c, const void* planes) {
  const PlaneLayout layout = plane_layout(p, c);
  return {.q = boxed(layout.q, planes, c.tiling.rows),
          .k = boxed(layout.k, planes, c.tiling.keys),
          .v = boxed(layout.v, planes, c.tiling.keys),
          .out = {},
          .bias = {}};
}

BackwardBoxes plane_gradient_boxes(const Problem& p, const KernelConfig& c, const void* planes) {
  const PlaneLayout layout = plane_layout(p, c);
  return {.q = boxed(layout.q, planes, c.tiling.rows),
          .k = boxed(layout.k, planes, c.tiling.keys),
          .v = boxed(layout.v, planes, c.tiling.keys),
          .dout = boxed(layout.dout, planes, c.tiling.rows),
          .dk = {},
          .dv = {}};
}

bool has_plane_boxes(const Problem& p) {
  constexpr int64 kMostRows = INT32_MAX / 2;
  constexpr double kRowsOfBlock = 16, kTensors = 3;  // at least, at most
  const Sizes& s = p.sizes;
  const double blocks = double(s.batch) * double(s.heads_q) *
                        (double(larger(s.len_q, s.len_k)) / kRowsOfBlock + 1) * kTensors;
  return larger(plane_rows(p, s.rows_q, s.len_q, 1), plane_rows(p, s.rows_k, s.len_k, 1)) +
                 256 * (s.batch + 2) <=
             kMostRows &&
         blocks <= INT32_MAX;
}

BackwardBoxes backward_boxes(const Problem& p, const Tiling& tiling) {
  const Sizes& s = p.sizes;
  const int64 batch = p.packed ? 1 : s.batch;
  const int64 rows_q = p.packed ? s.rows_q : s.len_q, rows_k = p.packed ? s.rows_k : s.len_k;
  return {.q = boxed(p.q, s.dim, rows_q, s.heads_q, batch, tiling.rows),
          .k = boxed(p.k, s.dim, rows_k, s.heads_kv, batch, tiling.keys),
          .v = boxed(p.v, s.dim_v, rows_k, s.heads_kv, batch, tiling.keys),
          .dout = boxed(p.dout, s.dim_v, rows_q, s.heads_q, batch, tiling.rows),
          .dk = boxed(p.dk, s.dim, rows_k, s.heads_kv, batch, kWarpgroupRows),
          .dv = boxed(p.dv, s.dim_v, rows_k, s.heads_kv, batch, kWarpgroupRows)};
}

bool is_boxable(const BoxedTensor& x) {
  constexpr int64 kMostStride = int64(1) << 40;
  if (size_of(x.type) != 2 || reinterpret_cast<std::uintptr_t>(x.data) % 16 != 0) return false;
  for (int i = 0; i < 4; ++i) {
    if (x.sizes[i] < 1 || x.sizes[i] > INT32_MAX) return false;
    if (i > 0 && (x.strides[i] <= 0 || x.strides[i] % 16 != 0 || x.strides[i] >= kMostStride)) {
      return false;
    }
  }
  return true;
}

bool is_boxable_result(const BoxedTensor& x) {
  return is_boxable(x) && x.sizes[0] * x.strides[0] % 16 == 0;
}

}  // namespace regard
