// What the copy engine can be told of q, k, v and out.
#include "plan/boxed_tensor.hpp"

#include <cstdint>

#include "plan/wgmma_layout.h"
#include "regard/tensor.hpp"

namespace regard {
namespace {

constexpr int kRowsOfStore = 16;  // a warp's

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

}  // namespace

ForwardBoxes forward_boxes(const Problem& p, const Tiling& tiling) {
  const Sizes& s = p.sizes;
  const int64 batch = p.packed ? 1 : s.batch;
  const int64 rows_q = p.packed ? s.rows_q : s.len_q, rows_k = p.packed ? s.rows_k : s.len_k;
  return {.q = boxed(p.q, s.dim, rows_q, s.heads_q, batch, tiling.rows),
          .k = boxed(p.k, s.dim, rows_k, s.heads_kv, batch, tiling.keys),
          .v = boxed(p.v, s.dim_v, rows_k, s.heads_kv, batch, tiling.keys),
          .out = boxed(p.out, s.dim_v, rows_q, s.heads_q, batch, kRowsOfStore)};
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
