// Makes the kernels of lanes that multiply f16 by terms.
#pragma once

#include "cpu/kernels/instantiate.hpp"

namespace regard {
namespace {

// Forward of f16 as two bf16 terms. An infinity or NaN has no second term, and makes NaN. So a task
// whose results are not finite is computed again in f32, which needs no more scratch memory and
// lays out partial results in the same way.
template <class L>
void run_forward_by_terms(const Problem& problem, const CpuTiling& tiling, const ForwardTask& task,
                          uint8* nonfinite, char* scratch) {
  {
    const TileSession<L> session;
    const ForwardKernel<L> kernel(problem, tiling, task.b, task.kv, scratch);
    const int count = kernel.attend_task(task);
    if (kernel.are_finite(task, count)) return kernel.finish_task(task, count, nonfinite);
  }
  avx512_kernels.f32->forward(problem, without_terms(tiling), task, nonfinite, scratch);
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
