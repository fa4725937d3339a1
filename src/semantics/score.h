// From the raw product q . k to the logit, and the logit's slope for the backward pass.
//
// Order: scale, softcap, bias, what the head adds. `L` is a Lanes policy: double, a vector, or a
// GPU float.
#pragma once

#include "semantics/features.h"
#include "semantics/portable.h"
#include "semantics/terms.h"

namespace regard {

// logit = value * unit. The unit is uniform and positive, so that a softmax may fold it into its
// exponent instead of multiplying every element.
template <class L>
struct Logit {
  typename L::Vec value;
  typename L::Real unit;
};

template <class Real>
struct ScoreParams {
  Real scale = 1;
  Real softcap = 0;

  bool operator==(const ScoreParams&) const = default;
};

// The parameters in f32. A softcap that f32 cannot hold, or whose quotient with the scale it cannot
// hold, moves to the nearest end of the range. No score changes by more than rounding as long as
// scores and products q . k stay below 2^108.
REGARD_INLINE ScoreParams<float> narrowed_params(const ScoreParams<double>& params) {
  const auto& [scale, softcap] = params;  // each of them is narrowed below
  const double size = scale < 0 ? -scale : scale;
  const double least = larger(1e-30, size * 0x1p-120);
  const double most = larger(least, smaller(1.0, size) * 0x1p120);
  return {.scale = float(scale), .softcap = float(clamp_to(softcap, least, most))};
}

// The lowest finite bias: its product with log2(e) is finite, and so is the lse of a row of such
// logits. A lower finite bias (a mask by the type's lowest number) counts as this one. Real is the
// type of the problem's arithmetic.
template <class Real>
inline constexpr Real kLowestBias = sizeof(Real) == 4 ? Real(-0x1p126) : Real(-0x1p1022);

// bias, head and position (relative_position): read only where their features are on.
template <class L>
REGARD_INLINE Logit<L> score(Features on, const ScoreParams<typename L::Real>& params,
                             typename L::Vec raw, typename L::Vec bias, const HeadTerms<L>& head,
                             typename L::Vec position) {
  using Real = typename L::Real;
  Logit<L> s{raw, params.scale};
  if (on.softcap) {
    const auto bent = L::tanh(L::mul(raw, L::set(params.scale / params.softcap)));
    s = {L::mul(bent, L::set(params.softcap)), Real(1)};
  }
  if (on.signed_scale && !on.softcap) s = {L::mul(raw, L::set(params.scale)), Real(1)};
  if (on.bias) {
    const auto no_lower = L::max(L::set(kLowestBias<Real>), bias);
    s = {L::fma(s.value, L::set(s.unit), no_lower), Real(1)};
  }
  if (has_head_terms(on)) {
    const auto logit = L::mul(s.value, L::set(s.unit));
    s = {add_head_terms<L>(on, logit, head, position), Real(1)};
  }
  return s;
}

// Whether score_slope() is other than 1.
REGARD_INLINE bool has_slope(Features on) { return on.softcap; }

// d logit / d (scale * raw): 1 - tanh^2 under a softcap, else 1.
template <class L>
REGARD_INLINE typename L::Vec score_slope(Features on, const ScoreParams<typename L::Real>& params,
                                          typename L::Vec raw) {
  using Real = typename L::Real;
  if (!has_slope(on)) return L::set(Real(1));
  const auto bent = L::tanh(L::mul(raw, L::set(params.scale / params.softcap)));
  return L::sub(L::set(Real(1)), L::mul(bent, bent));
}

// Whether score() leaves the raw product as it is, for the unit to scale.
REGARD_INLINE bool is_plain(Features on) {
  return !on.softcap && !on.signed_scale && !on.bias && !has_head_terms(on);
}

// The unit that score() gives to every logit under these features.
template <class Real>
REGARD_INLINE Real logit_unit(Features on, const ScoreParams<Real>& params) {
  return is_plain(on) ? params.scale : Real(1);
}

// The value that stands for a sink, a logit, in this unit. A value that f32 cannot hold becomes the
// largest f32, next to which no score counts.
template <class Real>
REGARD_INLINE Real value_of_sink(float sink, Real unit) {
  const double value = double(sink) / double(unit);
  return sizeof(Real) == 4 ? Real(narrowed(value)) : Real(value);
}

}  // namespace regard
