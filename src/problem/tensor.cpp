// How tensors and numbers print themselves in messages.
#include "regard/tensor.hpp"

#include <charconv>

#include "problem/refuse.hpp"
#include "problem/tensor_checks.hpp"

namespace regard {

std::string printed(const std::string& text) {
  std::string shown;
  for (const char letter : text) letter ? shown.append(1, letter) : shown.append("\\0");
  return shown;
}

std::string printed(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}

std::string printed(const void* address) {
  char text[2 + 16] = {'0', 'x'};
  const auto number = reinterpret_cast<std::uintptr_t>(address);
  return std::string(text, std::to_chars(text + 2, text + sizeof text, number, 16).ptr);
}

std::string decimal(double value, int decimals) {
  char text[340];  // the largest double has 309 digits
  const auto end =
      std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, decimals).ptr;
  return std::string(text, end);
}

std::string to_string(const Tensor& tensor) {
  if (!tensor.given()) return "(not given)";
  const std::size_t rank = rank_of(tensor);
  const auto list = [&](const std::array<std::int64_t, Tensor::kMaxRank>& values) {
    std::string text = "[";
    for (std::size_t axis = 0; axis < rank; ++axis) {
      text += (axis ? ", " : "") + std::to_string(values[axis]);
    }
    return text + "]";
  };
  if (tensor.rank < 0) return std::string(name_of(tensor.type)) + " with unequal sizes and strides";
  if (tensor.rank > Tensor::kMaxRank) {
    return std::string(name_of(tensor.type)) + " of " + std::to_string(tensor.rank) + " dimensions";
  }
  std::string text = std::string(name_of(tensor.type)) + " " + list(tensor.sizes);
  std::int64_t dense = 1;
  bool is_dense = true;
  for (std::size_t axis = rank; axis-- > 0;) {
    is_dense = is_dense && (tensor.sizes[axis] == 1 || tensor.strides[axis] == dense);
    if (__builtin_mul_overflow(dense, tensor.sizes[axis], &dense)) is_dense = false;
  }
  const bool is_empty = dense == 0;
  return is_dense || is_empty ? text : text + " strides " + list(tensor.strides);
}

}  // namespace regard
