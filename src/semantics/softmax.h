// The online softmax: one row's running maximum and sum, its next step, the merge of two partial
// rows, and the final lse. Everything is in base 2: exponent = logit * log2(e).
#pragma once

#include "semantics/portable.h"

namespace regard {

inline constexpr double kLog2E = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

// sum = sum over the keys seen so far of 2^(exponent - max). Nothing seen: max = -inf, sum = 0.
template <class L>
struct SoftmaxRow {
  typename L::Vec max;
  typename L::Vec sum;
};

template <class L>
REGARD_INLINE SoftmaxRow<L> empty_softmax() {
  using Real = typename L::Real;
  return {L::set(-Real(__builtin_huge_val())), L::set(Real(0))};
}

// A maximum that can be subtracted: 0 in place of the -inf of a row that has seen nothing.
template <class L>
REGARD_INLINE typename L::Vec subtractable(typename L::Vec max) {
  using Real = typename L::Real;
  const auto nothing = L::equal(max, L::set(-Real(__builtin_huge_val())));
  return L::select(nothing, L::set(Real(0)), max);
}

// Raises the row's maximum to cover a block's, and returns the factor by which everything that was
// summed under the old maximum shrinks.
template <class L>
REGARD_INLINE typename L::Vec raise_max(SoftmaxRow<L>& row, typename L::Vec block_max) {
  const auto max = L::max(row.max, block_max);
  const auto shrink = L::exp2(L::sub(row.max, subtractable<L>(max)));
  row.max = max;
  row.sum = L::mul(row.sum, shrink);
  return shrink;
}

// Factors for merging two partial rows; `row` becomes the merged one.
template <class L>
struct MergeFactors {
  typename L::Vec first;
  typename L::Vec second;
};
template <class L>
REGARD_INLINE MergeFactors<L> merge(SoftmaxRow<L>& row, const SoftmaxRow<L>& other) {
  const auto max = L::max(row.max, other.max);
  const auto base = subtractable<L>(max);
  const MergeFactors<L> factors{L::exp2(L::sub(row.max, base)), L::exp2(L::sub(other.max, base))};
  row.sum = L::fma(other.sum, factors.second, L::mul(row.sum, factors.first));
  row.max = max;
  return factors;
}

// Natural-log lse: -inf where nothing was seen.
template <class L>
REGARD_INLINE typename L::Vec lse_of(const SoftmaxRow<L>& row) {
  using Real = typename L::Real;
  return L::mul(L::add(row.max, L::log2(row.sum)), L::set(Real(kLn2)));
}

// What the weighted sum of values is multiplied by; 0 for a row that saw nothing.
template <class L>
REGARD_INLINE typename L::Vec normaliser(const SoftmaxRow<L>& row) {
  using Real = typename L::Real;
  const auto zero = L::set(Real(0));
  return L::select(L::equal(row.sum, zero), zero, L::div(L::set(Real(1)), row.sum));
}

}  // namespace regard
