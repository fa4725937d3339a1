// The online softmax of one row: its running maximum and sum, the next step, the merge of two
// partial rows, and the final lse.
//
// A logit is value * unit. Maxima are values, and e^(logit) is 2^(value * exponent) with exponent =
// unit * log2(e). Values are subtracted before they are scaled: the difference is exact where it
// matters, and the lse belongs to the maximum itself, not to a rounded multiple of it.
#pragma once

#include "semantics/portable.h"

namespace regard {

inline constexpr double kLog2E = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

// sum = sum over the keys seen so far of 2^((value - max) * exponent). Nothing seen: max = -inf,
// sum = 0.
template <class L>
struct SoftmaxRow {
  typename L::Vec max;
  typename L::Vec sum;
};

template <class L>
REGARD_INLINE SoftmaxRow<L> empty_softmax() {
  using Real = typename L::Real;
  return {L::set(-infinity<Real>()), L::set(Real(0))};
}

// A maximum that can be subtracted: 0 in place of the -inf of a row that has seen nothing.
template <class L>
REGARD_INLINE typename L::Vec subtractable(typename L::Vec max) {
  using Real = typename L::Real;
  const auto nothing = L::equal(max, L::set(-infinity<Real>()));
  return L::select(nothing, L::set(Real(0)), max);
}

// The weight of a value relative to `base`, a subtractable maximum.
template <class L>
REGARD_INLINE typename L::Vec weight_of(typename L::Vec value, typename L::Vec base,
                                        typename L::Vec exponent) {
  return L::exp2(L::mul(L::sub(value, base), exponent));
}

// Raises the row's maximum to a block's, and returns the factor for everything that was summed
// under the old maximum.
template <class L>
REGARD_INLINE typename L::Vec raise_max(SoftmaxRow<L>& row, typename L::Vec block_max,
                                        typename L::Vec exponent) {
  const auto max = L::max(row.max, block_max);
  const auto shrink = weight_of<L>(row.max, subtractable<L>(max), exponent);
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
REGARD_INLINE MergeFactors<L> merge(SoftmaxRow<L>& row, const SoftmaxRow<L>& other,
                                    typename L::Vec exponent) {
  const auto max = L::max(row.max, other.max);
  const auto base = subtractable<L>(max);
  const MergeFactors<L> factors{weight_of<L>(row.max, base, exponent),
                                weight_of<L>(other.max, base, exponent)};
  row.sum = L::fma(other.sum, factors.second, L::mul(row.sum, factors.first));
  row.max = max;
  return factors;
}

// Natural-log lse: -inf where nothing was seen.
template <class L>
REGARD_INLINE typename L::Vec lse_of(const SoftmaxRow<L>& row, typename L::Vec unit) {
  using Real = typename L::Real;
  return L::fma(row.max, unit, L::mul(L::log2(row.sum), L::set(Real(kLn2))));
}

// How a given result and a call's own, over different keys, merge: the factor of each, and the lse
// of both. One whose lse is -inf contributes nothing; NaN or +inf makes NaN of all.
template <class L>
struct Continuation {
  typename L::Vec given;
  typename L::Vec own;
  typename L::Vec lse;
};
// Whether the call's own lse is -inf, and the given one is not: out and lse keep their bits.
template <class Real>
REGARD_INLINE bool leaves_as_given(Real given_lse, Real own_lse) {
  return own_lse == -infinity<Real>() && given_lse != -infinity<Real>();
}
template <class L>
REGARD_INLINE Continuation<L> continuation(typename L::Vec given_lse, typename L::Vec own_lse) {
  using Real = typename L::Real;
  const auto zero = L::set(Real(0)), one = L::set(Real(1)), log2e = L::set(Real(kLog2E));
  const auto max = L::max(given_lse, own_lse);
  const auto base = subtractable<L>(max);
  const auto given = weight_of<L>(given_lse, base, log2e);
  const auto own = weight_of<L>(own_lse, base, log2e);
  const auto total = L::add(given, own);
  const auto begins = L::equal(given_lse, L::set(-infinity<Real>()));
  // Infinity, which has no finite weight, stays; NaN next to it remains NaN.
  const auto is_infinite = L::equal(max, L::set(infinity<Real>()));
  const auto lse = L::select(is_infinite, L::add(given_lse, own_lse),
                             L::fma(L::log2(total), L::set(Real(kLn2)), max));
  return {L::select(begins, zero, L::div(given, total)), L::select(begins, one, L::div(own, total)),
          L::select(begins, own_lse, lse)};
}

// What the weighted sum of values is multiplied by; 0 for a row that saw nothing.
template <class L>
REGARD_INLINE typename L::Vec normaliser(const SoftmaxRow<L>& row) {
  using Real = typename L::Real;
  const auto zero = L::set(Real(0));
  return L::select(L::equal(row.sum, zero), zero, L::div(L::set(Real(1)), row.sum));
}

// The same with one instruction less for each element, where a multiply-add rounds once: a row's
// `max` holds m = round(max * exponent), in powers of two. Weights are relative to exactly this m;
// a row that has seen nothing has m = -inf.
template <class L>
REGARD_INLINE typename L::Vec weight_at(typename L::Vec value, typename L::Vec exponent,
                                        typename L::Vec reference) {
  return L::exp2(L::fma(value, exponent, L::sub(L::set(typename L::Real(0)), reference)));
}

// As raise_max, with block_max a value and row.max a reference.
template <class L>
REGARD_INLINE typename L::Vec raise_reference(SoftmaxRow<L>& row, typename L::Vec block_max,
                                              typename L::Vec exponent) {
  const auto reference = L::max(row.max, L::mul(block_max, exponent));
  const auto shrink = L::exp2(L::sub(row.max, subtractable<L>(reference)));
  row.max = reference;
  row.sum = L::mul(row.sum, shrink);
  return shrink;
}

template <class L>
REGARD_INLINE typename L::Vec lse_of_reference(const SoftmaxRow<L>& row) {
  return L::mul(L::add(row.max, L::log2(row.sum)), L::set(typename L::Real(kLn2)));
}

}  // namespace regard
