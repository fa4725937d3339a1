// Forward: what a panel has of its result so far. It is also what a split over keys leaves to be
// merged.
#pragma once

#include "plan/cpu/kernel/tiling.h"
#include "semantics/softmax.h"

namespace regard {
namespace {

template <class L>
struct Running {
  using Real = typename L::Real;
  Real* out;  // [dim_v][panel]
  Real* max;  // [panel]
  Real* sum;  // [panel]

  REGARD_INLINE Running(char* memory, const PartialLayout& at)
      : out(reinterpret_cast<Real*>(memory + at.out)),
        max(reinterpret_cast<Real*>(memory + at.max)),
        sum(reinterpret_cast<Real*>(memory + at.sum)) {}

  REGARD_INLINE SoftmaxRow<L> row(int v) const {
    return {L::load(max + v * L::kLanes), L::load(sum + v * L::kLanes)};
  }
  REGARD_INLINE void set_row(int v, const SoftmaxRow<L>& row) const {
    L::store(max + v * L::kLanes, row.max);
    L::store(sum + v * L::kLanes, row.sum);
  }

  // Adds the rows of vector v of a result over other keys.
  void add(const Running& part, int v, int64 dim_v, Real exponent) const {
    SoftmaxRow<L> own = row(v);
    const MergeFactors<L> factors = merge<L>(own, part.row(v), L::set(exponent));
    set_row(v, own);
    for (int64 d = 0; d < dim_v; ++d) {
      const int64 at = (d * L::kVectors + v) * L::kLanes;
      const auto other = L::mul(L::load(part.out + at), factors.second);
      L::store(out + at, L::fma(L::load(out + at), factors.first, other));
    }
  }
};

}  // namespace
}  // namespace regard
