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

// The products of AVX512-BF16 and AMX are of bf16.
REGARD_INLINE bool multiplies_bf16(Isa isa) { return isa == Isa::avx512bf16 || isa == Isa::amx; }

// An element of f16 is the sum of two of bf16.
REGARD_INLINE bool takes_terms(Isa isa, Type type) { return isa == Isa::amx && type == Type::f16; }

// The instruction set whose kernels serve the type when `isa` is chosen.
REGARD_INLINE Isa kernels_for(Isa isa, Type type) {
  return !multiplies_bf16(isa) || type == Type::bf16 || takes_terms(isa, type) ? isa : Isa::avx512;
}

// The shape of an instruction set's kernels; the set must serve the type.
REGARD_INLINE CpuShape shape_of(Isa isa, Type type) {
  const bool wide = type == Type::f64;
  const int size = wide ? 8 : 4;
  switch (isa) {
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
      return {.lanes = 16,
              .vectors = 2,
              .pack = 2,
              .real_size = 4,
              .unit_size = 4,
              .tiles = true,
              .terms = takes_terms(isa, type) ? 2 : 1};
  }
  return {};
}

// Backward, whether a sequence is long enough to repay the packing of both terms (Intel Xeon, two
// threads, D 64, times of f32 arithmetic over those by terms: 512 tokens 1.28, causal 1.12; 128
// tokens 0.94, 0.78).
REGARD_INLINE bool repays_terms(int64 len_q, int64 len_k) {
  constexpr int64 kLeast = 256;
  return len_q >= kLeast && len_k >= kLeast;
}

// The tiling of a type's kernels by f32 arithmetic, where those by terms do not serve.
REGARD_INLINE CpuTiling without_terms(CpuTiling t) {
  if (t.shape.terms > 1) t.shape = shape_of(Isa::avx512, Type::f32);
  return t;
}
// Of a short sequence that has one chunk of keys: the blocks that it has in f32 arithmetic alone.
REGARD_INLINE CpuTiling of_short_sequence(CpuTiling t) {
  t = without_terms(t);
  t.block_q = t.block_k = kBackwardBlock;
  return t;
}

// The kernels of f32 serve few rows, and f16 without terms, in the panels of bf16.
REGARD_INLINE bool have_same_panels(const CpuShape& a, const CpuShape& b) {
  return a.lanes == b.lanes && a.vectors == b.vectors && a.real_size == b.real_size;
}
static_assert(have_same_panels(shape_of(Isa::amx, Type::bf16), shape_of(Isa::avx512, Type::f32)));
static_assert(have_same_panels(shape_of(Isa::avx512bf16, Type::bf16),
                               shape_of(Isa::avx512, Type::f32)));

}  // namespace regard
