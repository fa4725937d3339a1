// The few words that let one text compile for the CPU, each instruction set, and the GPU.
#pragma once

#if defined(__CUDACC__)
#define REGARD_INLINE __host__ __device__ __forceinline__ constexpr
#define REGARD_UNROLL _Pragma("unroll")
#else
// Always inline: no weak symbol may leave an object that was compiled for a newer instruction set.
#define REGARD_INLINE [[gnu::always_inline]] inline constexpr
#define REGARD_UNROLL _Pragma("GCC unroll 16")
#endif

namespace regard {

#if defined(__INT64_TYPE__)
using int64 = __INT64_TYPE__;
using uint64 = __UINT64_TYPE__;
#else
using int64 = long long;
using uint64 = unsigned long long;
#endif
using int32 = int;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;

template <class T>
REGARD_INLINE T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
REGARD_INLINE T larger(T a, T b) {
  return a < b ? b : a;
}
template <class T>
REGARD_INLINE T clamp_to(T x, T low, T high) {
  return smaller(larger(x, low), high);
}
REGARD_INLINE int64 divide_up(int64 a, int64 b) { return (a + b - 1) / b; }
REGARD_INLINE int64 round_up(int64 a, int64 b) { return divide_up(a, b) * b; }

// Not every compiler has __builtin_huge_val.
template <class Real>
REGARD_INLINE Real infinity() {
  return Real(__builtin_bit_cast(float, 0x7f800000u));
}

inline constexpr double kLargestF32 = 0x1.fffffep127;

// To f32; what is finite stays finite.
REGARD_INLINE float narrowed(double x) {
  const bool finite = x - x == 0;
  return float(finite ? clamp_to(x, -kLargestF32, kLargestF32) : x);
}

}  // namespace regard
