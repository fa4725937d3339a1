// Lanes for AMX: the vectors of AVX-512, and products of bf16 in tile registers; those of f16 by
// two terms of bf16.
#pragma once

#include "cpu/kernels/lanes_avx512.hpp"
#include "cpu/kernels/multiply.hpp"

namespace regard {
namespace {

// Eight tile registers of 16 rows of 64 bytes. Tile numbers are part of the instructions.
struct AmxTiles {
  // The operating system gives the registers to a process that asked (system::allow_tiles). Their
  // contents are saved with each switch of threads until they are released.
  struct Session {
    Session() {
      struct alignas(64) Configuration {
        uint8 palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8 rows[16];
      } config = {.palette = 1, .start_row = 0, .reserved = {}, .row_bytes = {}, .rows = {}};
      for (int t = 0; t < 8; ++t) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
      }
      asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~Session() { asm volatile("tilerelease"); }
  };

  template <int T>
  [[gnu::always_inline]] static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  [[gnu::always_inline]] static void load(const void* rows, int64 stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(T) : "memory");
  }
  // Past the first-level cache, which keeps sums and weights.
  template <int T>
  [[gnu::always_inline]] static void stream(const void* rows, int64 stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  [[gnu::always_inline]] static void store(void* rows, int64 stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(T) : "memory");
  }
  // C[16][16] f32 += A[16][16 pairs] B[16 pairs][16].
  template <int C, int A, int B>
  [[gnu::always_inline]] static void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

// 2^(n/32), each rounded to nearest.
inline constexpr struct alignas(64) {
  float at[32];
} kRootsOfTwo = {{0x1p0f,        0x1.059b0ep0f, 0x1.0b5586p0f, 0x1.11301ep0f, 0x1.172b84p0f,
                  0x1.1d4874p0f, 0x1.2387a6p0f, 0x1.29e9ep0f,  0x1.306fep0f,  0x1.371a74p0f,
                  0x1.3dea64p0f, 0x1.44e086p0f, 0x1.4bfdaep0f, 0x1.5342b6p0f, 0x1.5ab07ep0f,
                  0x1.6247ecp0f, 0x1.6a09e6p0f, 0x1.71f75ep0f, 0x1.7a1148p0f, 0x1.82589ap0f,
                  0x1.8ace54p0f, 0x1.93737cp0f, 0x1.9c4918p0f, 0x1.a5503cp0f, 0x1.ae89fap0f,
                  0x1.b7f77p0f,  0x1.c199bep0f, 0x1.cb720ep0f, 0x1.d5818ep0f, 0x1.dfc974p0f,
                  0x1.ea4afap0f, 0x1.f50766p0f}};

template <class TileRegisters, class Rounding>
struct AmxLanes : Avx512Pairs<Rounding> {
  using Tiles = TileRegisters;
  using Vec = __m512;

  // How weights are made, with constants in registers: next to tile products, making them again for
  // every weight would take issue slots that the weights need.
  class Weights {
    // The compiler does not know its value, and so cannot make it again.
    static Vec in_register(float x) {
      Vec v = _mm512_set1_ps(x);
#if defined(__AVX512F__)  // tests emulate vectors, which then fit no register
      asm("" : "+v"(v));
#endif
      return v;
    }

   public:
    // 2^x as 2^whole * 2^(n/32) * p(rest), with p of degree 2: relative error 1.8e-7. While tile
    // registers multiply, other multiplications issue once a cycle, and this has five instead of
    // eight. 0 for -inf and whatever lies below the normal numbers; NaN stays NaN.
    Vec exp2(Vec x) const {
      constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC, kFractionBits = 5 << 4;
      const Vec rest = _mm512_reduce_ps(x, kFractionBits | kDown);
      // Rounded down to a multiple of 1/32, whose lowest bits are n.
      const Vec n = _mm512_add_round_ps(x, shift_, kDown);
      const Vec root = _mm512_permutex2var_ps(low_roots_, _mm512_castps_si512(n), high_roots_);
      const Vec slope = _mm512_fmadd_ps(second_, rest, first_);
      const Vec product = _mm512_fmadd_ps(_mm512_mul_ps(root, rest), slope, root);
      const __mmask16 normal = _mm512_cmp_ps_mask(x, least_, _CMP_NLT_UQ);
      return _mm512_maskz_scalef_ps(normal, product, x);
    }

    // To nearest, ties up, by instructions that leave the multiplier to the products.
    void store(uint32_t* to, Vec even, Vec odd) const {
      const __m512i half = _mm512_castps_si512(half_);
      const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
      const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
      _mm512_storeu_si512(to, _mm512_mask_blend_epi16(odd_elements_, low, high));
    }

   private:
    Vec shift_ = in_register(0x1.8p18f);
    Vec first_ = in_register(0x1.62e11ep-1f), second_ = in_register(0x1.f0f3ccp-3f);
    Vec least_ = in_register(-126);
    Vec half_ = in_register(0x1p-134f);  // as bits: 0x8000
    Vec low_roots_ = _mm512_load_ps(kRootsOfTwo.at),
        high_roots_ = _mm512_load_ps(kRootsOfTwo.at + 16);
    __mmask32 odd_elements_ = 0xaaaaaaaau;
  };

  static Vec exp2(Vec x) { return Weights().exp2(x); }
};

// Each element of f16 is exactly the sum of two terms of bf16. A weight is rounded to the sum of
// two terms, with a relative error of 2^-17, and so is dS. Scores and dP need the products of all
// four pairs of terms; products of weights or dS leave out that of both second terms. An infinite
// or NaN element becomes NaN.
template <class TileRegisters, class Rounding>
struct AmxF16Lanes : AmxLanes<TileRegisters, Rounding> {
  using Base = AmxLanes<TileRegisters, Rounding>;
  using Vec = typename Base::Vec;
  using Unit = typename Base::Unit;
  static constexpr int kTerms = 2;
  static constexpr TermPair kTermPairs[] = {{1, 1}, {0, 1}, {0, 0}, {1, 0}};  // small ones first

  template <int n>
  struct Term;

  struct Weights : Base::Weights {
    // The second terms follow the panel's first ones.
    void store(Unit* to, Vec even, Vec odd) const {
      Base::Weights::store(to, even, odd);
      Base::Weights::store(to + Base::kLanes * Base::kVectors, rest(even), rest(odd));
    }
  };

 protected:
  // To nearest, ties up, as weights are stored. Some NaN becomes a number.
  static Vec rounded(Vec x) {
    const __m512i sum = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(-0x10000)));
  }
  // What the first term leaves: of an element of f16 no more bits than bf16 has, and NaN of NaN.
  static Vec rest(Vec x) { return _mm512_sub_ps(x, rounded(x)); }
};

// The same lanes, whose loads and stores of Units make the n-th terms.
template <class TileRegisters, class Rounding>
template <int n>
struct AmxF16Lanes<TileRegisters, Rounding>::Term : AmxF16Lanes<TileRegisters, Rounding> {
  template <class SomeType>
  static Vec load_row_units(SomeType type, const void* data, int64 offset, int64 count) {
    const int64 present = larger<int64>(count, 0), upper = larger<int64>(present - 16, 0);
    const Vec first = Base::load_as(type, data, offset, present);
    const Vec second = Base::load_as(type, data, offset + (upper > 0 ? 16 : 0), upper);
    return _mm512_castsi512_ps(Rounding::round(element(first), element(second)));
  }
  template <class SomeType>
  static Vec load_pairs(SomeType type, const void* data, int64 even, int64 odd, int64 even_count,
                        int64 odd_count) {
    return pairs(element(Base::load_as(type, data, even, larger<int64>(even_count, 0))),
                 element(Base::load_as(type, data, odd, larger<int64>(odd_count, 0))));
  }
  static void store_rounded_row(Unit* to, Vec first, Vec second) {
    Base::store_rounded_row(to, number(first), number(second));
  }
  static void store_weights(Unit* to, Vec even, Vec odd) {
    Base::store(reinterpret_cast<float*>(to), pairs(number(even), number(odd)));
  }

 private:
  using Self = AmxF16Lanes<TileRegisters, Rounding>;
  // The term of an element of f16, and of any number of f32.
  static Vec element(Vec x) { return n == 0 ? Self::rounded(x) : Self::rest(x); }
  static Vec number(Vec x) { return Self::rounded(n == 0 ? x : Self::rest(x)); }
  static Vec pairs(Vec even, Vec odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(odd)));
  }
};

}  // namespace
}  // namespace regard
