// The kernels for AVX2 with FMA and F16C; this file alone is compiled for them.
#include "cpu/kernels/instantiate.hpp"
#include "cpu/kernels/lanes_avx2.hpp"

namespace regard {
namespace {
constexpr CpuKernels f64_kernels = kernels_of<Avx2F64, Isa::avx2, f64>();
constexpr CpuKernels f32_kernels = kernels_of<Avx2F32, Isa::avx2, f32>();
}  // namespace
extern const IsaKernels avx2_kernels{.f64 = &f64_kernels, .f32 = &f32_kernels};
}  // namespace regard
