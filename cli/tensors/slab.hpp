// Slabs: strided tensors inside larger memory whose other bytes are poison and must stay as set.
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
  bool boxed = false;  // strides above 0, rows at multiples of 16 bytes: as copy engines ask
};

struct Slab {
  std::string name;
  Tensor tensor;
  std::vector<std::byte> memory;
  std::vector<std::byte> before;  // outputs: what memory held before the library ran

  // Random order of axes, gaps and misalignment; every byte poisoned (NaN in any float type).
  Slab(Random& random, std::string name, Type type, const Sizes& sizes, SlabLayout layout);

  template <class Value>
  void fill(Value&& value) {
    for_each_offset(tensor,
                    [&](Index offset) { store(tensor.data, tensor.type, offset, value()); });
  }

  // Remembers the memory, so that changed_outside() can tell what the library wrote elsewhere.
  void remember() { before = memory; }
  double get_before(Index offset) const;
  bool changed_outside() const;  // a byte outside the logical tensor differs from before

  // Writes NaN and infinities into each row (along the last axis) whose offset is not in `seen`.
  void poison_rows(Random& random, const std::unordered_set<Index>& seen);
};

}  // namespace regard::cli
