// The keys and values of a range, as products read them. A block is packed when the first panel
// needs it, and the panels after it find it packed.
#pragma once

#include "cpu/kernels/panel.hpp"

namespace regard {
namespace {

template <class L>
class PackedRange {
  using Unit = typename L::Unit;

 public:
  struct Block {
    const Unit* keys;  // rows of key_stride Units
    int64 key_stride;
    AcrossRows<L> values;
  };

  PackedRange(const HeadContext& context, const CpuTiling& tiling, HeadSizes dims, Unit* keys,
              Unit* values, int64 first_key)
      : context_(context),
        tiling_(tiling),
        dims_(dims),
        keys_(keys),
        values_(values),
        first_(first_key / tiling.block_k) {}

  // The block lies between two multiples of block_k.
  Block operator[](Interval block) {
    const Problem& p = context_.problem;
    const int64 index = block.begin / tiling_.block_k - first_, size = block.end - block.begin;
    const int64 width = padded_units(tiling_.shape, dims_.dim);
    const AcrossRows<L> values{values_ + index * block_units(dims_.dim_v), tiling_.shape,
                               dims_.dim_v, tiling_.block_k};
    const bool packed = packed_ >> index & 1;
    packed_ |= uint64(1) << index;
    if (!packed) {
      values.pack(p.v, dims_.dim_v, size,
                  [&](int64 row) { return context_.offset_k(p.v, block.begin + row); });
    }
    if (const Unit* const keys = keys_in_place(block.begin, size)) {
      return {keys, p.k.strides.row / L::kPack, values};
    }
    Unit* const keys = keys_ + index * tiling_.block_k * width;
    if (!packed) pack_rows<L>(keys, width, context_, p.k, dims_.dim, block.begin, size);
    return {keys, width, values};
  }

 private:
  int64 block_units(int64 dim) const {
    return units(tiling_.shape, tiling_.block_k) * padded(tiling_.shape, dim);
  }

  // Tile registers read rows of bf16 as they lie, if whole tiles of them begin at cache lines and
  // are close to each other.
  const Unit* keys_in_place(int64 first, int64 rows) const {
    if constexpr (kHasTiles<L>) {
      constexpr int64 kElements = kTileElements<L>, kLine = 64, kSize = 2;
      const View& keys = context_.problem.k;
      const auto* const row =
          static_cast<const char*>(keys.data) + context_.offset_k(keys, first) * kSize;
      const int64 stride = keys.strides.row;
      const bool near = stride >= 0 && stride <= 2 * dims_.dim;
      if (keys.type == Type::bf16 && dims_.dim % kElements == 0 && rows % L::kLanes == 0 && near &&
          reinterpret_cast<uint64>(row) % kLine == 0 && stride % kElements == 0) {
        return reinterpret_cast<const Unit*>(row);
      }
    }
    return nullptr;
  }

  const HeadContext& context_;
  const CpuTiling& tiling_;
  const HeadSizes dims_;
  Unit* const keys_;
  Unit* const values_;
  const int64 first_;  // block of the range
  uint64 packed_ = 0;  // a bit for each block
};

}  // namespace
}  // namespace regard
