// Owned dense arrays of every element type, and exact conversions between the types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "regard/regard.hpp"

namespace regard::cli {

using Index = std::int64_t;
using Sizes = std::vector<Index>;

float float_from_f16(std::uint16_t bits);
std::uint16_t f16_from_float(float value);
inline float float_from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
std::uint16_t bf16_from_float(float value);

// One element of any type; storing rounds to nearest, ties to even, once.
double load(const void* data, Type type, Index index);
void store(void* data, Type type, Index index, double value);
double rounded(double value, Type type);

// Half a unit in the last place, relative: 2^-53, 2^-24, 2^-11, 2^-8.
double unit_roundoff(Type type);
double smallest_step(Type type);  // the smallest positive number
double largest_finite(Type type);

// The product of sizes; throws Error (named `argument`) if it overflows or a size is negative.
Index count_of(const Sizes& sizes, const std::string& argument);

std::uint64_t physical_memory();  // bytes of this machine

// In row-major order; data may be null.
Tensor dense_tensor(Type type, const Sizes& sizes, void* data = nullptr);

struct Array {
  Type type = Type::none;
  Sizes sizes;

  Array() = default;
  Array(Type type, Sizes sizes);  // zeros, 64-byte aligned

  Tensor tensor() const;  // not given if the array is not
  bool given() const { return type != Type::none; }
  Index count() const { return count_; }
  std::size_t byte_count() const { return static_cast<std::size_t>(count_) * size_of(type); }
  void* data() const { return data_.get(); }
  template <class Element>
  Element* as() const {
    return static_cast<Element*>(data_.get());
  }
  double get(Index index) const { return load(data_.get(), type, index); }
  void set(Index index, double value) { store(data_.get(), type, index, value); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  Index count_ = 0;
  std::unique_ptr<void, Free> data_;
};

inline Tensor Array::tensor() const {
  return given() ? dense_tensor(type, sizes, data_.get()) : Tensor{};
}

// Calls visit(element offset) for every element of a strided tensor, in row-major order.
template <class Visit>
void for_each_offset(const Tensor& tensor, Visit&& visit) {
  Index count = 1;
  for (int axis = 0; axis < tensor.rank; ++axis) count *= tensor.sizes[axis];
  Index index[Tensor::kMaxRank] = {};
  Index offset = 0;
  for (Index n = 0; n < count; ++n) {
    visit(offset);
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
      offset += tensor.strides[axis];
      if (++index[axis] < tensor.sizes[axis]) break;
      offset -= tensor.strides[axis] * tensor.sizes[axis];
      index[axis] = 0;
    }
  }
}

// A dense copy in another type; not given stays not given.
Array converted(const Tensor& tensor, Type type);

// The same memory with its axes reordered: axis n of the result is axis order[n] of the tensor.
Tensor permuted(const Tensor& tensor, std::initializer_list<int> order);

}  // namespace regard::cli
