// The kernels for bf16 by AMX tile products; this file alone is compiled for them.
#include "cpu/kernels/instantiate.hpp"
#include "cpu/kernels/lanes_amx.hpp"

namespace regard {
namespace {
constexpr CpuKernels bf16_kernels = kernels_of<AmxLanes<AmxTiles, Bf16Rounding>, Isa::amx, bf16>();
}  // namespace
extern const IsaKernels amx_kernels{.bf16 = &bf16_kernels};
}  // namespace regard
