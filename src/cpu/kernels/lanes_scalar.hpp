// Lanes of one: plain C++, on any processor.
#pragma once

#include <stdint.h>

#include "regard/type.hpp"
#include "semantics/portable.h"

namespace regard {
namespace {

template <class To, class From>
REGARD_INLINE To bits_as(From from) {
  return __builtin_bit_cast(To, from);
}

REGARD_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  if (exponent == 31) return bits_as<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) return sign ? -(float(fraction) * 0x1p-24f) : float(fraction) * 0x1p-24f;
  return bits_as<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

REGARD_INLINE uint16_t float_to_half(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), size = bits & 0x7fffffffu;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
  if (size > 0x7f800000u) return sign | 0x7e00u;
  if (size >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
  if (size < 0x38800000u) {                        // below the normal halves: units of 2^-24
    // Adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
    return sign | uint16_t(bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000u);
  }
  return sign | uint16_t((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13);
}

REGARD_INLINE uint16_t float_to_bf16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <class Real_>
struct Scalar {
  using Real = Real_;
  using Vec = Real;
  using Mask = bool;
  using Unit = Real;
  using UnitVec = Real;
  static constexpr int kLanes = 1;
  static constexpr int kVectors = 4;
  static constexpr int kRows = 2;
  static constexpr int kPack = 1;

  static Vec set(Real x) { return x; }
  static Vec load(const Real* p) { return *p; }
  static void store(Real* p, Vec x) { *p = x; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec sub(Vec a, Vec b) { return a - b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec div(Vec a, Vec b) { return a / b; }
  static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  static Vec max(Vec a, Vec b) { return a > b ? a : b; }
  static Vec abs(Vec x) { return x < 0 ? -x : x; }
  static Vec with_sign_of(Vec size, Vec sign) { return __builtin_copysign(size, sign); }
  static Mask equal(Vec a, Vec b) { return a == b; }
  static Mask less_equal(Vec a, Vec b) { return a <= b; }
  static Mask less(Vec a, Vec b) { return a < b; }
  static Vec select(Mask which, Vec yes, Vec no) { return which ? yes : no; }
  static Mask mask_of(uint64 bits) { return bits & 1; }
  static uint64 bits_of(Mask mask) { return mask; }
  static Vec floor(Vec x) { return Real(__builtin_floor(double(x))); }
  struct Split {
    Vec fraction;
    Vec whole;
  };
  static Split split(Vec x) {
    const Vec bounded = max(-256, x);
    const Vec whole = floor(bounded);
    return {bounded - whole, whole};
  }
  static uint64 at_least(const uint32_t* numbers, uint32_t threshold) {
    return *numbers >= threshold;
  }
  static Vec times_power(Vec x, Vec n) {
    constexpr bool single = sizeof(Real) == 4;
    constexpr int bias = single ? 127 : 1023;
    const Real bounded = n < -bias ? Real(-bias) : n > bias + 1 ? Real(bias + 1) : n;
    if (n != n) return x;  // x is NaN as well
    if constexpr (single) {
      return x * bits_as<float>(uint32_t(int(bounded) + bias) << 23);
    } else {
      return x * bits_as<double>(uint64(int(bounded) + bias) << 52);
    }
  }

  static UnitVec load_units(const Unit* p) { return *p; }
  static UnitVec broadcast_unit(Unit x) { return x; }
  static Vec multiply_add(Vec sum, UnitVec a, UnitVec b) { return sum + a * b; }

  static Vec load_as(Type type, const void* data, int64 offset, int64 count) {
    if (count < 1) return 0;
    switch (type) {
      case Type::f64: {
        const double x = static_cast<const double*>(data)[offset];
        if constexpr (sizeof(Real) == 4) return narrowed(x);
        return Real(x);
      }
      case Type::f32:
        return static_cast<const float*>(data)[offset];
      case Type::f16:
        return half_to_float(static_cast<const uint16_t*>(data)[offset]);
      case Type::bf16:
        return bits_as<float>(uint32_t(static_cast<const uint16_t*>(data)[offset]) << 16);
      case Type::boolean:
        return static_cast<const uint8_t*>(data)[offset];
      default:
        return 0;
    }
  }
  static void store_as(Type type, void* data, int64 offset, int64 count, Vec x) {
    if (count < 1) return;
    switch (type) {
      case Type::f64:
        static_cast<double*>(data)[offset] = x;
        break;
      case Type::f32:
        static_cast<float*>(data)[offset] = float(x);
        break;
      case Type::f16:
        static_cast<uint16_t*>(data)[offset] = float_to_half(float(x));
        break;
      case Type::bf16:
        static_cast<uint16_t*>(data)[offset] = float_to_bf16(float(x));
        break;
      default:
        break;
    }
  }
  static void transpose(Vec (&)[1]) {}
};

}  // namespace
}  // namespace regard
