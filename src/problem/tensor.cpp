// How tensors and numbers print themselves in messages.
#include "regard/tensor.hpp"

#include <charconv>

#include "problem/refuse.hpp"

namespace regard {

std::string printed(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}

std::string to_string(const Tensor& tensor) {
  if (!tensor.given()) return "(not given)";
  const auto list = [&](const std::array<std::int64_t, Tensor::kMaxRank>& values) {
    std::string text = "[";
    for (int axis = 0; axis < tensor.rank && axis < Tensor::kMaxRank; ++axis) {
      text += (axis ? ", " : "") + std::to_string(values[axis]);
    }
    return text + "]";
  };
  if (tensor.rank < 0) return std::string(name_of(tensor.type)) + " with unequal sizes and strides";
  std::string text = std::string(name_of(tensor.type)) + " " + list(tensor.sizes);
  std::int64_t dense = 1;
  bool is_dense = true;
  for (int axis = std::min(tensor.rank, Tensor::kMaxRank) - 1; axis >= 0; --axis) {
    is_dense = is_dense && (tensor.sizes[axis] == 1 || tensor.strides[axis] == dense);
    if (__builtin_mul_overflow(dense, tensor.sizes[axis], &dense)) is_dense = false;
  }
  return is_dense ? text : text + " strides " + list(tensor.strides);
}

}  // namespace regard
