// exp2, log2 and tanh over any Lanes, built from its arithmetic.
#pragma once

#include "semantics/softmax.h"

namespace regard {
namespace {

// 2^f on [0, 1) with p(0) = 1, least maximal relative error; 9e-8 when evaluated in f32.
inline constexpr float kExp2F32[] = {0x1.c54174p-13f, 0x1.46d64cp-10f, 0x1.3d0b92p-7f,
                                     0x1.c68912p-5f,  0x1.ebfd58p-3f,  0x1.62e42cp-1f};

// Taylor coefficients 1 / k!, the highest first: e^x to 4e-18 for |x| <= ln(2) / 2.
inline constexpr double kExpF64[] = {1 / 6227020800.0,
                                     1 / 479001600.0,
                                     1 / 39916800.0,
                                     1 / 3628800.0,
                                     1 / 362880.0,
                                     1 / 40320.0,
                                     1 / 5040.0,
                                     1 / 720.0,
                                     1 / 120.0,
                                     1 / 24.0,
                                     1 / 6.0,
                                     1 / 2.0,
                                     1};

template <class Base>
struct WithMath : Base {
  using Real = typename Base::Real;
  using Vec = typename Base::Vec;
  static constexpr bool kSingle = sizeof(Real) == 4;

  // 0 for -inf and whatever lies below the normal numbers; NaN stays NaN.
  static Vec exp2(Vec x) {
    if constexpr (requires { Base::exp2(x); }) {
      return Base::exp2(x);
    } else if constexpr (kSingle) {
      const auto [fraction, whole] = Base::split(x);
      Vec p = Base::set(kExp2F32[0]);
#pragma GCC unroll 8
      for (int k = 1; k < 6; ++k) p = Base::fma(p, fraction, Base::set(kExp2F32[k]));
      return Base::times_power(Base::fma(p, fraction, Base::set(1)), whole);
    } else {
      const Vec t = Base::max(Base::set(-2048), x);
      const Vec n = Base::floor(Base::add(t, Base::set(0.5)));
      const Vec r = Base::mul(Base::sub(t, n), Base::set(kLn2));
      return Base::times_power(Base::fma(exp_minus_one_over(r), r, Base::set(1)), n);
    }
  }

  // Once per row: exactness matters more than speed, except where weights are rounded to bf16.
  static Vec log2(Vec x) {
    if constexpr (Base::kPack > 1) return log2_of_weights(x);
    Real lane[Base::kLanes];
    Base::store(lane, x);
    for (Real& value : lane) value = Real(__builtin_log2(double(value)));
    return Base::load(lane);
  }

  // expm1(2|x|) / (expm1(2|x|) + 2): as exact near 0 as elsewhere.
  static Vec tanh(Vec x) {
    const Vec limit = Base::set(kSingle ? 10 : 20);
    const Vec size = Base::abs(x);
    const Vec twice = Base::select(Base::less(limit, size), limit, size);
    const Vec y = Base::add(twice, twice);
    const Vec n = Base::floor(Base::fma(y, Base::set(Real(1 / kLn2)), Base::set(Real(0.5))));
    // y - n ln 2 in two steps, the first exact.
    constexpr double kHigh = kSingle ? 0x1.62e4p-1 : 0x1.62e42fefap-1;
    const Vec r =
        Base::fma(n, Base::set(Real(kHigh - kLn2)), Base::fma(n, Base::set(Real(-kHigh)), y));
    const Vec power = Base::times_power(Base::set(1), n);
    const Vec expm1 =
        Base::fma(power, Base::mul(exp_minus_one_over(r), r), Base::sub(power, Base::set(1)));
    return Base::with_sign_of(Base::div(expm1, Base::add(expm1, Base::set(2))), x);
  }

  // Computed as 2 atanh((m - 1) / (m + 1)) / ln 2, to 3e-7 of the result.
  static Vec log2_of_weights(Vec x) {
    const auto [mantissa, exponent] = Base::parts(x);
    const Vec one = Base::set(1);
    const Vec s = Base::div(Base::sub(mantissa, one), Base::add(mantissa, one));
    const Vec square = Base::mul(s, s);
    Vec series = Base::set(Real(1) / 11);
#pragma GCC unroll 8
    for (int odd = 9; odd > 0; odd -= 2) {
      series = Base::fma(series, square, Base::set(Real(1) / Real(odd)));
    }
    return Base::fma(Base::mul(s, Base::set(Real(2 / kLn2))), series, exponent);
  }

 private:
  // (e^r - 1) / r for |r| <= ln(2) / 2.
  static Vec exp_minus_one_over(Vec r) {
    constexpr int first = kSingle ? 5 : 0;
    Vec p = Base::set(Real(kExpF64[first]));
#pragma GCC unroll 16
    for (int k = first + 1; k < 13; ++k) p = Base::fma(p, r, Base::set(Real(kExpF64[k])));
    return p;
  }
};

}  // namespace
}  // namespace regard
