// Elements of every type in memory, and the maths policy of the semantics on a GPU.
#pragma once

#include "cuda/kernels/ptx.cuh"
#include "problem/problem.h"

namespace regard {

static_assert(kTypeCount == 7, "a type was added: how it is stored, loaded and computed with");

// F16 and Bf16 are names of formats; in memory they are 16 bits.
template <Type kType>
struct ElementOf;
template <>
struct ElementOf<Type::f16> {
  using Format = F16;
  using Stored = uint16;
  using Real = float;
};
template <>
struct ElementOf<Type::bf16> {
  using Format = Bf16;
  using Stored = uint16;
  using Real = float;
};
template <>
struct ElementOf<Type::f32> {
  using Format = float;
  using Stored = float;
  using Real = float;
};
template <>
struct ElementOf<Type::f64> {
  using Format = double;
  using Stored = double;
  using Real = double;
};

// The arithmetic of a problem of this type.
template <Type kType>
using RealOf = typename ElementOf<kType>::Real;

template <class Real>
REGARD_DEVICE Real load_element(const void* data, Type type, int64 at) {
  switch (type) {
    case Type::f64:
      return Real(static_cast<const double*>(data)[at]);
    case Type::f32:
      return Real(static_cast<const float*>(data)[at]);
    case Type::f16:
      return Real(widen<F16>(static_cast<const uint16*>(data)[at]));
    default:
      return Real(widen<Bf16>(static_cast<const uint16*>(data)[at]));
  }
}

template <class Real>
REGARD_DEVICE void store_element(void* data, Type type, int64 at, Real x) {
  switch (type) {
    case Type::f64:
      static_cast<double*>(data)[at] = double(x);
      return;
    case Type::f32:
      static_cast<float*>(data)[at] = float(x);
      return;
    case Type::f16:
      static_cast<uint16*>(data)[at] = narrow<F16>(float(x));
      return;
    default:
      static_cast<uint16*>(data)[at] = narrow<Bf16>(float(x));
      return;
  }
}

// Adds x to an element of dbias in f64, where dbias is f64 and accumulated: f32 would round what it
// holds. False: this is not such a dbias. kBias: the bias's type, which is dbias's if that is f64.
template <Type kBias, class Real>
REGARD_DEVICE bool adds_in_f64(const Problem& p, int64 at, Real x) {
  if constexpr (kBias != Type::f64) return false;
  if (!p.accumulate || p.dbias.type != Type::f64) return false;
  static_cast<double*>(p.dbias.data)[at] += double(x);
  return true;
}

// The Lanes policy: one element a thread.
template <class RealType>
struct GpuLanes {
  using Real = RealType;
  using Vec = RealType;

  static REGARD_DEVICE Vec set(Real x) { return x; }
  static REGARD_DEVICE Vec add(Vec a, Vec b) { return a + b; }
  static REGARD_DEVICE Vec sub(Vec a, Vec b) { return a - b; }
  static REGARD_DEVICE Vec mul(Vec a, Vec b) { return a * b; }
  static REGARD_DEVICE Vec div(Vec a, Vec b) { return a / b; }
  static REGARD_DEVICE Vec fma(Vec a, Vec b, Vec c) { return fma_of(a, b, c); }
  static REGARD_DEVICE Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b if either is NaN
  static REGARD_DEVICE Vec abs(Vec x) { return magnitude_of(x); }
  static REGARD_DEVICE Vec exp2(Vec x) { return exp2_of(x); }
  static REGARD_DEVICE Vec log2(Vec x) { return log2_of(x); }
  static REGARD_DEVICE Vec tanh(Vec x) { return tanh_of(x); }
  static REGARD_DEVICE bool equal(Vec a, Vec b) { return a == b; }
  static REGARD_DEVICE Vec select(bool condition, Vec a, Vec b) { return condition ? a : b; }
};

// The parameters of score() in the kernel's arithmetic.
template <class Real>
REGARD_DEVICE ScoreParams<Real> score_params(const Problem& p);
template <>
REGARD_DEVICE ScoreParams<float> score_params<float>(const Problem& p) {
  return narrowed_params(p.score);
}
template <>
REGARD_DEVICE ScoreParams<double> score_params<double>(const Problem& p) {
  return p.score;
}

}  // namespace regard
