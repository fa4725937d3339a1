// The keys and values of a range, as products read them. A block is packed when the first panel
// needs it, and the panels after it find it packed; rows that products can read as they lie are
// not.
#pragma once

#include "cpu/kernels/ahead.hpp"
#include "cpu/kernels/packing.hpp"

namespace regard {
namespace {

template <class L>
class PackedRange {
  using Unit = typename L::Unit;

 public:
  struct Block {
    RowsOfUnits<L> keys = {};
    bool keys_in_tiles = false;
    AcrossRows<L> values;
    int64 key_term = 0, value_term = 0;  // from a term to the next
  };

  PackedRange(const HeadContext& context, const CpuTiling& tiling, HeadSizes dims, Unit* keys,
              Unit* values, int64 first_block)
      : context_(context),
        tiling_(tiling),
        dims_(dims),
        keys_(keys),
        values_(values),
        first_(first_block) {}

  // The block lies between two multiples of block_k.
  Block operator[](Interval block) {
    const Problem& p = context_.problem;
    const int64 index = block.begin / tiling_.block_k - first_, size = block.end - block.begin;
    const bool packed = packed_ >> index & 1;
    packed_ |= uint64(1) << index;
    Block found{.values = values_of(block, index, packed), .value_term = block_units(dims_.dim_v)};
    found.keys = keys_in_place(block.begin, size);
    if (found.keys.at) return found;
    const int64 stride = padded_units(tiling_.shape, dims_.dim);
    found.key_term = tiling_.block_k * stride;
    Unit* const keys = keys_ + index * kTerms<L> * found.key_term;
    found.keys = {keys, stride};
    found.keys_in_tiles = kHasTiles<L>;
    if (packed) return found;
    each_term<L>([&]<class Term>(int n) {
      pack_rows<Term>(keys + n * found.key_term, stride, context_, p.k, dims_.dim, block.begin,
                      size);
    });
    return found;
  }

  // The first panel waits for keys and values: what is read after its products with a block is
  // prefetched next to them. Values that are packed were read before. After the last block follow
  // rows of the next head, or no rows.
  Ahead beside_keys(Interval block) const {
    const Problem& p = context_.problem;
    return reads_values_in_place() ? ahead_of(p.v, dims_.dim_v, block.begin)
                                   : ahead_of(p.k, dims_.dim, block.end);
  }
  Ahead beside_values(Interval block) const {
    const Problem& p = context_.problem;
    return reads_values_in_place() ? ahead_of(p.k, dims_.dim, block.end)
                                   : ahead_of(p.v, dims_.dim_v, block.end);
  }

 private:
  bool reads_values_in_place() const {
    if constexpr (L::kPack > 1) return false;
    const View& v = context_.problem.v;
    return rows_in_place<L>(v, dims_.dim_v, context_.offset_k(v, 0)).at != nullptr;
  }
  // At the pace of a product: a step follows two Units of each row of a tile.
  Ahead ahead_of(const View& view, int64 dim, int64 first) const {
    return Ahead::of_rows(view, context_.offset_k(view, first), dim, 2 * L::kRows * L::kPack);
  }

  int64 block_units(int64 dim) const {
    return units(tiling_.shape, tiling_.block_k) * padded(tiling_.shape, dim);
  }

  AcrossRows<L> values_of(Interval block, int64 index, bool packed) const {
    const View& v = context_.problem.v;
    if constexpr (L::kPack == 1) {
      const auto rows = rows_in_place<L>(v, dims_.dim_v, context_.offset_k(v, block.begin));
      if (rows.at) return {rows.at, rows.stride};
    }
    const int64 dim = dims_.dim_v, term = block_units(dim);
    Unit* const memory = values_ + index * kTerms<L> * term;
    const AcrossRows<L> values(memory, tiling_.shape, dim, tiling_.block_k);
    if (packed) return values;
    each_term<L>([&]<class Term>(int n) {
      Unit* const to = memory + n * term;
      AcrossRows<Term>(to, tiling_.shape, dim, tiling_.block_k)
          .pack(to, v, dim, block.end - block.begin,
                [&](int64 row) { return context_.offset_k(v, block.begin + row); });
    });
    return values;
  }

  // Tile registers read rows of bf16 as they lie, if whole tiles of them begin at cache lines.
  RowsOfUnits<L> keys_in_place(int64 first, int64 rows) const {
    const View& keys = context_.problem.k;
    const int64 offset = context_.offset_k(keys, first);
    if constexpr (kHasTiles<L>) {
      constexpr int64 kElements = kTileElements<L>, kLine = 64, kSize = 2;
      const auto* const row = static_cast<const char*>(keys.data) + offset * kSize;
      if (keys.type == Type::bf16 && dims_.dim % kElements == 0 && rows % L::kLanes == 0 &&
          are_near(keys, dims_.dim) && reinterpret_cast<uint64>(row) % kLine == 0 &&
          keys.strides.row % kElements == 0) {
        return {reinterpret_cast<const Unit*>(row), keys.strides.row / L::kPack};
      }
    }
    return rows_in_place<L>(keys, dims_.dim, offset);
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
