// The kernels for bf16 by AVX512-BF16 dot products; this file alone is compiled for them.
#include "cpu/kernels/instantiate.hpp"
#include "cpu/kernels/lanes_avx512.hpp"

namespace regard {
namespace {
constexpr CpuKernels bf16_kernels = kernels_of<Avx512Bf16, Isa::avx512bf16, bf16>();
}  // namespace
extern const IsaKernels avx512bf16_kernels{.bf16 = &bf16_kernels};
}  // namespace regard
