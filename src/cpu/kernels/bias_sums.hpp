// Backward: adds dS to the gradient of the bias, which may be broadcast over any of its dimensions.
#pragma once

#include "cpu/kernels/panel.hpp"

namespace regard {
namespace {

// Adds the first `count` lanes to elements of dbias, from an offset on.
template <class L>
void add_to_bias_row(const View& to, int64 offset, int64 count, typename L::Vec x) {
  const auto add = [&](int64 at, int64 lanes, typename L::Vec term) {
    L::store_as(to.type, to.data, at, lanes, L::add(L::load_as(to.type, to.data, at, lanes), term));
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

// dscores: [keys][panel].
template <class L>
void add_bias_gradient(const View& dbias, const HeadContext& context, const Panel& panel,
                       const typename L::Real* dscores, Interval keys) {
  constexpr int kWidth = L::kLanes * L::kVectors;
  const int64 step = dbias.strides.column, size = keys.end - keys.begin;
  const auto offset_of_lane = [&](int lane) {
    return offset_of(dbias.strides, context.b, panel.head[lane], 0, panel.query[lane]);
  };
  for (int v = 0; v < L::kVectors; ++v) {
    const int first = v * L::kLanes;
    for (int64 j = 0; j < size; j += L::kLanes) {
      typename L::Vec tile[L::kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < L::kLanes; ++t) {
        tile[t] = j + t < size ? L::load(dscores + (j + t) * kWidth + first) : L::set(0);
      }
      L::transpose(tile);
      // Lanes that share elements are summed first: sums of sums lose less.
      for (int t = 0; t < L::kLanes && first + t < panel.rows; ++t) {
        auto sums = tile[t];
        const int64 offset = offset_of_lane(first + t);
        while (t + 1 < L::kLanes && first + t + 1 < panel.rows &&
               offset_of_lane(first + t + 1) == offset) {
          sums = L::add(sums, tile[++t]);
        }
        add_to_bias_row<L>(dbias, offset + (keys.begin + j) * step,
                           smaller<int64>(size - j, L::kLanes), sums);
      }
    }
  }
}

}  // namespace
}  // namespace regard
