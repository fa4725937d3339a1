// Lanes of AVX2 with FMA and F16C: 8 floats or 4 doubles.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "regard/type.hpp"
#include "semantics/portable.h"

namespace regard {
namespace {

struct Avx2F32 {
  using Real = float;
  using Vec = __m256;
  using Mask = __m256;
  using Unit = float;
  using UnitVec = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kVectors = 2;
  static constexpr int kRows = 6;
  static constexpr int kPack = 1;

  static Vec set(float x) { return _mm256_set1_ps(x); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b if either is NaN
  static Vec abs(Vec x) { return _mm256_andnot_ps(set(-0.0f), x); }
  static Vec with_sign_of(Vec size, Vec sign) {
    return _mm256_or_ps(size, _mm256_and_ps(sign, set(-0.0f)));
  }
  static Mask equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static Mask less_equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
  static Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static Vec select(Mask which, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, which); }
  static Mask mask_of(uint64 bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i all = _mm256_set1_epi32(int(bits));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, lane), lane));
  }
  static uint64 bits_of(Mask mask) { return uint64(unsigned(_mm256_movemask_ps(mask))); }
  static Vec floor(Vec x) { return _mm256_floor_ps(x); }
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
    // The numbers have 16 bits, so that signed comparison serves.
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
    return bits_of(
        _mm256_castsi256_ps(_mm256_cmpgt_epi32(x, _mm256_set1_epi32(int(threshold) - 1))));
  }
  static Vec times_power(Vec x, Vec n) {
    const Vec bounded = _mm256_min_ps(set(128), _mm256_max_ps(set(-127), n));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(bounded), _mm256_set1_epi32(127));
    return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }

  static UnitVec load_units(const Unit* p) { return _mm256_loadu_ps(p); }
  static UnitVec broadcast_unit(Unit x) { return _mm256_set1_ps(x); }
  static Vec multiply_add(Vec sum, UnitVec a, UnitVec b) { return _mm256_fmadd_ps(a, b, sum); }

  static __m256i first_lanes(int64 count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), lane);
  }
  // Narrow elements have no masked load: a partial vector is copied one element at a time.
  template <class Element>
  static __m128i load_narrow(const Element* p, int64 count) {
    alignas(16) Element lanes[16 / sizeof(Element)] = {};
    for (int64 i = 0; i < count && i < kLanes; ++i) lanes[i] = p[i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(lanes));
  }
  static __m128i load_halves(const uint16_t* p, int64 count) {
    return count >= kLanes ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                           : load_narrow(p, count);
  }

  static Vec load_as(Type type, const void* data, int64 offset, int64 count) {
    switch (type) {
      case Type::f32: {
        const auto* p = static_cast<const float*>(data) + offset;
        return count >= kLanes ? load(p) : _mm256_maskload_ps(p, first_lanes(count));
      }
      case Type::f64: {
        const auto* p = static_cast<const double*>(data) + offset;
        alignas(32) float lanes[kLanes] = {};
        for (int64 i = 0; i < count && i < kLanes; ++i) lanes[i] = narrowed(p[i]);
        return _mm256_load_ps(lanes);
      }
      case Type::f16:
        return _mm256_cvtph_ps(load_halves(static_cast<const uint16_t*>(data) + offset, count));
      case Type::bf16: {
        const __m128i bits = load_halves(static_cast<const uint16_t*>(data) + offset, count);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
      }
      case Type::boolean: {
        const auto* p = static_cast<const uint8_t*>(data) + offset;
        const __m128i bytes = count >= kLanes ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))
                                              : load_narrow(p, count);
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
      }
      default:
        return _mm256_setzero_ps();
    }
  }

  // A vector of pairs of bf16.
  static void load_even_and_odd(const void* pairs, Vec& even, Vec& odd) {
    const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(pairs));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)));
  }

  static __m128i to_bf16(Vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i wide = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  }
  // A store with a mask takes tens of cycles on AMD's processors.
  static void store_floats(float* p, int64 count, Vec x) {
    if (count >= kLanes) {
      store(p, x);
    } else {
      _mm256_maskstore_ps(p, first_lanes(count), x);
    }
  }
  static void store_halves(uint16_t* p, int64 count, __m128i halves) {
    if (count >= kLanes) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
      return;
    }
    alignas(16) uint16_t lanes[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), halves);
    for (int64 i = 0; i < count; ++i) p[i] = lanes[i];
  }
  static void store_as(Type type, void* data, int64 offset, int64 count, Vec x) {
    switch (type) {
      case Type::f32:
        store_floats(static_cast<float*>(data) + offset, count, x);
        break;
      case Type::f16:
        store_halves(static_cast<uint16_t*>(data) + offset, count,
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        break;
      case Type::bf16:
        store_halves(static_cast<uint16_t*>(data) + offset, count, to_bf16(x));
        break;
      default:
        break;
    }
  }

  static void transpose(Vec (&r)[8]) {
    Vec t[8];
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      const Vec a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
      const Vec c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
      const Vec d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
      t[i] = _mm256_shuffle_ps(a, c, 0x44);
      t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
      t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
      r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
  }

  // Lane t: the sum of the lanes of r[t].
  static Vec sums(Vec (&r)[8]) {
    const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
    const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
    return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
};

struct Avx2F64 {
  using Real = double;
  using Vec = __m256d;
  using Mask = __m256d;
  using Unit = double;
  using UnitVec = __m256d;
  static constexpr int kLanes = 4;
  static constexpr int kVectors = 2;
  static constexpr int kRows = 6;
  static constexpr int kPack = 1;

  static Vec set(double x) { return _mm256_set1_pd(x); }
  static Vec load(const double* p) { return _mm256_loadu_pd(p); }
  static void store(double* p, Vec x) { _mm256_storeu_pd(p, x); }
  static Vec add(Vec a, Vec b) { return _mm256_add_pd(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_pd(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_pd(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_pd(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_pd(a, b); }
  static Vec abs(Vec x) { return _mm256_andnot_pd(set(-0.0), x); }
  static Vec with_sign_of(Vec size, Vec sign) {
    return _mm256_or_pd(size, _mm256_and_pd(sign, set(-0.0)));
  }
  static Mask equal(Vec a, Vec b) { return _mm256_cmp_pd(a, b, _CMP_EQ_OQ); }
  static Mask less_equal(Vec a, Vec b) { return _mm256_cmp_pd(a, b, _CMP_LE_OQ); }
  static Mask less(Vec a, Vec b) { return _mm256_cmp_pd(a, b, _CMP_LT_OQ); }
  static Vec select(Mask which, Vec yes, Vec no) { return _mm256_blendv_pd(no, yes, which); }
  static Mask mask_of(uint64 bits) {
    const __m256i lane = _mm256_setr_epi64x(1, 2, 4, 8);
    const __m256i all = _mm256_set1_epi64x(static_cast<long long>(bits));
    return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(all, lane), lane));
  }
  static uint64 bits_of(Mask mask) { return uint64(unsigned(_mm256_movemask_pd(mask))); }
  static Vec floor(Vec x) { return _mm256_floor_pd(x); }
  static uint64 at_least(const uint32_t* numbers, uint32_t threshold) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
    return uint64(unsigned(
        _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(x, _mm_set1_epi32(int(threshold) - 1))))));
  }
  static Vec times_power(Vec x, Vec n) {
    const Vec bounded = _mm256_min_pd(set(1024), _mm256_max_pd(set(-1023), n));
    const __m256i exponent = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(bounded)),
                                              _mm256_set1_epi64x(1023));
    return mul(x, _mm256_castsi256_pd(_mm256_slli_epi64(exponent, 52)));
  }

  static UnitVec load_units(const Unit* p) { return _mm256_loadu_pd(p); }
  static UnitVec broadcast_unit(Unit x) { return _mm256_set1_pd(x); }
  static Vec multiply_add(Vec sum, UnitVec a, UnitVec b) { return _mm256_fmadd_pd(a, b, sum); }

  static __m256i first_lanes(int64 count) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(static_cast<long long>(count)),
                              _mm256_setr_epi64x(0, 1, 2, 3));
  }
  static Vec load_as(Type type, const void* data, int64 offset, int64 count) {
    if (type == Type::f64) {
      const auto* p = static_cast<const double*>(data) + offset;
      return count >= kLanes ? load(p) : _mm256_maskload_pd(p, first_lanes(count));
    }
    return _mm256_cvtps_pd(_mm256_castps256_ps128(
        Avx2F32::load_as(type, data, offset, count < kLanes ? count : kLanes)));
  }
  static void store_as(Type type, void* data, int64 offset, int64 count, Vec x) {
    if (type == Type::f64) {
      auto* p = static_cast<double*>(data) + offset;
      if (count >= kLanes) {
        store(p, x);
      } else {
        _mm256_maskstore_pd(p, first_lanes(count), x);
      }
    } else {
      Avx2F32::store_as(type, data, offset, count < kLanes ? count : kLanes,
                        _mm256_castps128_ps256(_mm256_cvtpd_ps(x)));
    }
  }

  static void transpose(Vec (&r)[4]) {
    const Vec a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
    const Vec c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(a, c, 0x20);
    r[1] = _mm256_permute2f128_pd(b, d, 0x20);
    r[2] = _mm256_permute2f128_pd(a, c, 0x31);
    r[3] = _mm256_permute2f128_pd(b, d, 0x31);
  }

  static Vec sums(Vec (&r)[4]) {
    const Vec a = _mm256_hadd_pd(r[0], r[1]), b = _mm256_hadd_pd(r[2], r[3]);
    return add(_mm256_permute2f128_pd(a, b, 0x20), _mm256_permute2f128_pd(a, b, 0x31));
  }
};

}  // namespace
}  // namespace regard
