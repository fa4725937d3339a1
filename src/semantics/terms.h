// What a head adds to the logit of a pair, given where the key lies relative to the query: ALiBi's
// -slope * |position|.
#pragma once

#include "semantics/features.h"
#include "semantics/sequence.h"

namespace regard {

// Whether add_head_terms() changes a logit.
REGARD_INLINE bool has_head_terms(Features on) { return on.alibi; }

// The slope of head h of batch entry b of a Problem (problem/problem.h).
template <class Real, class Problem>
REGARD_INLINE Real alibi_slope(const Problem& p, int64 b, int64 h) {
  const int64 at = offset_of(p.alibi_slopes.strides, b, h, 0, 0);
  return Real(static_cast<const float*>(p.alibi_slopes.data)[at]);
}

// The parameters of one head, or of the heads of a vector's lanes. What a feature does not need is
// not set.
template <class L>
struct HeadTerms {
  typename L::Vec alibi_slope;
};

template <class L, class Problem>
REGARD_INLINE HeadTerms<L> head_terms(Features on, const Problem& p, int64 b, int64 h) {
  HeadTerms<L> head;
  if (on.alibi) head.alibi_slope = L::set(alibi_slope<typename L::Real>(p, b, h));
  return head;
}

// The parameters of kLanes heads, from which vectors are loaded.
template <class L, uint32 kLanes>
struct HeadTermsOfLanes {
  typename L::Real alibi_slope[kLanes];

  template <class Problem>
  REGARD_INLINE void set(int lane, Features on, const Problem& p, int64 b, int64 h) {
    if (on.alibi) alibi_slope[lane] = regard::alibi_slope<typename L::Real>(p, b, h);
  }
  REGARD_INLINE HeadTerms<L> load(Features on, int first_lane) const {
    HeadTerms<L> head;
    if (on.alibi) head.alibi_slope = L::load(alibi_slope + first_lane);
    return head;
  }
};

// Where key j lies relative to query i, counted from the ends of their sequences, or by positions.
template <class Real>
REGARD_INLINE Real relative_position(const Sequence& s, int64 i, int64 j) {
  if (!s.positions.given) return Real(i - s.len_q + s.len_k - j);
  return Real(s.positions.of_row(i) - s.positions.first_key - j);
}
template <class Real, class Int>
REGARD_INLINE Real relative_position(Int i, Int j, Int len_q, Int len_k) {
  return Real(i - len_q + len_k - j);
}

template <class L>
REGARD_INLINE typename L::Vec add_head_terms(Features on, typename L::Vec logit,
                                             const HeadTerms<L>& head, typename L::Vec position) {
  if (on.alibi) logit = L::sub(logit, L::mul(head.alibi_slope, L::abs(position)));
  return logit;
}

// The most by which the terms of two keys differ that lie so far apart.
template <class L>
REGARD_INLINE typename L::Vec head_terms_change(Features on, const HeadTerms<L>& head,
                                                typename L::Vec distance) {
  return on.alibi ? L::mul(L::abs(head.alibi_slope), distance) : L::set(0);
}

}  // namespace regard
