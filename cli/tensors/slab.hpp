// Slab: a strided tensor inside a larger block of memory. The other bytes of the block are poison,
// and the library must leave them as they are.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "tensors/array.hpp"
#include "tensors/random.hpp"

namespace regard::cli {

struct SlabLayout {
  bool may_broadcast = false;  // leading axes may get stride 0 (inputs only)
  bool free_last = false;      // the last stride may differ from 1 and any axis may be innermost
  bool for_tma = false;        // what TMA can load: strides above 0, rows at multiples of 16 bytes
};

struct Slab {
  std::string name;
  Tensor tensor;
  std::vector<std::byte> memory;
  std::vector<std::byte> before;  // outputs: what memory held before the library ran

  // Draws the order of the axes, gaps and the alignment, and poisons every byte (NaN in any float
  // type).
  Slab(Random& random, std::string name, Type type, const Sizes& sizes, SlabLayout layout);

  template <class Value>
  void fill(Value&& value) {
    for_each_offset(tensor,
                    [&](Index offset) { store(tensor.data, tensor.type, offset, value()); });
  }

  // Copies the memory, so that changed_outside() can tell what the library wrote.
  void remember() { before = memory; }
  double get_before(Index offset) const;
  bool changed_outside() const;  // whether a byte outside the tensor differs from `before`

  // Writes NaN and infinities into each row (along the last axis) that is not in `seen`, by offset.
  void poison_rows(Random& random, const std::unordered_set<Index>& seen);
};

}  // namespace regard::cli
