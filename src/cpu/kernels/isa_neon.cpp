// The kernels for NEON, which every aarch64 has.
#include "cpu/kernels/instantiate.hpp"
#include "cpu/kernels/lanes_neon.hpp"

namespace regard {
namespace {
constexpr CpuKernels f64_kernels = kernels_of<NeonF64, Isa::neon, f64>();
constexpr CpuKernels f32_kernels = kernels_of<NeonF32, Isa::neon, f32>();
}  // namespace
extern const IsaKernels neon_kernels{.f64 = &f64_kernels, .f32 = &f32_kernels};
}  // namespace regard
