/// \file
/// Tensor: a view of memory that somebody else owns - pointer, type, sizes, strides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "regard/type.hpp"

#pragma GCC visibility push(default)

namespace regard {

/// Bytes of one element; 0 for Type::none.
constexpr std::size_t size_of(Type type) noexcept {
  switch (type) {
    case Type::f64:
      return 8;
    case Type::f32:
    case Type::i32:
      return 4;
    case Type::f16:
    case Type::bf16:
      return 2;
    case Type::boolean:
      return 1;
    case Type::none:
      break;
  }
  return 0;
}

/// "f64", "f32", "f16", "bf16", "bool", "i32" or "none".
constexpr const char* name_of(Type type) noexcept {
  constexpr const char* names[] = {"none", "f64", "f32", "f16", "bf16", "bool", "i32"};
  const auto index = static_cast<std::size_t>(type);
  return index < 7 ? names[index] : "unknown";
}

/// Sizes and strides count elements. A default-made Tensor means "not given".
/// One type serves inputs and outputs: the library writes only through output arguments.
struct Tensor {
  static constexpr int kMaxRank = 4;  ///< dimensions that a tensor may have

  void* data = nullptr;                          ///< the first element
  Type type = Type::none;                        ///< none = not given
  int rank = 0;                                  ///< how many sizes and strides count
  std::array<std::int64_t, kMaxRank> sizes{};    ///< elements
  std::array<std::int64_t, kMaxRank> strides{};  ///< elements from one index to the next

  /// Not given.
  constexpr Tensor() = default;

  /// Dense in row-major order.
  Tensor(const void* data, Type type, std::initializer_list<std::int64_t> sizes)
      : data(const_cast<void*>(data)), type(type), rank(static_cast<int>(sizes.size())) {
    int axis = 0;
    for (std::int64_t size : sizes) {
      if (axis < kMaxRank) this->sizes[axis++] = size;
    }
    std::uint64_t stride = 1;  // sizes that no memory holds wrap around; validation refuses them
    for (axis = (rank < kMaxRank ? rank : kMaxRank) - 1; axis >= 0; --axis) {
      strides[axis] = static_cast<std::int64_t>(stride);
      stride *= this->sizes[axis] > 0 ? static_cast<std::uint64_t>(this->sizes[axis]) : 1;
    }
  }

  /// With strides, as many as sizes (validation refuses any other number, and a rank over 4).
  Tensor(const void* data, Type type, std::initializer_list<std::int64_t> sizes,
         std::initializer_list<std::int64_t> strides)
      : Tensor(data, type, sizes) {
    if (strides.size() != sizes.size()) rank = -1;
    int axis = 0;
    for (std::int64_t stride : strides) {
      if (axis < kMaxRank) this->strides[axis++] = stride;
    }
  }

  /// Whether this is a tensor at all.
  constexpr bool given() const noexcept { return type != Type::none; }
};

/// "bf16 [2, 8, 128, 64] strides [65536, 8192, 64, 1]".
std::string to_string(const Tensor& tensor);

}  // namespace regard

#pragma GCC visibility pop
