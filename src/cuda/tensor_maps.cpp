// From the plan's tensors to the tensor maps that TMA reads.
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

ForwardMaps forward_maps(const Driver& d, const Problem& p, const KernelConfig& config,
                         const void* hi_lo, int device) {
  const ForwardTmaTensors tensors = config.products == Products::f16x3
                                        ? forward_hi_lo_tensors(p, config, hi_lo)
                                        : forward_tma_tensors(p, config.tiling);
  ForwardMaps maps{};
  encode(d, maps.q, tensors.q, device);
  encode(d, maps.k, tensors.k, device);
  encode(d, maps.v, tensors.v, device);
  if (config.out_by_tma) encode(d, maps.out, tensors.out, device);
  if (config.bias.by_tma) encode(d, maps.bias, tensors.bias, device);
  return maps;
}

BackwardMaps backward_maps(const Driver& d, const Problem& p, const KernelConfig& config,
                           const void* hi_lo, int device) {
  const BackwardTmaTensors tensors = config.products == Products::f16x3
                                         ? backward_hi_lo_tensors(p, config, hi_lo)
                                         : backward_tma_tensors(p, config.tiling);
  BackwardMaps maps{};
  encode(d, maps.q, tensors.q, device);
  encode(d, maps.k, tensors.k, device);
  encode(d, maps.v, tensors.v, device);
  encode(d, maps.dout, tensors.dout, device);
  if (config.out_by_tma && config.wanted.dk) encode(d, maps.dk, tensors.dk, device);
  if (config.out_by_tma && config.wanted.dv) encode(d, maps.dv, tensors.dv, device);
  return maps;
}

LaunchMaps launch_maps(const Driver& d, const Problem& p, const KernelConfig& config,
                       const void* hi_lo, int device) {
  if (config.kernel == Kernel::backward) {
    return {.backward = backward_maps(d, p, config, hi_lo, device)};
  }
  return {.forward = forward_maps(d, p, config, hi_lo, device)};
}

}  // namespace regard::cuda_backend
