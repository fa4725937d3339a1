// The kernels for any processor.
#include "cpu/kernels/instantiate.hpp"
#include "cpu/kernels/lanes_scalar.hpp"

namespace regard {
namespace {
constexpr CpuKernels f64_kernels = kernels_of<Scalar<double>, Isa::scalar, f64>();
constexpr CpuKernels f32_kernels = kernels_of<Scalar<float>, Isa::scalar, f32>();
}  // namespace
extern const IsaKernels scalar_kernels{.f64 = &f64_kernels, .f32 = &f32_kernels};
}  // namespace regard
