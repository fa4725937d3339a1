// The rows of a panel, transposed into its lanes, and lanes back into rows.
#pragma once

#include "cpu/kernels/packing.hpp"

namespace regard {
namespace {

// pack_lanes of a known type.
template <class L, class SomeType>
void pack_lanes_of(SomeType type, typename L::Unit* to, const HeadContext& context,
                   const Panel& panel, const View& view, int64 dim, int vectors) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  const int64 units = divide_up(dim, L::kPack);
  for (int v = 0; v < vectors; ++v) {
    int64 offset[L::kLanes];
    context.offsets_q(view, panel, v * L::kLanes, L::kLanes, offset);
    // Whole tiles of pairs are read without a mask.
    const bool whole = L::kPack > 1 && view.type == Type::bf16 &&
                       dim % (L::kLanes * L::kPack) == 0 && (v + 1) * L::kLanes <= panel.rows;
    for (int64 u = 0; u < units; u += L::kLanes) {
      typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes && whole; ++t) {
        const auto* const row = static_cast<const uint16*>(view.data) + offset[t] + L::kPack * u;
        tile[t] = L::load(reinterpret_cast<const typename L::Real*>(row));
      }
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes && !whole; ++t) {
        const bool used = v * L::kLanes + t < panel.rows;
        const int64 d = L::kPack * u;
        tile[t] = load_units_of<L>(type, view, offset[t] + d, used ? dim - d : 0);
      }
      L::transpose(tile);
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        L::store(reinterpret_cast<typename L::Real*>(to + (u + t) * kWidth + v * L::kLanes),
                 tile[t]);
      }
    }
  }
}

// The panel's rows, transposed: to[unit][panel], zeros in lanes that are not in use. Only the first
// `vectors` vectors are written.
template <class L>
void pack_lanes(typename L::Unit* to, const HeadContext& context, const Panel& panel,
                const View& view, int64 dim, int vectors = L::kVectors) {
  with_known(view.type,
             [&](auto type) { pack_lanes_of<L>(type, to, context, panel, view, dim, vectors); });
}

// The lanes (as bits) in which some element of sums[dim][panel] is not finite.
template <class L>
uint64 nonfinite_lanes(const typename L::Real* sums, const Panel& panel, int64 dim) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  uint64 finite = ~uint64(0);
  for (int v = 0; v < vectors_of<L>(panel); ++v) {
    typename L::Vec zero[4];  // x - x is 0 for every finite x, and NaN for the others
#pragma GCC unroll 4
    for (auto& sum : zero) sum = L::set(0);
    for (int64 d = 0; d < dim; d += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const auto x = L::load(sums + smaller(d + i, dim - 1) * kWidth + v * L::kLanes);
        zero[i] = L::add(zero[i], L::sub(x, x));
      }
    }
    const auto zeros = L::add(L::add(zero[0], zero[1]), L::add(zero[2], zero[3]));
    const uint64 lanes = ((uint64(1) << L::kLanes) - 1) << (v * L::kLanes);
    finite &= ~lanes | L::bits_of(L::equal(zeros, L::set(0))) << (v * L::kLanes);
  }
  return ~finite & ((uint64(1) << panel.rows) - 1);
}

// Writes `rows` lanes of sums[dim][panel], each times its factor, to rows of bf16 that begin at
// data + offset[row]. Pairs are rounded before they are transposed. kWhole: all lanes, and whole
// vectors of each row.
template <class L, bool kWhole>
void store_rounded_rows(const typename L::Real* sums, typename L::Vec factor, uint16* data,
                        const int64* offset, int rows, int64 dim) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  const auto scaled = [&](int64 d) {
    return L::mul(L::load(sums + (kWhole ? d : smaller(d, dim - 1)) * kWidth), factor);
  };
  for (int64 d = 0; d < dim; d += L::kLanes * L::kPack) {
    typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < L::kLanes; ++t) {
      tile[t] = L::rounded_pairs(scaled(d + 2 * t), scaled(d + 2 * t + 1));
    }
    L::transpose(tile);
#pragma GCC unroll 16
    for (int t = 0; t < L::kLanes; ++t) {
      if constexpr (kWhole) {
        L::store(reinterpret_cast<typename L::Real*>(data + offset[t] + d), tile[t]);
      } else if (t < rows) {
        L::store_row_units(data, offset[t] + d, dim - d, tile[t]);
      }
    }
  }
}

// Writes sums[dim][panel], each lane times factor[lane], to rows of bf16.
template <class L>
void store_rounded_lanes(const typename L::Real* sums, const typename L::Real* factor,
                         const HeadContext& context, const Panel& panel, const View& view,
                         int64 dim) {
  auto* const data = static_cast<uint16*>(view.data);
  for (int first = 0; first < panel.rows; first += L::kLanes) {
    const int rows = smaller(L::kLanes, panel.rows - first);
    int64 offset[L::kLanes];
    context.offsets_q(view, panel, first, rows, offset);
    const auto store = rows == L::kLanes && dim % (L::kLanes * L::kPack) == 0
                           ? store_rounded_rows<L, true>
                           : store_rounded_rows<L, false>;
    store(sums + first, L::load(factor + first), data, offset, rows, dim);
  }
}

// Calls store(lane, d, x) for elements from d on of each of the panel's rows in sums[dim][panel],
// each times factor[lane]. Those after the last one are undefined.
template <class L, class Store>
REGARD_INLINE void each_row_of_lanes(const typename L::Real* sums, const typename L::Real* factor,
                                     const Panel& panel, int64 dim, Store store) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  for (int v = 0; v < vectors_of<L>(panel); ++v) {
    const auto scale = L::load(factor + v * L::kLanes);
    const int first = v * L::kLanes;
    for (int64 d = 0; d < dim; d += L::kLanes) {
      typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        const int64 row = smaller(d + t, dim - 1);
        tile[t] = L::mul(L::load(sums + row * kWidth + first), scale);
      }
      L::transpose(tile);
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        if (first + t < panel.rows) store(first + t, d, tile[t]);
      }
    }
  }
}

// Writes sums[dim][panel], each lane times factor[lane], to the rows of a tensor, and adds what
// they hold times held[lane], which is not read where that is 0 or held is null. Lanes in `skip`
// are left as they are.
template <class L>
void store_lanes(const typename L::Real* sums, const typename L::Real* factor,
                 const HeadContext& context, const Panel& panel, const View& view, int64 dim,
                 const typename L::Real* held, uint64 skip) {
  using Vec = typename L::Vec;
  if constexpr (L::kPack > 1) {
    if (view.type == Type::bf16 && !held && skip == 0) {
      return store_rounded_lanes<L>(sums, factor, context, panel, view, dim);
    }
  }
  int64 offset[kMaxPanel];
  context.offsets_q(view, panel, 0, panel.rows, offset);
  if (!held && skip == 0) {
    with_known(view.type, [&](auto type) {
      each_row_of_lanes<L>(sums, factor, panel, dim, [&](int lane, int64 d, Vec x) {
        L::store_as(type, view.data, offset[lane] + d, dim - d, x);
      });
    });
    return;
  }
  each_row_of_lanes<L>(sums, factor, panel, dim, [&](int lane, int64 d, Vec x) {
    if (skip >> lane & 1) return;
    if (held && held[lane] != 0) {
      const auto had = L::load_as(view.type, view.data, offset[lane] + d, dim - d);
      x = L::fma(had, L::set(held[lane]), x);
    }
    L::store_as(view.type, view.data, offset[lane] + d, dim - d, x);
  });
}

}  // namespace
}  // namespace regard
