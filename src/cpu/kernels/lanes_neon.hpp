// Lanes of NEON, which every aarch64 has: 4 floats or 2 doubles.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "regard/type.hpp"
#include "semantics/portable.h"

namespace regard {
namespace {

// Where a vector may be read whole: at p, or in `copy`, which gets the first `count` elements and
// zeros after them.
template <int kLanes, class Element>
REGARD_INLINE const Element* whole_vector(const Element* p, int64 count, Element (&copy)[kLanes]) {
  if (count >= kLanes) return p;
  for (int64 i = 0; i < kLanes; ++i) copy[i] = i < count ? p[i] : Element(0);
  return copy;
}

struct NeonF32 {
  using Real = float;
  using Vec = float32x4_t;
  using Mask = uint32x4_t;
  using Unit = float;
  using UnitVec = float32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kVectors = 4;
  static constexpr int kRows = 5;
  static constexpr int kPack = 1;

  static Vec set(float x) { return vdupq_n_f32(x); }
  static Vec load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Vec x) { vst1q_f32(p, x); }
  static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
  static Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  static Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  static Vec max(Vec a, Vec b) { return select(less(b, a), a, b); }  // b if either is NaN
  static Vec abs(Vec x) { return vabsq_f32(x); }
  static Vec with_sign_of(Vec size, Vec sign) {
    return vbslq_f32(vdupq_n_u32(0x80000000u), sign, size);
  }
  static Mask equal(Vec a, Vec b) { return vceqq_f32(a, b); }
  static Mask less_equal(Vec a, Vec b) { return vcleq_f32(a, b); }
  static Mask less(Vec a, Vec b) { return vcltq_f32(a, b); }
  static Vec select(Mask which, Vec yes, Vec no) { return vbslq_f32(which, yes, no); }
  static uint32x4_t lane_bits() { return uint32x4_t{1, 2, 4, 8}; }
  static Mask mask_of(uint64 bits) { return vtstq_u32(vdupq_n_u32(uint32_t(bits)), lane_bits()); }
  static uint64 bits_of(Mask mask) { return vaddvq_u32(vandq_u32(mask, lane_bits())); }
  static Vec floor(Vec x) { return vrndmq_f32(x); }
  struct Split {
    Vec fraction;
    Vec whole;
  };
  static Split split(Vec x) {
    const Vec bounded = max(set(-256), x);
    const Vec whole = floor(bounded);
    return {sub(bounded, whole), whole};
  }
  static uint64 at_least(const uint32_t* numbers, uint32_t threshold) {
    return bits_of(vcgeq_u32(vld1q_u32(numbers), vdupq_n_u32(threshold)));
  }
  static Vec times_power(Vec x, Vec n) {
    const Vec bounded = vminq_f32(set(128), vmaxq_f32(set(-127), n));
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(bounded), vdupq_n_s32(127));
    return mul(x, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
  }

  // A broadcast element stays a scalar, which the multiplication reads as lane 0: that costs no
  // instruction of the vector units.
  static UnitVec load_units(const Unit* p) { return vld1q_f32(p); }
  static Unit broadcast_unit(Unit x) { return x; }
  static Vec multiply_add(Vec sum, Unit a, UnitVec b) { return vfmaq_n_f32(sum, b, a); }
  static Vec multiply_add(Vec sum, UnitVec a, UnitVec b) { return vfmaq_f32(sum, a, b); }

  static Vec load_as(Type type, const void* data, int64 offset, int64 count) {
    switch (type) {
      case Type::f32: {
        float copy[kLanes];
        return vld1q_f32(whole_vector(static_cast<const float*>(data) + offset, count, copy));
      }
      case Type::f64: {
        const auto* p = static_cast<const double*>(data) + offset;
        float lanes[kLanes];
        for (int64 i = 0; i < kLanes; ++i) lanes[i] = i < count ? narrowed(p[i]) : 0;
        return vld1q_f32(lanes);
      }
      case Type::f16:
        return vcvt_f32_f16(vreinterpret_f16_u16(load_halves(data, offset, count)));
      case Type::bf16:
        return vreinterpretq_f32_u32(vshll_n_u16(load_halves(data, offset, count), 16));
      case Type::boolean: {
        const auto* p = static_cast<const uint8_t*>(data) + offset;
        uint32_t lanes[kLanes];
        for (int64 i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : 0;
        return vcvtq_f32_u32(vld1q_u32(lanes));
      }
      default:
        return set(0);
    }
  }
  static uint16x4_t load_halves(const void* data, int64 offset, int64 count) {
    uint16_t copy[kLanes];
    return vld1_u16(whole_vector(static_cast<const uint16_t*>(data) + offset, count, copy));
  }

  // A vector of pairs of bf16.
  static void load_even_and_odd(const void* pairs, Vec& even, Vec& odd) {
    const uint32x4_t bits = vreinterpretq_u32_u16(vld1q_u16(static_cast<const uint16_t*>(pairs)));
    even = vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
    odd = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)));
  }

  static uint16x4_t to_bf16(Vec x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(equal(x, x), rounded, vdupq_n_u32(0x7fc00000u)), 16);
  }
  static void store_halves(void* data, int64 offset, int64 count, uint16x4_t halves) {
    auto* const p = static_cast<uint16_t*>(data) + offset;
    if (count >= kLanes) {
      vst1_u16(p, halves);
      return;
    }
    uint16_t lanes[kLanes];
    vst1_u16(lanes, halves);
    for (int64 i = 0; i < count; ++i) p[i] = lanes[i];
  }
  static void store_as(Type type, void* data, int64 offset, int64 count, Vec x) {
    switch (type) {
      case Type::f32: {
        auto* const p = static_cast<float*>(data) + offset;
        if (count >= kLanes) {
          store(p, x);
          return;
        }
        float lanes[kLanes];
        store(lanes, x);
        for (int64 i = 0; i < count; ++i) p[i] = lanes[i];
        break;
      }
      case Type::f16:
        store_halves(data, offset, count, vreinterpret_u16_f16(vcvt_f16_f32(x)));
        break;
      case Type::bf16:
        store_halves(data, offset, count, to_bf16(x));
        break;
      default:
        break;
    }
  }

  static void transpose(Vec (&r)[4]) {
    const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1]));
    const float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1]));
    const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3]));
    const float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
    r[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
    r[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
    r[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
    r[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
  }

  // Lane t: the sum of the lanes of r[t].
  static Vec sums(Vec (&r)[4]) {
    return vpaddq_f32(vpaddq_f32(r[0], r[1]), vpaddq_f32(r[2], r[3]));
  }
};

struct NeonF64 {
  using Real = double;
  using Vec = float64x2_t;
  using Mask = uint64x2_t;
  using Unit = double;
  using UnitVec = float64x2_t;
  static constexpr int kLanes = 2;
  static constexpr int kVectors = 4;
  static constexpr int kRows = 5;
  static constexpr int kPack = 1;

  static Vec set(double x) { return vdupq_n_f64(x); }
  static Vec load(const double* p) { return vld1q_f64(p); }
  static void store(double* p, Vec x) { vst1q_f64(p, x); }
  static Vec add(Vec a, Vec b) { return vaddq_f64(a, b); }
  static Vec sub(Vec a, Vec b) { return vsubq_f64(a, b); }
  static Vec mul(Vec a, Vec b) { return vmulq_f64(a, b); }
  static Vec div(Vec a, Vec b) { return vdivq_f64(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f64(c, a, b); }
  static Vec max(Vec a, Vec b) { return select(less(b, a), a, b); }
  static Vec abs(Vec x) { return vabsq_f64(x); }
  static Vec with_sign_of(Vec size, Vec sign) {
    return vbslq_f64(vdupq_n_u64(uint64_t(1) << 63), sign, size);
  }
  static Mask equal(Vec a, Vec b) { return vceqq_f64(a, b); }
  static Mask less_equal(Vec a, Vec b) { return vcleq_f64(a, b); }
  static Mask less(Vec a, Vec b) { return vcltq_f64(a, b); }
  static Vec select(Mask which, Vec yes, Vec no) { return vbslq_f64(which, yes, no); }
  static uint64x2_t lane_bits() { return uint64x2_t{1, 2}; }
  static Mask mask_of(uint64 bits) { return vtstq_u64(vdupq_n_u64(bits), lane_bits()); }
  static uint64 bits_of(Mask mask) { return vaddvq_u64(vandq_u64(mask, lane_bits())); }
  static Vec floor(Vec x) { return vrndmq_f64(x); }
  static uint64 at_least(const uint32_t* numbers, uint32_t threshold) {
    const uint32x2_t reached = vcge_u32(vld1_u32(numbers), vdup_n_u32(threshold));
    return vaddv_u32(vand_u32(reached, uint32x2_t{1, 2}));
  }
  static Vec times_power(Vec x, Vec n) {
    const Vec bounded = vminq_f64(set(1024), vmaxq_f64(set(-1023), n));
    const int64x2_t exponent = vaddq_s64(vcvtq_s64_f64(bounded), vdupq_n_s64(1023));
    return mul(x, vreinterpretq_f64_s64(vshlq_n_s64(exponent, 52)));
  }

  static UnitVec load_units(const Unit* p) { return vld1q_f64(p); }
  static Unit broadcast_unit(Unit x) { return x; }
  static Vec multiply_add(Vec sum, Unit a, UnitVec b) { return vfmaq_n_f64(sum, b, a); }
  static Vec multiply_add(Vec sum, UnitVec a, UnitVec b) { return vfmaq_f64(sum, a, b); }

  static Vec load_as(Type type, const void* data, int64 offset, int64 count) {
    if (type == Type::f64) {
      double copy[kLanes];
      return vld1q_f64(whole_vector(static_cast<const double*>(data) + offset, count, copy));
    }
    const int64 present = count < kLanes ? count : kLanes;
    return vcvt_f64_f32(vget_low_f32(NeonF32::load_as(type, data, offset, present)));
  }
  static void store_as(Type type, void* data, int64 offset, int64 count, Vec x) {
    const int64 present = count < kLanes ? count : kLanes;
    if (type == Type::f64) {
      double lanes[kLanes];
      store(lanes, x);
      for (int64 i = 0; i < present; ++i) static_cast<double*>(data)[offset + i] = lanes[i];
    } else {
      NeonF32::store_as(type, data, offset, present, vcombine_f32(vcvt_f32_f64(x), vdup_n_f32(0)));
    }
  }

  static void transpose(Vec (&r)[2]) {
    const Vec first = vtrn1q_f64(r[0], r[1]);
    r[1] = vtrn2q_f64(r[0], r[1]);
    r[0] = first;
  }

  static Vec sums(Vec (&r)[2]) { return vpaddq_f64(r[0], r[1]); }
};

}  // namespace
}  // namespace regard
