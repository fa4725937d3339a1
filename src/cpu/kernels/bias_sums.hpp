// Backward: adds dS to the gradient of the bias, which may be broadcast over any of its dimensions.
#pragma once

#include "cpu/kernels/known_type.hpp"
#include "cpu/kernels/panel.hpp"

namespace regard {
namespace {

// Adds the first `count` lanes to elements of dbias, from an offset on.
template <class L, class SomeType>
REGARD_INLINE void add_to_bias_row(SomeType type, const View& to, int64 offset, int64 count,
                                   typename L::Vec x) {
  const auto add = [&](int64 at, int64 lanes, typename L::Vec term) {
    L::store_as(type, to.data, at, lanes, L::add(L::load_as(type, to.data, at, lanes), term));
  };
  if (to.strides.column == 1) return add(offset, count, x);
  typename L::Real each[L::kLanes], total = 0;
  L::store(each, x);
  for (int64 e = 0; e < count; ++e) {
    if (to.strides.column == 0)
      total += each[e];
    else
      add(offset + e * to.strides.column, 1, L::set(each[e]));
  }
  if (to.strides.column == 0) add(offset, 1, L::set(total));
}

// Rows that share no element, in which keys follow each other. All are read before one is written:
// a load from where a store went 4096 bytes away waits for it.
template <class L, class SomeType>
REGARD_INLINE void add_to_rows(SomeType type, const View& to, const int64 (&offset)[L::kLanes],
                               int rows, int64 first, int64 count,
                               typename L::Vec (&terms)[L::kLanes]) {
#pragma GCC unroll 16
  for (int t = 0; t < L::kLanes; ++t) {
    if (t >= rows) continue;
    terms[t] = L::add(L::load_as(type, to.data, offset[t] + first, count), terms[t]);
  }
#pragma GCC unroll 16
  for (int t = 0; t < L::kLanes; ++t) {
    if (t < rows) L::store_as(type, to.data, offset[t] + first, count, terms[t]);
  }
}

// The rows of a vector: dscores[keys][panel], and where each lane's elements begin.
template <class L, class SomeType>
void add_bias_rows(SomeType type, const View& dbias, const typename L::Real* dscores, int rows,
                   const int64 (&offset)[L::kLanes], int64 keys) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  bool apart = dbias.strides.column == 1;
  for (int t = 1; t < rows; ++t) apart = apart && offset[t] > offset[t - 1];
  for (int64 j = 0; j < keys; j += L::kLanes) {
    typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < L::kLanes; ++t) {
      tile[t] = j + t < keys ? L::load(dscores + (j + t) * kWidth) : L::set(0);
    }
    L::transpose(tile);
    const int64 count = smaller<int64>(keys - j, L::kLanes);
    if (apart) {
      add_to_rows<L>(type, dbias, offset, rows, j, count, tile);
      continue;
    }
    // Lanes that share elements are summed first: sums of sums lose less.
    for (int t = 0; t < rows; ++t) {
      auto sums = tile[t];
      const int64 at = offset[t] + j * dbias.strides.column;
      while (t + 1 < rows && offset[t + 1] == offset[t]) sums = L::add(sums, tile[++t]);
      add_to_bias_row<L>(type, dbias, at, count, sums);
    }
  }
}

// dscores: [keys][panel].
template <class L>
void add_bias_gradient(const View& dbias, const HeadContext& context, const Panel& panel,
                       const typename L::Real* dscores, Interval keys) {
  const int64 first_key = keys.begin * dbias.strides.column;
  with_known(dbias.type, [&](auto type) {
    for (int v = 0; v < vectors_of<L>(panel); ++v) {
      const int first = v * L::kLanes, rows = smaller(L::kLanes, panel.rows - first);
      int64 offset[L::kLanes];
      for (int t = 0; t < rows; ++t) {
        offset[t] = first_key + offset_of(dbias.strides, context.b, panel.head[first + t], 0,
                                          panel.query[first + t]);
      }
      add_bias_rows<L>(type, dbias, dscores + first, rows, offset, keys.end - keys.begin);
    }
  });
}

}  // namespace
}  // namespace regard
