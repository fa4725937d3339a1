// From what the plan says of tensors to what the copy engine reads.
#include "cuda/tensor_maps.hpp"

#include "plan/boxed_tensor.hpp"

namespace regard::cuda_backend {
namespace {

// The driver's numbers.
constexpr int kTypeF16 = 6, kTypeBf16 = 9;
constexpr int kNoInterleave = 0, kSwizzle128Bytes = 3, kPromotion256Bytes = 3, kFillWithZeros = 0;

void encode(const Driver& d, TensorMap& map, const BoxedTensor& x, int device) {
  const std::uint64_t sizes[] = {std::uint64_t(x.sizes[0]), std::uint64_t(x.sizes[1]),
                                 std::uint64_t(x.sizes[2]), std::uint64_t(x.sizes[3])};
  const std::uint64_t strides[] = {std::uint64_t(x.strides[1]), std::uint64_t(x.strides[2]),
                                   std::uint64_t(x.strides[3])};
  const std::uint32_t box[] = {std::uint32_t(x.box_columns), std::uint32_t(x.box_rows), 1, 1};
  const std::uint32_t steps[] = {1, 1, 1, 1};
  const Result result = d.encode_tiled(
      &map, x.type == Type::f16 ? kTypeF16 : kTypeBf16, 4, const_cast<void*>(x.data), sizes,
      strides, box, steps, kNoInterleave, kSwizzle128Bytes, kPromotion256Bytes, kFillWithZeros);
  check(result, "cuTensorMapEncodeTiled", device);
}

}  // namespace

ForwardMaps forward_maps(const Driver& d, const Problem& p, const KernelConfig& config,
                         const void* planes, int device) {
  const ForwardBoxes boxes = config.products == Products::f16x3 ? plane_boxes(p, config, planes)
                                                                : forward_boxes(p, config.tiling);
  ForwardMaps maps{};
  encode(d, maps.q, boxes.q, device);
  encode(d, maps.k, boxes.k, device);
  encode(d, maps.v, boxes.v, device);
  if (config.out_by_tma) encode(d, maps.out, boxes.out, device);
  if (config.bias.by_tma) encode(d, maps.bias, boxes.bias, device);
  return maps;
}

BackwardMaps backward_maps(const Driver& d, const Problem& p, const KernelConfig& config,
                           const void* planes, int device) {
  const BackwardBoxes boxes = config.products == Products::f16x3
                                  ? plane_gradient_boxes(p, config, planes)
                                  : backward_boxes(p, config.tiling);
  BackwardMaps maps{};
  encode(d, maps.q, boxes.q, device);
  encode(d, maps.k, boxes.k, device);
  encode(d, maps.v, boxes.v, device);
  encode(d, maps.dout, boxes.dout, device);
  if (config.out_by_tma && config.wanted.dk) encode(d, maps.dk, boxes.dk, device);
  if (config.out_by_tma && config.wanted.dv) encode(d, maps.dv, boxes.dv, device);
  return maps;
}

LaunchMaps launch_maps(const Driver& d, const Problem& p, const KernelConfig& config,
                       const void* planes, int device) {
  if (config.kernel == Kernel::backward) {
    return {.backward = backward_maps(d, p, config, planes, device)};
  }
  return {.forward = forward_maps(d, p, config, planes, device)};
}

}  // namespace regard::cuda_backend
