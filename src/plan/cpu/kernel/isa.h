// The CPU's instruction sets, and the vectors that each offers for each type.
#pragma once

#include "plan/cpu/kernel/tiling.h"
#include "regard/type.hpp"

namespace regard {

enum class Isa : uint8 { scalar, neon, avx2, avx512, avx512bf16, amx };
inline constexpr int kIsaCount = 6;

REGARD_INLINE const char* name_of(Isa isa) {
  constexpr const char* names[] = {"scalar", "neon", "avx2", "avx512", "avx512bf16", "amx"};
  static_assert(sizeof names / sizeof names[0] == kIsaCount);
  return names[int(isa)];
}

// AVX512-BF16 and AMX have kernels for bf16 only.
REGARD_INLINE bool is_for_bf16(Isa isa) { return isa == Isa::avx512bf16 || isa == Isa::amx; }

// The instruction set whose kernels serve the type when `isa` is chosen.
REGARD_INLINE Isa kernels_for(Isa isa, Type type) {
  return is_for_bf16(isa) && type != Type::bf16 ? Isa::avx512 : isa;
}

REGARD_INLINE CpuShape shape_of(Isa isa, Type type) {
  const bool wide = type == Type::f64;
  const int size = wide ? 8 : 4;
  switch (kernels_for(isa, type)) {
    case Isa::scalar:
      return {.lanes = 1, .vectors = 4, .pack = 1, .real_size = size, .unit_size = size};
    case Isa::neon:
      return {.lanes = 16 / size, .vectors = 4, .pack = 1, .real_size = size, .unit_size = size};
    case Isa::avx2:
      return {.lanes = 32 / size, .vectors = 2, .pack = 1, .real_size = size, .unit_size = size};
    case Isa::avx512:
      return {.lanes = 64 / size, .vectors = 2, .pack = 1, .real_size = size, .unit_size = size};
    case Isa::avx512bf16:
      return {.lanes = 16, .vectors = 2, .pack = 2, .real_size = 4, .unit_size = 4};
    case Isa::amx:
      return {.lanes = 16, .vectors = 2, .pack = 2, .real_size = 4, .unit_size = 4, .tiles = true};
  }
  return {};
}

}  // namespace regard
