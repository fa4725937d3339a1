// Lanes for AMX: the vectors of AVX-512, and products of bf16 in tile registers.
#pragma once

#include "cpu/kernels/lanes_avx512.hpp"

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

template <class TileRegisters, class Rounding>
struct AmxLanes : Avx512Pairs<Rounding> {
  using Tiles = TileRegisters;
  using Vec = __m512;

  // To nearest, ties up, by instructions that leave the multiplier to the products.
  static void store_weights(uint32_t* to, Vec even, Vec odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
  }
};

}  // namespace
}  // namespace regard
