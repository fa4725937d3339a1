// AVX-512 (F, BW, DQ, VL) by AVX2 with FMA and F16C, for tests on processors without it. Files use
// this namespace in namespace regard before they include lanes_avx512.hpp or lanes_amx.hpp: there
// its vectors and functions hide the compiler's of the same names, and have the same results.
//
// Only what lanes and tests use is here. Operands that select a function (a rounding, a predicate)
// trap where they have another value than those of the lanes.
#pragma once

#include <immintrin.h>
#include <stdint.h>

// Some compilers have macros for functions that take an immediate operand.
#undef _mm256_cmpge_epu32_mask
#undef _mm512_add_round_ps
#undef _mm512_cmp_pd_mask
#undef _mm512_cmp_ps_mask
#undef _mm512_cmpge_epu32_mask
#undef _mm512_cvtps_ph
#undef _mm512_getmant_ps
#undef _mm512_insertf32x8
#undef _mm512_inserti64x4
#undef _mm512_reduce_ps
#undef _mm512_roundscale_pd
#undef _mm512_roundscale_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_f64x2

namespace regard::emulated512 {
namespace {

struct __m512 {
  __m256 low, high;
};
struct __m512d {
  __m256d low, high;
};
struct __m512i {
  __m256i low, high;
};

// In place of processor.h's, which takes what fits one register.
template <class Half>
inline void keep_halves(Half& low, Half& high) {
  asm volatile("" : "+x"(low), "+x"(high));
}
inline void keep_in_register(__m512& x) { keep_halves(x.low, x.high); }
inline void keep_in_register(__m512d& x) { keep_halves(x.low, x.high); }

inline void require(bool emulated) {
  if (!emulated) __builtin_trap();
}

// ------------------------------------------------------------------------------------ by halves

#define REGARD_BY_HALVES(Vector, name)                                   \
  inline Vector _mm512_##name(Vector a, Vector b) {                      \
    return {_mm256_##name(a.low, b.low), _mm256_##name(a.high, b.high)}; \
  }

REGARD_BY_HALVES(__m512, add_ps)
REGARD_BY_HALVES(__m512, and_ps)
REGARD_BY_HALVES(__m512, div_ps)
REGARD_BY_HALVES(__m512, max_ps)
REGARD_BY_HALVES(__m512, mul_ps)
REGARD_BY_HALVES(__m512, or_ps)
REGARD_BY_HALVES(__m512, sub_ps)
REGARD_BY_HALVES(__m512, unpackhi_ps)
REGARD_BY_HALVES(__m512, unpacklo_ps)
REGARD_BY_HALVES(__m512d, add_pd)
REGARD_BY_HALVES(__m512d, and_pd)
REGARD_BY_HALVES(__m512d, div_pd)
REGARD_BY_HALVES(__m512d, max_pd)
REGARD_BY_HALVES(__m512d, min_pd)
REGARD_BY_HALVES(__m512d, mul_pd)
REGARD_BY_HALVES(__m512d, or_pd)
REGARD_BY_HALVES(__m512d, sub_pd)
REGARD_BY_HALVES(__m512d, unpackhi_pd)
REGARD_BY_HALVES(__m512d, unpacklo_pd)
REGARD_BY_HALVES(__m512i, add_epi16)
REGARD_BY_HALVES(__m512i, add_epi32)
REGARD_BY_HALVES(__m512i, unpackhi_epi16)
REGARD_BY_HALVES(__m512i, unpacklo_epi16)
#undef REGARD_BY_HALVES

inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return {a.low & b.low, a.high & b.high}; }
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return {a.low | b.low, a.high | b.high}; }
inline __m512i _mm512_slli_epi32(__m512i x, unsigned bits) {
  return {_mm256_slli_epi32(x.low, int(bits)), _mm256_slli_epi32(x.high, int(bits))};
}
inline __m512i _mm512_srli_epi32(__m512i x, unsigned bits) {
  return {_mm256_srli_epi32(x.low, int(bits)), _mm256_srli_epi32(x.high, int(bits))};
}
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline __m512d _mm512_fmadd_pd(__m512d a, __m512d b, __m512d c) {
  return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
}

// ------------------------------------------------------------------------- constants and lanes

template <class Lane, class Vector>
struct LanesOf {
  static constexpr int kCount = sizeof(Vector) / sizeof(Lane);
  Lane at[kCount];
};
template <class Lane, class Vector>
inline LanesOf<Lane, Vector> lanes_of(Vector x) {
  return __builtin_bit_cast(LanesOf<Lane, Vector>, x);
}
template <class Lane, class Vector>
inline Vector vector_of(LanesOf<Lane, Vector> lanes) {
  return __builtin_bit_cast(Vector, lanes);
}

inline __m512 _mm512_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline __m512d _mm512_set1_pd(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline __m512i _mm512_set1_epi16(short x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
inline __m512i _mm512_set1_epi32(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0); }
inline __m512d _mm512_setzero_pd() { return _mm512_set1_pd(0); }

// The last lane comes first.
template <class... Lane>
inline __m512i _mm512_set_epi16(Lane... lane) {
  static_assert(sizeof...(lane) == 32);
  const int16_t last_first[] = {int16_t(lane)...};
  LanesOf<int16_t, __m512i> lanes;
  for (int n = 0; n < 32; ++n) lanes.at[n] = last_first[31 - n];
  return vector_of(lanes);
}

// ---------------------------------------------------------------------------------------- casts

inline __m512d _mm512_castps_pd(__m512 x) { return __builtin_bit_cast(__m512d, x); }
inline __m512i _mm512_castps_si512(__m512 x) { return __builtin_bit_cast(__m512i, x); }
inline __m512 _mm512_castpd_ps(__m512d x) { return __builtin_bit_cast(__m512, x); }
inline __m512 _mm512_castsi512_ps(__m512i x) { return __builtin_bit_cast(__m512, x); }
inline __m256 _mm512_castps512_ps256(__m512 x) { return x.low; }
inline __m512 _mm512_castps256_ps512(__m256 x) { return {x, _mm256_setzero_ps()}; }
inline __m512i _mm512_castsi256_si512(__m256i x) { return {x, _mm256_setzero_si256()}; }

inline __m512 _mm512_insertf32x8(__m512 x, __m256 half, int at) {
  return at == 0 ? __m512{half, x.high} : __m512{x.low, half};
}
inline __m512i _mm512_inserti64x4(__m512i x, __m256i half, int at) {
  return at == 0 ? __m512i{half, x.high} : __m512i{x.low, half};
}

// ---------------------------------------------------------------------------------------- masks

// All bits of the lanes of 16, 32 or 64 bits whose bits are set in `mask`.
inline __m256i lanes_of_16(uint32_t mask) {
  const __m256i bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096,
                                        8192, 16384, -32768);
  return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(short(mask)), bit), bit);
}
inline __m256i lanes_of_32(uint32_t mask) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(mask)), bit), bit);
}
inline __m256i lanes_of_64(uint32_t mask) {
  const __m256i bit = _mm256_setr_epi64x(1, 2, 4, 8);
  return _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(mask), bit), bit);
}

inline __m256 select(__m256i which, __m256 yes, __m256 no) {
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(which));
}
inline __m512 _mm512_mask_mov_ps(__m512 no, __mmask16 mask, __m512 yes) {
  return {select(lanes_of_32(mask), yes.low, no.low),
          select(lanes_of_32(mask >> 8), yes.high, no.high)};
}
inline __m512d _mm512_mask_mov_pd(__m512d no, __mmask8 mask, __m512d yes) {
  const auto half = [](__m256i which, __m256d one, __m256d other) {
    return _mm256_blendv_pd(other, one, _mm256_castsi256_pd(which));
  };
  return {half(lanes_of_64(mask), yes.low, no.low),
          half(lanes_of_64(mask >> 4), yes.high, no.high)};
}
inline __m512i _mm512_mask_mov_epi32(__m512i no, __mmask16 mask, __m512i yes) {
  return _mm512_castps_si512(
      _mm512_mask_mov_ps(_mm512_castsi512_ps(no), mask, _mm512_castsi512_ps(yes)));
}
inline __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i no, __m512i yes) {
  return {_mm256_blendv_epi8(no.low, yes.low, lanes_of_16(mask)),
          _mm256_blendv_epi8(no.high, yes.high, lanes_of_16(mask >> 16))};
}
inline __m512 _mm512_mask_add_ps(__m512 other, __mmask16 mask, __m512 a, __m512 b) {
  return _mm512_mask_mov_ps(other, mask, _mm512_add_ps(a, b));
}
inline __m512 _mm512_mask_and_ps(__m512 other, __mmask16 mask, __m512 a, __m512 b) {
  return _mm512_mask_mov_ps(other, mask, _mm512_and_ps(a, b));
}

// ----------------------------------------------------------------------------------- comparisons

// All bits of the lanes that compare as the predicate says.
template <class Half>
inline auto compared(Half a, Half b, int predicate) {
  require(predicate == _CMP_EQ_OQ || predicate == _CMP_LT_OQ || predicate == _CMP_LE_OQ ||
          predicate == _CMP_NLT_UQ || predicate == _CMP_UNORD_Q);
  if (predicate == _CMP_EQ_OQ) return a == b;
  if (predicate == _CMP_LT_OQ) return a < b;
  if (predicate == _CMP_LE_OQ) return a <= b;
  if (predicate == _CMP_NLT_UQ) return ~(a < b);
  return (a != a) | (b != b);
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  const auto half = [&](__m256 x, __m256 y) {
    return _mm256_movemask_ps(__m256(compared(x, y, predicate)));
  };
  return __mmask16(half(a.low, b.low) | half(a.high, b.high) << 8);
}
inline __mmask8 _mm512_cmp_pd_mask(__m512d a, __m512d b, int predicate) {
  const auto half = [&](__m256d x, __m256d y) {
    return _mm256_movemask_pd(__m256d(compared(x, y, predicate)));
  };
  return __mmask8(half(a.low, b.low) | half(a.high, b.high) << 4);
}
inline __mmask8 _mm256_cmpge_epu32_mask(__m256i a, __m256i b) {
  const __m256i at_least = _mm256_cmpeq_epi32(_mm256_max_epu32(a, b), a);
  return __mmask8(_mm256_movemask_ps(_mm256_castsi256_ps(at_least)));
}
inline __mmask16 _mm512_cmpge_epu32_mask(__m512i a, __m512i b) {
  return __mmask16(_mm256_cmpge_epu32_mask(a.low, b.low) | _mm256_cmpge_epu32_mask(a.high, b.high)
                                                               << 8);
}

// --------------------------------------------------------------------------------------- memory

template <class Vector>
inline Vector load_whole(const void* from) {
  Vector x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
template <class Vector>
inline void store_whole(void* to, Vector x) {
  __builtin_memcpy(to, &x, sizeof x);
}
inline __m512 _mm512_load_ps(const void* from) { return load_whole<__m512>(from); }
inline __m512 _mm512_loadu_ps(const void* from) { return load_whole<__m512>(from); }
inline __m512d _mm512_loadu_pd(const void* from) { return load_whole<__m512d>(from); }
inline __m512i _mm512_loadu_si512(const void* from) { return load_whole<__m512i>(from); }
inline void _mm512_storeu_ps(void* to, __m512 x) { store_whole(to, x); }
inline void _mm512_storeu_pd(void* to, __m512d x) { store_whole(to, x); }
inline void _mm512_storeu_si512(void* to, __m512i x) { store_whole(to, x); }

// Lanes of 32 and 64 bits: AVX2 has masks for them, and touches no memory of others.
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
  const auto* const p = static_cast<const float*>(from);
  return {_mm256_maskload_ps(p, lanes_of_32(mask)),
          _mm256_maskload_ps(p + 8, lanes_of_32(mask >> 8))};
}
inline __m512d _mm512_maskz_loadu_pd(__mmask8 mask, const void* from) {
  const auto* const p = static_cast<const double*>(from);
  return {_mm256_maskload_pd(p, lanes_of_64(mask)),
          _mm256_maskload_pd(p + 4, lanes_of_64(mask >> 4))};
}
inline void _mm512_mask_storeu_ps(void* to, __mmask16 mask, __m512 x) {
  auto* const p = static_cast<float*>(to);
  _mm256_maskstore_ps(p, lanes_of_32(mask), x.low);
  _mm256_maskstore_ps(p + 8, lanes_of_32(mask >> 8), x.high);
}
inline void _mm512_mask_storeu_pd(void* to, __mmask8 mask, __m512d x) {
  auto* const p = static_cast<double*>(to);
  _mm256_maskstore_pd(p, lanes_of_64(mask), x.low);
  _mm256_maskstore_pd(p + 4, lanes_of_64(mask >> 4), x.high);
}

// Narrower lanes, one by one unless all are wanted.
template <class Lane, class Vector>
inline Vector load_lanes(uint32_t mask, const void* from) {
  using Lanes = LanesOf<Lane, Vector>;
  if (mask == ~0u >> (32 - Lanes::kCount)) return load_whole<Vector>(from);
  Lanes lanes = {};
  for (int n = 0; n < Lanes::kCount; ++n) {
    if (mask >> n & 1) lanes.at[n] = static_cast<const Lane*>(from)[n];
  }
  return vector_of(lanes);
}
template <class Lane, class Vector>
inline void store_lanes(void* to, uint32_t mask, Vector x) {
  using Lanes = LanesOf<Lane, Vector>;
  if (mask == ~0u >> (32 - Lanes::kCount)) return store_whole(to, x);
  const Lanes lanes = lanes_of<Lane>(x);
  for (int n = 0; n < Lanes::kCount; ++n) {
    if (mask >> n & 1) static_cast<Lane*>(to)[n] = lanes.at[n];
  }
}
inline __m128i _mm_maskz_loadu_epi8(__mmask16 mask, const void* from) {
  return load_lanes<uint8_t, __m128i>(mask, from);
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* from) {
  return load_lanes<uint16_t, __m256i>(mask, from);
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
  return load_lanes<uint16_t, __m512i>(mask, from);
}
inline void _mm256_mask_storeu_epi16(void* to, __mmask16 mask, __m256i x) {
  store_lanes<uint16_t>(to, mask, x);
}
inline void _mm512_mask_storeu_epi16(void* to, __mmask32 mask, __m512i x) {
  store_lanes<uint16_t>(to, mask, x);
}

// ----------------------------------------------------------------------------------- conversions

inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
inline __m512i _mm512_cvtepu8_epi32(__m128i x) {
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
  const __m256i lower = _mm256_set1_epi32(0xffff);
  const __m256i packed =
      _mm256_packus_epi32(_mm256_and_si256(x.low, lower), _mm256_and_si256(x.high, lower));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
inline __m512 _mm512_cvtepi32_ps(__m512i x) {
  return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
inline __m512 _mm512_cvtph_ps(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
inline __m256i _mm512_cvtps_ph(__m512 x, int rounding) {
  require(rounding == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return _mm256_set_m128i(_mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
}
inline __m512d _mm512_cvtps_pd(__m256 x) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
inline __m256 _mm512_cvtpd_ps(__m512d x) {
  return _mm256_set_m128(_mm256_cvtpd_ps(x.high), _mm256_cvtpd_ps(x.low));
}

// --------------------------------------------------------------------------------- permutations

// One of four parts of 128 bits.
inline __m128 quarter(__m512 x, int n) {
  const __m256 half = n & 2 ? x.high : x.low;
  return n & 1 ? _mm256_extractf128_ps(half, 1) : _mm256_castps256_ps128(half);
}
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int order) {
  return {_mm256_set_m128(quarter(a, order >> 2 & 3), quarter(a, order & 3)),
          _mm256_set_m128(quarter(b, order >> 6 & 3), quarter(b, order >> 4 & 3))};
}
inline __m512d _mm512_shuffle_f64x2(__m512d a, __m512d b, int order) {
  return _mm512_castps_pd(_mm512_shuffle_f32x4(_mm512_castpd_ps(a), _mm512_castpd_ps(b), order));
}

// Bits 0 to 2 of an index choose the lane of a half, bit 3 the half and bit 4 the vector.
inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i indices, __m512 b) {
  const auto chosen = [&](__m256i at) {
    const __m256 upper_half = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));
    const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(at, 27));
    const auto of = [&](__m512 x) {
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(x.low, at),
                              _mm256_permutevar8x32_ps(x.high, at), upper_half);
    };
    return _mm256_blendv_ps(of(a), of(b), second);
  };
  return {chosen(indices.low), chosen(indices.high)};
}
inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i indices, __m512i b) {
  const auto first = lanes_of<uint16_t>(a), second = lanes_of<uint16_t>(b);
  auto lanes = lanes_of<uint16_t>(indices);
  for (uint16_t& lane : lanes.at) lane = (lane & 32 ? second : first).at[lane & 31];
  return vector_of(lanes);
}
inline __m512i _mm512_permutexvar_epi16(__m512i indices, __m512i x) {
  return _mm512_permutex2var_epi16(x, indices, x);
}

// --------------------------------------------------------------------- signs, exponents, rounding

inline __m512 _mm512_abs_ps(__m512 x) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}
inline __m512d _mm512_abs_pd(__m512d x) {
  const __m256d sign = _mm256_set1_pd(-0.0);
  return {_mm256_andnot_pd(sign, x.low), _mm256_andnot_pd(sign, x.high)};
}

constexpr int kRoundDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;

inline __m512 _mm512_roundscale_ps(__m512 x, int how) {
  require(how == kRoundDown);
  return {_mm256_floor_ps(x.low), _mm256_floor_ps(x.high)};
}
inline __m512d _mm512_roundscale_pd(__m512d x, int how) {
  require(how == kRoundDown);
  return {_mm256_floor_pd(x.low), _mm256_floor_pd(x.high)};
}

// a + b rounded down; no finite sum may overflow. The error of rounding to nearest is a float:
// where it is negative, the result is the next float below. A sum of 0 is -0 unless both terms are
// +0.
inline __m256 sum_rounded_down(__m256 a, __m256 b) {
  const __m256 sum = a + b, second = sum - a;
  const __m256 error = (a - (sum - second)) + (b - second);
  const __m256i bits = _mm256_castps_si256(sum);
  const __m256i ones = _mm256_set1_epi32(-1);
  const __m256i away = _mm256_or_si256(_mm256_srai_epi32(_mm256_xor_si256(bits, ones), 31),
                                       _mm256_set1_epi32(1));  // -1 above 0, and 1 below
  const __m256 below = _mm256_castsi256_ps(_mm256_add_epi32(bits, away));
  const __m256 zero = _mm256_and_ps(_mm256_or_ps(a, b), _mm256_set1_ps(-0.0f));
  const __m256 rounded = select(__m256i(error < _mm256_setzero_ps()), below, sum);
  return select(__m256i(sum == _mm256_setzero_ps()), zero, rounded);
}
inline __m512 _mm512_add_round_ps(__m512 a, __m512 b, int rounding) {
  require(rounding == kRoundDown);
  return {sum_rounded_down(a.low, b.low), sum_rounded_down(a.high, b.high)};
}

// x minus x rounded down to `how >> 4` bits of fraction; the difference is rounded down too. -0 for
// an infinity.
inline __m512 _mm512_reduce_ps(__m512 x, int how) {
  require((how & 15) == kRoundDown);
  const float scale = float(1 << (how >> 4));
  const auto half = [&](__m256 y) {
    const __m256 sign = _mm256_set1_ps(-0.0f), size = _mm256_andnot_ps(sign, y);
    const __m256 floor = _mm256_floor_ps(y * scale) * (1 / scale);
    const __m256 whole = select(__m256i(size < _mm256_set1_ps(0x1p23f)), floor, y);
    const __m256i infinite = __m256i(size == _mm256_set1_ps(__builtin_inff()));
    return select(infinite, sign, sum_rounded_down(y, _mm256_xor_ps(sign, whole)));
  };
  return {half(x.low), half(x.high)};
}

// x * 2^n for a whole n, rounded once. A NaN times 2^n is 0 or infinite if n is infinite.
template <class Real>
inline Real scaled(Real x, Real n) {
  if (__builtin_isfinite(n)) {
    constexpr Real kMost = 5000;  // beyond it the result is 0 or infinite for any x
    const Real bounded = n > kMost ? kMost : n < -kMost ? -kMost : n;
    return Real(__builtin_ldexp(double(x), int(bounded)));
  }
  const Real power = n > 0 ? Real(__builtin_inf()) : n < 0 ? Real(0) : n;
  return x != x && n == n ? power : x * power;
}
template <class Real, class Vector, class Mask>
inline Vector scaled_lanes(Mask mask, Vector x, Vector n) {
  auto lanes = lanes_of<Real>(x);
  const auto powers = lanes_of<Real>(n);
  for (int t = 0; t < lanes.kCount; ++t) {
    lanes.at[t] = mask >> t & 1 ? scaled(lanes.at[t], powers.at[t]) : Real(0);
  }
  return vector_of(lanes);
}
inline __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 n) {
  const __m512 floor = _mm512_roundscale_ps(n, kRoundDown);
  return scaled_lanes<float>(mask, x, floor);
}
inline __m512d _mm512_maskz_scalef_pd(__mmask8 mask, __m512d x, __m512d n) {
  const __m512d floor = _mm512_roundscale_pd(n, kRoundDown);
  return scaled_lanes<double>(mask, x, floor);
}

template <class Function>
inline __m512 each_lane(__m512 x, Function function) {
  auto lanes = lanes_of<float>(x);
  for (float& lane : lanes.at) lane = function(lane);
  return vector_of(lanes);
}
// The mantissa in [0.75, 1.5) with the sign of x; 1 for 0 and infinity.
inline __m512 _mm512_getmant_ps(__m512 x, _MM_MANTISSA_NORM_ENUM range,
                                _MM_MANTISSA_SIGN_ENUM sign) {
  require(range == _MM_MANT_NORM_p75_1p5 && sign == _MM_MANT_SIGN_src);
  return each_lane(x, [](float y) {
    if (y == 0 || __builtin_isinf(y)) return __builtin_copysignf(1, y);
    int exponent;
    const float mantissa = __builtin_frexpf(y, &exponent);  // in [0.5, 1), or NaN
    return __builtin_fabsf(mantissa) < 0.75f ? 2 * mantissa : mantissa;
  });
}
// The exponent for a mantissa in [1, 2); an infinity for 0 and infinity.
inline __m512 _mm512_getexp_ps(__m512 x) {
  return each_lane(x, [](float y) {
    if (y == 0) return -__builtin_inff();
    if (!__builtin_isfinite(y)) return __builtin_fabsf(y);
    int exponent;
    __builtin_frexpf(y, &exponent);
    return float(exponent - 1);
  });
}

}  // namespace
}  // namespace regard::emulated512
