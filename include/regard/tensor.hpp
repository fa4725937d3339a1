/// \file
/// Tensor: a view of memory that somebody else owns - pointer, type, sizes, strides.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
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
  static_assert(std::size(names) == kTypeCount);
  const auto index = static_cast<std::size_t>(type);
  return index < kTypeCount ? names[index] : "unknown";
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

  /// Dense in row-major order. Sizes of more elements than an int64 counts are refused by every
  /// call.
  Tensor(const void* memory, Type element, std::initializer_list<std::int64_t> dense_sizes)
      : data(const_cast<void*>(memory)), type(element), rank(static_cast<int>(dense_sizes.size())) {
    copy(dense_sizes, sizes);
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    std::int64_t stride = 1;
    for (std::size_t axis = std::min(dense_sizes.size(), sizes.size()); axis-- > 0;) {
      strides[axis] = stride;
      if (sizes[axis] > 0) stride = stride > most / sizes[axis] ? most : stride * sizes[axis];
    }
  }

  /// Takes as many strides as sizes (validation refuses any other number, and a rank over 4).
  Tensor(const void* memory, Type element, std::initializer_list<std::int64_t> given_sizes,
         std::initializer_list<std::int64_t> given_strides)
      : Tensor(memory, element, given_sizes) {
    if (given_strides.size() != given_sizes.size()) rank = -1;
    copy(given_strides, strides);
  }

  /// Whether this is a tensor at all.
  constexpr bool given() const noexcept { return type != Type::none; }

 private:
  static void copy(std::initializer_list<std::int64_t> from,
                   std::array<std::int64_t, kMaxRank>& to) {
    std::copy_n(from.begin(), std::min(from.size(), to.size()), to.begin());
  }
};

/// "bf16 [2, 8, 128, 64] strides [65536, 8192, 64, 1]".
std::string to_string(const Tensor& tensor);

}  // namespace regard

#pragma GCC visibility pop
