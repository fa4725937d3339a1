// Memory of the tensors that a drawn call is made of.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "regard/tensor.hpp"
#include "tests/fuzz/bytes_call.hpp"

namespace regard::tests {

// From the lowest to the highest element, in elements from where data points; none of no elements.
struct Span {
  std::int64_t low = 0;
  std::int64_t count = 0;
  bool is_large = false;  // more than a tensor is given
};
Span span_of(const Tensor&);

// The elements of a tensor that has memory, with those that strides of 0 repeat.
double count_of(const Tensor&);

// The bytes of all elements in row-major order.
std::string elements_of(const Tensor&);

// Blocks of memory that end where nobody may touch.
class Placed {
 public:
  // Gives the tensor memory of its own, or none where its span is too large: then data is null.
  void place(Tensor&, Bytes&, bool filled);
  // Moves it into the block of another, where there is room. Returns whether it did.
  bool share(Tensor&, Bytes&);
  // The same tensor in memory of its own that holds the same elements.
  Tensor apart(const Tensor&);

 private:
  struct Block {
    std::unique_ptr<char[]> memory;
    std::int64_t size;
  };
  char* add(std::int64_t bytes);

  std::vector<Block> blocks_;
};

}  // namespace regard::tests
