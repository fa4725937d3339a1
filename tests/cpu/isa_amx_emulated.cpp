// The kernels of AMX on emulated tiles and vectors: in place of the library's.
#include "tests/cpu/emulated_avx512.hpp"

namespace regard {
using namespace emulated512;
}

#include "cpu/kernels/instantiate_f16_terms.hpp"
#include "cpu/kernels/lanes_amx.hpp"

namespace regard {
namespace {

// To nearest even, subnormals to zero, as AVX512-BF16 does.
struct EmulatedRounding {
  static __m256i round(__m512 x) {
    const __mmask16 subnormal =
        _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-126f), _CMP_LT_OQ);
    return Avx512F32::to_bf16(_mm512_mask_and_ps(x, subnormal, x, _mm512_set1_ps(-0.0f)));
  }
  static __m512i round(__m512 first, __m512 second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(round(first)), round(second), 1);
  }
};

struct EmulatedTiles {
  struct Session {
    Session() {}
  };
  using Vec = __m512;

  Vec tile[8][16];

  template <int T>
  void zero() {
    for (Vec& row : tile[T]) row = _mm512_setzero_ps();
  }
  template <int T>
  void load(const void* rows, int64 stride) {
    for (int r = 0; r < 16; ++r) {
      tile[T][r] = _mm512_loadu_ps(static_cast<const char*>(rows) + r * stride);
    }
  }
  template <int T>
  void stream(const void* rows, int64 stride) {
    load<T>(rows, stride);
  }
  template <int T>
  void store(void* rows, int64 stride) {
    for (int r = 0; r < 16; ++r) {
      _mm512_storeu_ps(static_cast<char*>(rows) + r * stride, tile[T][r]);
    }
  }
  // The elements of the lower and of the upper halves of pairs.
  static Vec lower(Vec pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
  }
  static Vec upper(Vec pairs) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(-65536)));
  }
  // Not inline, so that the probe's loop remains.
  template <int C, int A, int B>
  [[gnu::noinline]] void multiply_add() {
    for (int k = 0; k < 16; ++k) {
      const Vec low = lower(tile[B][k]), high = upper(tile[B][k]);
      for (int r = 0; r < 16; ++r) {
        const Vec pair = _mm512_set1_ps(reinterpret_cast<const float*>(&tile[A][r])[k]);
        const Vec sum = _mm512_fmadd_ps(lower(pair), low, tile[C][r]);
        tile[C][r] = _mm512_fmadd_ps(upper(pair), high, sum);
      }
    }
  }
};

constexpr CpuKernels f16_kernels =
    f16_kernels_by_terms<AmxF16Lanes<EmulatedTiles, EmulatedRounding>>();
constexpr CpuKernels bf16_kernels =
    kernels_of<AmxLanes<EmulatedTiles, EmulatedRounding>, Isa::amx, bf16>();

}  // namespace
extern const IsaKernels amx_kernels{.f16 = &f16_kernels, .bf16 = &bf16_kernels};
}  // namespace regard
