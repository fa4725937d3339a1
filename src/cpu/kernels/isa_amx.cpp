// The kernels by AMX tile products; this file alone is compiled for them.
#include "cpu/kernels/instantiate_f16_terms.hpp"
#include "cpu/kernels/lanes_amx.hpp"

namespace regard {
namespace {
constexpr CpuKernels f16_kernels = f16_kernels_by_terms<AmxF16Lanes<AmxTiles, Bf16Rounding>>();
constexpr CpuKernels bf16_kernels = kernels_of<AmxLanes<AmxTiles, Bf16Rounding>, Isa::amx, bf16>();
}  // namespace
extern const IsaKernels amx_kernels{.f16 = &f16_kernels, .bf16 = &bf16_kernels};
}  // namespace regard
