// Makes the kernels of lanes that multiply f16 by terms.
#pragma once

#include "cpu/kernels/instantiate.hpp"

namespace regard {
namespace {

// Forward of f16 as two bf16 terms. An infinity or NaN has no second term, and makes NaN. So rows
// whose results are not finite are computed again in f32, which needs no more scratch memory and
// lays out partial results in the same way; and with them those of their block of so many rows,
// whichever task they belong to.
inline constexpr int64 kRowsComputedAgain = 256;

// Bits of such blocks of the task.
template <class L>
uint32 forward_by_terms(const Problem& problem, const CpuTiling& tiling, const ForwardTask& task,
                        uint8* nonfinite, char* scratch) {
  constexpr int kPanels = int(kRowsComputedAgain / (L::kLanes * L::kVectors));
  const TileSession<L> session;
  const ForwardKernel<L> kernel(problem, tiling, task.b, task.kv, scratch);
  const int count = kernel.attend_task(task);
  uint32 again = 0;
  for (int first = 0; first < count; first += kPanels) {
    const int end = smaller(count, first + kPanels);
    if (kernel.are_finite(task, first, end)) {
      kernel.finish_panels(task, first, end, nonfinite);
    } else {
      again |= uint32(1) << (first / kPanels);
    }
  }
  return again;
}

template <class L>
void run_forward_by_terms(const Problem& problem, const CpuTiling& tiling, const ForwardTask& task,
                          uint8* nonfinite, char* scratch) {
  const uint32 again = forward_by_terms<L>(problem, tiling, task, nonfinite, scratch);
  if (again == 0) return;
  CpuTiling in_f32 = without_terms(tiling);
  in_f32.block_q = kRowsComputedAgain;
  const int64 len_q = sequence(problem.sequences, task.b).len_q, group = problem.sizes.group();
  const int64 first_row = RowBlocks(tiling, len_q, group).first_row(task.block);
  for (int n = 0; again >> n != 0; ++n) {
    if ((again >> n & 1) == 0) continue;
    ForwardTask part = task;
    part.block = RowBlocks(in_f32, len_q, group).of_row(first_row + n * kRowsComputedAgain);
    avx512_kernels.f32->forward(problem, in_f32, part, nonfinite, scratch);
  }
}

// Returns how many operations of f16 the products of its terms stand for: forward, seven for two;
// backward, seventeen for five, which is nearly as many.
template <class L>
double spin_by_terms(int64 rounds) {
  constexpr int kProducts = 2, kOfTerms = 2 * kTermPairCount<L> - 1;  // of scores and of values
  return spin_tiles<L>(rounds) * kProducts / kOfTerms;
}

template <class Base>
constexpr CpuKernels f16_kernels_by_terms() {
  using L = WithMath<Base>;
  static_assert(shape_of(Isa::amx, Type::f16) == shape_of_lanes<L>());
  return {.forward = run_forward_by_terms<L>,
          .combine = run_combine<L>,
          .backward = run_backward<L>,
          .backward_of_one_vector = nullptr,
          .spin = spin_by_terms<L>};
}

}  // namespace
}  // namespace regard
