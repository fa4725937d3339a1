// Makes the kernels of lanes that multiply f16 by terms: forward ones.
#pragma once

#include "cpu/kernels/instantiate.hpp"

namespace regard {
namespace {

// By terms, or, where some element is infinite or NaN and has none, by f32 arithmetic, whose
// scratch memory is no larger and whose partial results are laid out alike.
template <class L>
void run_forward_by_terms(const Problem& problem, const CpuTiling& tiling, const ForwardTask& task,
                          uint8* nonfinite, char* scratch) {
  {
    const TileSession<L> session;
    const ForwardKernel<L> kernel(problem, tiling, task.b, task.kv, scratch);
    if (kernel.run_task(task, nonfinite)) return;
  }
  CpuTiling whole = tiling;
  whole.shape = shape_of(Isa::avx512, Type::f16);
  avx512_kernels.f32->forward(problem, whole, task, nonfinite, scratch);
}

template <class Base>
constexpr CpuKernels f16_kernels_by_terms() {
  using L = WithMath<Base>;
  static_assert(shape_of(Isa::amx, Type::f16) == shape_of_lanes<L>());
  return {.forward = run_forward_by_terms<L>,
          .combine = run_combine<L>,
          .backward = nullptr,
          .spin = spin_of<L>()};
}

}  // namespace
}  // namespace regard
