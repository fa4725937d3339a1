// The kernels of one instruction set, one row per type; compiled separately, chosen at run time.
#pragma once

#include "cpu/kernels/tasks.h"
#include "plan/cpu/kernel/isa.h"

namespace regard {

// `nonfinite`: [group][len_q] of the task's kv head, set where a NaN in a hidden place may have
// reached a row; null where nothing is hidden.
struct CpuKernels {
  void (*forward)(const Problem&, const CpuTiling&, const ForwardTask&, uint8* nonfinite,
                  char* scratch);
  void (*combine)(const Problem&, const CpuTiling&, const CombineTask&, uint8* nonfinite,
                  char* scratch);
  void (*backward)(const Problem&, const CpuTiling&, const BackwardShared&, const BackwardTask&,
                   uint8* nonfinite, char* scratch);
  // The same with panels of one vector, for as many rows; null where panels are no wider.
  void (*backward_of_one_vector)(const Problem&, const CpuTiling&, const BackwardShared&,
                                 const BackwardTask&, uint8* nonfinite, char* scratch);
  // Runs a register-only loop of the product's instruction; returns its floating point operations.
  double (*spin)(int64 rounds);
};

// Null if the instruction set has no kernels for the type.
struct IsaKernels {
  const CpuKernels* f64 = nullptr;
  const CpuKernels* f32 = nullptr;   // f16 and bf16 too, converted while they are read
  const CpuKernels* f16 = nullptr;   // by terms of bf16; backward of finite inputs only
  const CpuKernels* bf16 = nullptr;  // products of bf16
};

extern const IsaKernels scalar_kernels;
extern const IsaKernels neon_kernels;
extern const IsaKernels avx2_kernels;
extern const IsaKernels avx512_kernels;
extern const IsaKernels avx512bf16_kernels;
extern const IsaKernels amx_kernels;

}  // namespace regard
