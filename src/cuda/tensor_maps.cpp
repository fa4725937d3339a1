// Tensor maps, from the tensors as TMA sees them.
#include "cuda/tensor_maps.hpp"

#include "plan/cuda/tma_tensor.hpp"

namespace regard::cuda_backend {
namespace {

// The driver's numbers.
static_assert(kTypeCount == 7, "a type was added: how TMA names it");
constexpr int kTypeF16 = 6, kTypeBf16 = 9;
constexpr int kNoInterleave = 0, kSwizzle128Bytes = 3, kFillWithZeros = 0;
constexpr int kPromotion128Bytes = 2, kPromotion256Bytes = 3;

// How much the L2 cache fetches at once. 256 bytes are slower where rows begin elsewhere: 241 us
// instead of 211 at D 72, 281 instead of 252 at D 104 (forward, 16 heads, 4096 tokens, H100).
int promotion_of(const TmaTensor& x) {
  for (int i = 1; i < 4; ++i) {
    if (x.sizes[i] > 1 && x.strides[i] % 256 != 0) return kPromotion128Bytes;
  }
  return kPromotion256Bytes;
}

void encode(const Driver& d, TensorMap& map, const TmaTensor& x, int device) {
  const std::uint64_t sizes[] = {std::uint64_t(x.sizes[0]), std::uint64_t(x.sizes[1]),
                                 std::uint64_t(x.sizes[2]), std::uint64_t(x.sizes[3])};
  const std::uint64_t strides[] = {std::uint64_t(x.strides[1]), std::uint64_t(x.strides[2]),
                                   std::uint64_t(x.strides[3])};
  const std::uint32_t box[] = {std::uint32_t(x.tile_columns), std::uint32_t(x.tile_rows), 1, 1};
  const std::uint32_t steps[] = {1, 1, 1, 1};
  const Result result = d.encode_tiled(
      &map, x.type == Type::f16 ? kTypeF16 : kTypeBf16, 4, const_cast<void*>(x.data), sizes,
      strides, box, steps, kNoInterleave, kSwizzle128Bytes, promotion_of(x), kFillWithZeros);
  check(result, "cuTensorMapEncodeTiled", device);
}

struct MapPlace {
  TensorMap& map;
  TmaTensor TmaTensors::*tensor;
  View Problem::*view;
  bool used = true;
};

std::array<MapPlace, 6> places_in(BackwardMaps& to, const KernelConfig& c) {
  using T = TmaTensors;
  using P = Problem;
  return {{{to.q, &T::q, &P::q},
           {to.k, &T::k, &P::k},
           {to.v, &T::v, &P::v},
           {to.dout, &T::dout, &P::dout},
           {to.dk, &T::dk, &P::dk, c.out_by_tma && c.wanted.dk},
           {to.dv, &T::dv, &P::dv, c.out_by_tma && c.wanted.dv}}};
}

std::array<MapPlace, 5> places_in(ForwardMaps& to, const KernelConfig& c) {
  using T = TmaTensors;
  using P = Problem;
  return {{{to.q, &T::q, &P::q},
           {to.k, &T::k, &P::k},
           {to.v, &T::v, &P::v},
           {to.out, &T::out, &P::out, c.out_by_tma},
           {to.bias, &T::bias, &P::bias, c.bias.by_tma}}};
}

}  // namespace

LaunchMaps& TensorMaps::at(const Driver& d, const Problem& p, const KernelConfig& c,
                           const void* hi_lo, int device) {
  if (c.kernel == Kernel::backward) {
    place(d, places_in(maps_.backward, c), p, c, hi_lo, device);
  } else {
    place(d, places_in(maps_.forward, c), p, c, hi_lo, device);
  }
  return maps_;
}

template <class Places>
void TensorMaps::place(const Driver& d, const Places& places, const Problem& p,
                       const KernelConfig& c, const void* hi_lo, int device) {
  const auto base_of = [&](const MapPlace& place) {
    return static_cast<const uint8*>(c.products == Products::f16x3 ? hi_lo : (p.*place.view).data);
  };
  if (!encoded_) {
    const TmaTensors tensors = tma_tensors(p, c, hi_lo);
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (!places[i].used) continue;
      const TmaTensor& x = tensors.*places[i].tensor;
      encode(d, places[i].map, x, device);
      addresses_[i] = static_cast<const uint8*>(x.data);
      offsets_[i] = addresses_[i] - base_of(places[i]);
    }
    encoded_ = true;
    return;
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (!places[i].used) continue;
    const uint8* const address = base_of(places[i]) + offsets_[i];
    if (address == addresses_[i]) continue;
    check(d.replace_address(&places[i].map, const_cast<uint8*>(address)),
          "cuTensorMapReplaceAddress", device);
    addresses_[i] = address;
  }
}

}  // namespace regard::cuda_backend
