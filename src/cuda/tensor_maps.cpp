// Tensor maps, from the tensors as TMA sees them.
#include "cuda/tensor_maps.hpp"

#include "plan/cuda/tma_tensor.hpp"

namespace regard::cuda_backend {
namespace {

// The driver's numbers.
static_assert(kTypeCount == 7, "a type was added: how TMA names it");
constexpr int kTypeF16 = 6, kTypeBf16 = 9;
constexpr int kNoInterleave = 0, kSwizzle128Bytes = 3, kPromotion256Bytes = 3, kFillWithZeros = 0;

void encode(const Driver& d, TensorMap& map, const TmaTensor& x, int device) {
  const std::uint64_t sizes[] = {std::uint64_t(x.sizes[0]), std::uint64_t(x.sizes[1]),
                                 std::uint64_t(x.sizes[2]), std::uint64_t(x.sizes[3])};
  const std::uint64_t strides[] = {std::uint64_t(x.strides[1]), std::uint64_t(x.strides[2]),
                                   std::uint64_t(x.strides[3])};
  const std::uint32_t box[] = {std::uint32_t(x.tile_columns), std::uint32_t(x.tile_rows), 1, 1};
  const std::uint32_t steps[] = {1, 1, 1, 1};
  const Result result = d.encode_tiled(
      &map, x.type == Type::f16 ? kTypeF16 : kTypeBf16, 4, const_cast<void*>(x.data), sizes,
      strides, box, steps, kNoInterleave, kSwizzle128Bytes, kPromotion256Bytes, kFillWithZeros);
  check(result, "cuTensorMapEncodeTiled", device);
}

}  // namespace

LaunchMaps launch_maps(const Driver& d, const Problem& p, const KernelConfig& config,
                       const void* hi_lo, int device) {
  const TmaTensors x = tma_tensors(p, config, hi_lo);
  LaunchMaps maps;
  if (config.kernel == Kernel::backward) {
    BackwardMaps& to = maps.backward = {};
    encode(d, to.q, x.q, device);
    encode(d, to.k, x.k, device);
    encode(d, to.v, x.v, device);
    encode(d, to.dout, x.dout, device);
    if (config.out_by_tma && config.wanted.dk) encode(d, to.dk, x.dk, device);
    if (config.out_by_tma && config.wanted.dv) encode(d, to.dv, x.dv, device);
  } else {
    ForwardMaps& to = maps.forward = {};
    encode(d, to.q, x.q, device);
    encode(d, to.k, x.k, device);
    encode(d, to.v, x.v, device);
    if (config.out_by_tma) encode(d, to.out, x.out, device);
    if (config.bias.by_tma) encode(d, to.bias, x.bias, device);
  }
  return maps;
}

}  // namespace regard::cuda_backend
