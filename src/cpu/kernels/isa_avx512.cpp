// The kernels for AVX-512 (F, BW, DQ, VL); this file alone is compiled for them.
#include "cpu/kernels/instantiate.hpp"
#include "cpu/kernels/lanes_avx512.hpp"

namespace regard {
namespace {
constexpr CpuKernels f64_kernels = kernels_of<Avx512F64, Isa::avx512, f64>();
constexpr CpuKernels f32_kernels = kernels_of<Avx512F32, Isa::avx512, f32>();
}  // namespace
extern const IsaKernels avx512_kernels{.f64 = &f64_kernels, .f32 = &f32_kernels};
}  // namespace regard
