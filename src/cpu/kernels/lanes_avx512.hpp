// Lanes of AVX-512 (F, BW, DQ, VL): 16 floats or 8 doubles; and pairs of bf16 for AVX512-BF16's dot
// products and AMX.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "regard/type.hpp"
#include "semantics/portable.h"

namespace regard {
namespace {

// Elements of a row that do not exist are never touched: every load and store is masked.
REGARD_INLINE uint16_t first_lanes(int64 count) {
  return count >= 16 ? uint16_t(0xffff) : uint16_t((1u << count) - 1);
}

struct Avx512F32 {
  using Real = float;
  using Vec = __m512;
  using Mask = __mmask16;
  using Unit = float;  // what one step of a product multiplies
  using UnitVec = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kVectors = 2;  // vectors of queries in a panel
  static constexpr int kRows = 8;     // rows of a product held in registers
  static constexpr int kPack = 1;     // elements in a Unit

  static Vec set(float x) { return _mm512_set1_ps(x); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b if either is NaN
  static Vec abs(Vec x) { return _mm512_abs_ps(x); }
  static Vec with_sign_of(Vec size, Vec sign) {
    return _mm512_or_ps(size, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
  }
  static Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static Mask less_equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
  static Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Vec select(Mask which, Vec yes, Vec no) { return _mm512_mask_mov_ps(no, which, yes); }
  static Mask mask_of(uint64 bits) { return Mask(bits); }
  static uint64 bits_of(Mask mask) { return mask; }
  static Vec floor(Vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  // What exp2 makes of x: 2^fraction by a polynomial, times 2^whole.
  struct Split {
    Vec fraction;  // x - floor(x); 0 for an infinity
    Vec whole;     // x itself: times_power takes its floor
  };
  static Split split(Vec x) {
    return {_mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), x};
  }
  // x = mantissa * 2^exponent; 0 and infinity are powers of an infinity.
  struct Parts {
    Vec mantissa;  // in [0.75, 1.5)
    Vec exponent;
  };
  static Parts parts(Vec x) {
    const Vec mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
    const Vec floor = _mm512_getexp_ps(x);
    return {mantissa, _mm512_mask_add_ps(floor, less(mantissa, set(1)), floor, set(1))};
  }
  // x * 2^floor(n); 0 below the normal numbers.
  static Vec times_power(Vec x, Vec n) {
    const Mask normal = _mm512_cmp_ps_mask(n, set(-126), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(normal, x, n);
  }
  // Bits of the lanes with a number of at least the threshold.
  static uint64 at_least(const uint32_t* numbers, uint32_t threshold) {
    return _mm512_cmpge_epu32_mask(_mm512_loadu_si512(numbers), _mm512_set1_epi32(int(threshold)));
  }

  static UnitVec load_units(const Unit* p) { return _mm512_loadu_ps(p); }
  static UnitVec broadcast_unit(Unit x) { return _mm512_set1_ps(x); }
  static Vec multiply_add(Vec sum, UnitVec a, UnitVec b) { return _mm512_fmadd_ps(a, b, sum); }
#if defined(__AVX512F__)  // tests emulate vectors, which then fit no register
  static Vec multiply_add(Vec sum, const Unit* a, UnitVec b) {
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(*a));
    return sum;
  }
#endif

  // To f32; what is finite stays finite.
  static __m256 narrowed(__m512d x) {
    const __m512d limit = _mm512_set1_pd(kLargestF32);
    const __mmask8 finite =
        _mm512_cmp_pd_mask(_mm512_abs_pd(x), _mm512_set1_pd(__builtin_inf()), _CMP_LT_OQ);
    const __m512d bounded =
        _mm512_max_pd(_mm512_sub_pd(_mm512_setzero_pd(), limit), _mm512_min_pd(limit, x));
    return _mm512_cvtpd_ps(_mm512_mask_mov_pd(x, finite, bounded));
  }

  static Vec load_as(Type type, const void* data, int64 offset, int64 count) {
    const Mask lanes = first_lanes(count);
    switch (type) {
      case Type::f32:
        return _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(data) + offset);
      case Type::f64: {
        const auto* p = static_cast<const double*>(data) + offset;
        const __m256 low = narrowed(_mm512_maskz_loadu_pd(__mmask8(lanes), p));
        // Not even the address past the row is formed where no upper lane is wanted.
        const __m256 high =
            lanes >> 8 ? narrowed(_mm512_maskz_loadu_pd(lanes >> 8, p + 8)) : _mm256_setzero_ps();
        return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
      }
      case Type::f16:
        return _mm512_cvtph_ps(
            _mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(data) + offset));
      case Type::bf16: {
        const __m256i bits =
            _mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(data) + offset);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      }
      case Type::boolean: {
        const __m128i bytes =
            _mm_maskz_loadu_epi8(lanes, static_cast<const uint8_t*>(data) + offset);
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
      }
      default:
        return _mm512_setzero_ps();
    }
  }

  // A vector of pairs of bf16.
  static void load_even_and_odd(const void* pairs, Vec& even, Vec& odd) {
    const __m512i bits = _mm512_loadu_si512(pairs);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
  }

  static __m256i to_bf16(Vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0)));
  }
  static void store_as(Type type, void* data, int64 offset, int64 count, Vec x) {
    const Mask lanes = first_lanes(count);
    switch (type) {
      case Type::f32:
        _mm512_mask_storeu_ps(static_cast<float*>(data) + offset, lanes, x);
        break;
      case Type::f16:
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(data) + offset, lanes,
                                 _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        break;
      case Type::bf16:
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(data) + offset, lanes, to_bf16(x));
        break;
      default:
        break;
    }
  }

  static void transpose(Vec (&r)[16]) {
    __m512d t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 4) {
      const Vec a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
      const Vec c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]);
      const Vec d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
      t[i] = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c));
      t[i + 1] = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c));
      t[i + 2] = _mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d));
      t[i + 3] = _mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_shuffle_f64x2(t[i], t[i + 4], 0x88);
      const __m512d b = _mm512_shuffle_f64x2(t[i], t[i + 4], 0xdd);
      const __m512d c = _mm512_shuffle_f64x2(t[i + 8], t[i + 12], 0x88);
      const __m512d d = _mm512_shuffle_f64x2(t[i + 8], t[i + 12], 0xdd);
      r[i] = _mm512_castpd_ps(_mm512_shuffle_f64x2(a, c, 0x88));
      r[i + 4] = _mm512_castpd_ps(_mm512_shuffle_f64x2(b, d, 0x88));
      r[i + 8] = _mm512_castpd_ps(_mm512_shuffle_f64x2(a, c, 0xdd));
      r[i + 12] = _mm512_castpd_ps(_mm512_shuffle_f64x2(b, d, 0xdd));
    }
  }

  // Lane t: the sum of the lanes of r[t]. Halves as many vectors at each step.
  static Vec sums(Vec (&r)[16]) {
    __m512d pairs[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const Vec a = r[2 * i], b = r[2 * i + 1];
      pairs[i] = _mm512_castps_pd(add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    }
    Vec quads[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d a = pairs[2 * i], b = pairs[2 * i + 1];
      quads[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                     _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const auto sums_of_quarters = [](Vec a, Vec b) {
      return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return sums_of_quarters(sums_of_quarters(quads[0], quads[1]),
                            sums_of_quarters(quads[2], quads[3]));
  }
};

struct Avx512F64 {
  using Real = double;
  using Vec = __m512d;
  using Mask = __mmask8;
  using Unit = double;
  using UnitVec = __m512d;
  static constexpr int kLanes = 8;
  static constexpr int kVectors = 2;
  static constexpr int kRows = 8;
  static constexpr int kPack = 1;

  static Vec set(double x) { return _mm512_set1_pd(x); }
  static Vec load(const double* p) { return _mm512_loadu_pd(p); }
  static void store(double* p, Vec x) { _mm512_storeu_pd(p, x); }
  static Vec add(Vec a, Vec b) { return _mm512_add_pd(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_pd(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_pd(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_pd(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_pd(a, b); }
  static Vec abs(Vec x) { return _mm512_abs_pd(x); }
  static Vec with_sign_of(Vec size, Vec sign) {
    return _mm512_or_pd(size, _mm512_and_pd(sign, _mm512_set1_pd(-0.0)));
  }
  static Mask equal(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  static Mask less_equal(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ); }
  static Mask less(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
  static Vec select(Mask which, Vec yes, Vec no) { return _mm512_mask_mov_pd(no, which, yes); }
  static Mask mask_of(uint64 bits) { return Mask(bits); }
  static uint64 bits_of(Mask mask) { return mask; }
  static Vec floor(Vec x) {
    return _mm512_roundscale_pd(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  static Vec times_power(Vec x, Vec n) {
    const Mask normal = _mm512_cmp_pd_mask(n, set(-1022), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_pd(normal, x, n);
  }
  static uint64 at_least(const uint32_t* numbers, uint32_t threshold) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
    return _mm256_cmpge_epu32_mask(x, _mm256_set1_epi32(int(threshold)));
  }

  static UnitVec load_units(const Unit* p) { return _mm512_loadu_pd(p); }
  static UnitVec broadcast_unit(Unit x) { return _mm512_set1_pd(x); }
  static Vec multiply_add(Vec sum, UnitVec a, UnitVec b) { return _mm512_fmadd_pd(a, b, sum); }

  static Vec load_as(Type type, const void* data, int64 offset, int64 count) {
    if (type == Type::f64) {
      return _mm512_maskz_loadu_pd(Mask(first_lanes(count)),
                                   static_cast<const double*>(data) + offset);
    }
    return _mm512_cvtps_pd(_mm512_castps512_ps256(
        Avx512F32::load_as(type, data, offset, count < kLanes ? count : kLanes)));
  }
  static void store_as(Type type, void* data, int64 offset, int64 count, Vec x) {
    if (type == Type::f64) {
      _mm512_mask_storeu_pd(static_cast<double*>(data) + offset, Mask(first_lanes(count)), x);
    } else {
      Avx512F32::store_as(type, data, offset, count < kLanes ? count : kLanes,
                          _mm512_castps256_ps512(_mm512_cvtpd_ps(x)));
    }
  }

  static void transpose(Vec (&r)[8]) {
    Vec t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Vec a = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88);
      const Vec b = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
      const Vec c = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88);
      const Vec d = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
      r[i] = _mm512_shuffle_f64x2(a, c, 0x88);
      r[i + 2] = _mm512_shuffle_f64x2(b, d, 0x88);
      r[i + 4] = _mm512_shuffle_f64x2(a, c, 0xdd);
      r[i + 6] = _mm512_shuffle_f64x2(b, d, 0xdd);
    }
  }

  static Vec sums(Vec (&r)[8]) {
    Vec pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      pairs[i] = add(_mm512_unpacklo_pd(r[2 * i], r[2 * i + 1]),
                     _mm512_unpackhi_pd(r[2 * i], r[2 * i + 1]));
    }
    const auto sums_of_quarters = [](Vec a, Vec b) {
      return add(_mm512_shuffle_f64x2(a, b, 0x88), _mm512_shuffle_f64x2(a, b, 0xdd));
    };
    return sums_of_quarters(sums_of_quarters(pairs[0], pairs[1]),
                            sums_of_quarters(pairs[2], pairs[3]));
  }
};

// bf16 in pairs, as products take them that sum in f32. Rounding: what rounds f32 to bf16.
template <class Rounding>
struct Avx512Pairs : Avx512F32 {
  using Unit = uint32_t;  // two bf16, the earlier in the lower half
  static constexpr int kPack = 2;

  // Pairs along a row of bf16, or of f32 that is rounded.
  static Vec load_row_units(Type type, const void* data, int64 offset, int64 count) {
    const int64 present = larger<int64>(count, 0);
    if (type == Type::f32) {
      const Vec second = load_as(type, data, offset + 16, larger<int64>(count - 16, 0));
      return _mm512_castsi512_ps(Rounding::round(load_as(type, data, offset, present), second));
    }
    const __mmask32 lanes = present >= 32 ? ~0u : (1u << present) - 1;
    return _mm512_castsi512_ps(
        _mm512_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(data) + offset));
  }
  // Pairs of two rows: lane t holds (even[t], odd[t]), zero where a row has no such element.
  static Vec load_pairs(Type type, const void* data, int64 even, int64 odd, int64 even_count,
                        int64 odd_count) {
    const auto row = [&](int64 offset, int64 count) {
      const int64 present = larger<int64>(count, 0);
      if (type == Type::f32) {
        return _mm512_cvtepu16_epi32(Rounding::round(load_as(type, data, offset, present)));
      }
      return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(
          first_lanes(present), static_cast<const uint16_t*>(data) + offset));
    };
    return _mm512_castsi512_ps(
        _mm512_or_si512(row(even, even_count), _mm512_slli_epi32(row(odd, odd_count), 16)));
  }
  // Pairs of two whole rows of 32 bf16: those of elements 8 n to 8 n + 3 of each eight, or of the
  // other four if `upper`, in the order of the rows.
  static Vec interleaved(const void* even, const void* odd, bool upper) {
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    return _mm512_castsi512_ps(upper ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b));
  }
  // The same in the order of the elements: the first or the upper half of the row.
  static Vec half_of_pairs(const void* even, const void* odd, bool upper) {
    const __m512i lower =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i order = upper ? _mm512_add_epi16(lower, _mm512_set1_epi16(16)) : lower;
    return _mm512_castsi512_ps(
        _mm512_permutex2var_epi16(_mm512_loadu_si512(even), order, _mm512_loadu_si512(odd)));
  }
  // Two rows of f32, rounded to pairs.
  static Vec rounded_pairs(Vec even, Vec odd) {
    const __m512i both = Rounding::round(even, odd);
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both));
  }
  // Pairs along a row of bf16, `count` elements of them.
  static void store_row_units(void* data, int64 offset, int64 count, Vec units) {
    const __mmask32 lanes = count >= 32 ? ~0u : (1u << count) - 1;
    _mm512_mask_storeu_epi16(static_cast<uint16_t*>(data) + offset, lanes,
                             _mm512_castps_si512(units));
  }
  // Weights, or any numbers, of two keys as pairs.
  static void store_weights(Unit* to, Vec even, Vec odd) {
    _mm512_storeu_ps(to, rounded_pairs(even, odd));
  }
  // Rounds one row of 32 f32 to bf16, side by side.
  static void store_rounded_row(Unit* to, Vec first, Vec second) {
    _mm512_storeu_si512(to, Rounding::round(first, second));
  }
};

#if defined(__AVX512BF16__)
struct Bf16Rounding {
  static __m256i round(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
  static __m512i round(__m512 first, __m512 second) {
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
  }
};

struct Avx512Bf16 : Avx512Pairs<Bf16Rounding> {
  using UnitVec = __m512bh;

  static UnitVec load_units(const Unit* p) { return (__m512bh)_mm512_loadu_si512(p); }
  // Not _mm512_set1_epi32, which crashes clang 16 here.
  static UnitVec broadcast_unit(Unit x) {
    return (__m512bh)_mm512_broadcastd_epi32(_mm_cvtsi32_si128(int(x)));
  }
  static Vec multiply_add(Vec sum, UnitVec a, UnitVec b) { return _mm512_dpbf16_ps(sum, a, b); }
};
#endif

}  // namespace
}  // namespace regard
