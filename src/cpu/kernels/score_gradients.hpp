// Backward: P and dS of a panel, from its scores and dP.
#pragma once

#include "cpu/kernels/exponentials.hpp"
#include "cpu/kernels/stage.hpp"
#include "semantics/score.h"

namespace regard {
namespace {

// Of a panel's rows with one key.
template <class L>
struct KeyGradients {
  typename L::Vec weight[L::kVectors];
  typename L::Vec dscore[L::kVectors];
};

// P^T = e^(S^T - lse) and dS^T = P^T (Z dP^T - delta). kPlain: scores are multiplied by their unit
// and no more, no pair is hidden, there is no dropout, and nobody wants dS in f32.
template <class L, bool kPlain>
class ScoreGradients {
  using Real = typename L::Real;
  using Vec = typename L::Vec;
  static constexpr int kWidth = L::kLanes * L::kVectors;

 public:
  // scores, dweights: [keys][panel]. Where dS is kept in f32, it takes the place of the scores.
  ScoreGradients(const ScoreTerms<L>& terms, const Stage<Real>& stage, const Real* lse,
                 const Real* delta, Real* scores, const Real* dweights, bool may_hide,
                 bool keeps_dscores)
      : terms_(terms),
        stage_(stage),
        scores_(scores),
        dweights_(dweights),
        may_hide_(may_hide),
        keeps_dscores_(keeps_dscores),
        log2e_(L::set(Real(kLog2E))),
        unit_(L::set(terms.unit)),
        keep_(L::set(terms.keep_scale)) {
#pragma GCC unroll 4
    for (int v = 0; v < L::kVectors; ++v) {
      minus_lse_[v] = L::sub(L::set(0), L::load(lse + v * L::kLanes));
      delta_[v] = L::load(delta + v * L::kLanes);
    }
  }

  // Of the tile's key j, which is `key` of the sequence.
  REGARD_INLINE void of(int64 j, int64 key, KeyGradients<L>& to) const {
#pragma GCC unroll 4
    for (int v = 0; v < L::kVectors; ++v) {
      const int64 pair = j * kWidth + v * L::kLanes;
      const Vec raw = L::load(scores_ + pair), dweight = L::load(dweights_ + pair);
      if constexpr (kPlain) {
        to.weight[v] = weight(raw, v);
        to.dscore[v] = L::mul(to.weight[v], L::sub(dweight, delta_[v]));
      } else {
        with_terms(j, key, v, raw, dweight, to);
      }
    }
  }

 private:
  REGARD_INLINE Vec weight(Vec logit, int v) const {
    return made_.exp2(L::mul(L::fma(logit, unit_, minus_lse_[v]), log2e_));
  }

  REGARD_INLINE void with_terms(int64 j, int64 key, int v, Vec raw, Vec dweight,
                                KeyGradients<L>& to) const {
    const Features& on = terms_.on;
    const Vec zero = L::set(0);
    const int64 pair = j * kWidth + v * L::kLanes;
    const auto seen = [&](Vec x) {
      return may_hide_ ? L::select(L::mask_of(stage_.visible[j] >> (v * L::kLanes)), x, zero) : x;
    };
    Vec logit = raw;
    if (!is_plain(on)) {
      logit = terms_.value(raw, on.bias ? L::load(stage_.bias + pair) : zero, v, key);
    }
    const Vec whole = weight(logit, v);
    to.weight[v] = whole;
    if (on.dropout) {
      const auto kept = L::mask_of(stage_.kept[j] >> (v * L::kLanes));
      dweight = L::select(kept, L::mul(dweight, keep_), zero);
      to.weight[v] = L::mul(whole, L::select(kept, keep_, zero));
    }
    to.weight[v] = seen(to.weight[v]);
    to.dscore[v] = seen(L::mul(whole, L::sub(dweight, delta_[v])));
    if (keeps_dscores_) L::store(scores_ + pair, to.dscore[v]);
    if (has_slope(on)) {
      to.dscore[v] = seen(L::mul(to.dscore[v], score_slope<L>(on, terms_.params, raw)));
    }
  }

  const ScoreTerms<L>& terms_;
  const Stage<Real>& stage_;
  Real* const scores_;
  const Real* const dweights_;
  const bool may_hide_, keeps_dscores_;
  const Vec log2e_, unit_, keep_;
  Vec minus_lse_[L::kVectors], delta_[L::kVectors];
  [[no_unique_address]] WeightsOf<L> made_;
};

}  // namespace
}  // namespace regard
