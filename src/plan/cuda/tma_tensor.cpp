// The tensors of a problem as TMA sees them.
#include "plan/cuda/tma_tensor.hpp"

#include <cstdint>

#include "plan/cuda/kernel/wgmma_layout.h"
#include "regard/tensor.hpp"

namespace regard {
namespace {

constexpr int kRowsOfStore = 16;  // of out: a warp's

TmaTensor tma_tensor(const HiLoTensor& t, const void* hi_lo, int tile_rows) {
  const int64 row = t.columns * 2, head = t.rows * row;
  return {.data = static_cast<const uint8*>(hi_lo) + t.begin,
          .type = Type::f16,
          .sizes = {t.columns, t.rows, t.heads, kHiLoParts},
          .strides = {2, row, head, t.heads * head},
          .tile_columns = kPanelColumns,
          .tile_rows = tile_rows};
}

TmaTensor tma_tensor(const View& view, int64 columns, int64 rows, int64 heads, int64 batch,
                     int tile_rows) {
  const int64 bytes = int64(size_of(view.type));
  const Strides& s = view.strides;
  TmaTensor x{.data = view.data,
              .type = view.type,
              .sizes = {columns, rows, heads, batch},
              .strides = {bytes, s.row * bytes, s.head * bytes, s.batch * bytes},
              .tile_columns = kPanelColumns,
              .tile_rows = tile_rows};
  // The stride of a dimension of size 1 means nothing.
  for (int i = 1; i < 4; ++i) {
    if (x.sizes[i] <= 1) x.strides[i] = round_up(columns * bytes, 16);
  }
  return x;
}

}  // namespace

TmaTensors tma_tensors(const Problem& p, const Tiling& tiling) {
  const Sizes& s = p.sizes;
  const int64 batch = p.packed ? 1 : s.batch;
  const auto of_queries = [&](const View& view, int64 columns, int tile_rows) {
    return tma_tensor(view, columns, p.packed ? s.rows_q : s.len_q, s.heads_q, batch, tile_rows);
  };
  const auto of_keys = [&](const View& view, int64 columns, int tile_rows) {
    return tma_tensor(view, columns, p.packed ? s.rows_k : s.len_k, s.heads_kv, batch, tile_rows);
  };
  TmaTensors x{.q = of_queries(p.q, s.dim, tiling.rows),
               .k = of_keys(p.k, s.dim, tiling.keys),
               .v = of_keys(p.v, s.dim_v, tiling.keys)};
  if (p.backward) {
    x.dout = of_queries(p.dout, s.dim_v, tiling.rows);
    x.dk = of_keys(p.dk, s.dim, kWarpgroupRows);
    x.dv = of_keys(p.dv, s.dim_v, kWarpgroupRows);
    return x;
  }
  x.out = of_queries(p.out, s.dim_v, kRowsOfStore);
  if (p.features.bias) {
    const Strides& b = p.bias.strides;
    x.bias = tma_tensor(p.bias, s.len_k, s.len_q, b.head == 0 ? 1 : s.heads_q,
                        b.batch == 0 ? 1 : s.batch, kWarpgroupRows);
  }
  return x;
}

TmaTensors tma_tensors(const Problem& p, const KernelConfig& c, const void* hi_lo) {
  if (c.products != Products::f16x3) return tma_tensors(p, c.tiling);
  const HiLoLayout layout = hi_lo_layout(p, c);
  TmaTensors x{.q = tma_tensor(layout.q, hi_lo, c.tiling.rows),
               .k = tma_tensor(layout.k, hi_lo, c.tiling.keys),
               .v = tma_tensor(layout.v, hi_lo, c.tiling.keys)};
  if (p.backward) x.dout = tma_tensor(layout.dout, hi_lo, c.tiling.rows);
  return x;
}

bool has_hi_lo_tensors(const Problem& p) {
  constexpr int64 kMostRows = INT32_MAX / 2;
  constexpr double kRowsOfBlock = 16, kTensors = 3;  // at least, at most
  const Sizes& s = p.sizes;
  const double blocks = double(s.batch) * double(s.heads_q) *
                        (double(larger(s.len_q, s.len_k)) / kRowsOfBlock + 1) * kTensors;
  return larger(hi_lo_rows(p, s.rows_q, s.len_q, 1), hi_lo_rows(p, s.rows_k, s.len_k, 1)) +
                 256 * (s.batch + 2) <=
             kMostRows &&
         blocks <= INT32_MAX;
}

bool is_tma_loadable(const TmaTensor& x) {
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

bool is_tma_storable(const TmaTensor& x) {
  return is_tma_loadable(x) && x.sizes[0] * x.strides[0] % 16 == 0;
}

}  // namespace regard
