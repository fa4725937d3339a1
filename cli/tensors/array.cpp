// Element conversions, rounding properties of the types, and dense copies of strided tensors.
#include "tensors/array.hpp"

#include <fmt/core.h>
#include <fmt/format.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <limits>
#include <new>

namespace regard::cli {

float float_from_f16(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  const std::uint32_t exponent = (bits >> 10) & 31u;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const std::uint32_t wide_exponent = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | (wide_exponent << 23) | (mantissa << 13));
}

std::uint16_t f16_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: steps of 2^-24, which is 1/2's last place
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

std::uint16_t bf16_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

namespace {

// Rounds to odd, so that a second rounding to fewer bits rounds as if it were the only one.
float float_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (!std::isfinite(value) || static_cast<double>(nearest) == value) return nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::isinf(nearest) || std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;
  return std::bit_cast<float>(bits | 1u);
}

}  // namespace

double load(const void* data, Type type, Index index) {
  switch (type) {
    case Type::f64:
      return static_cast<const double*>(data)[index];
    case Type::f32:
      return static_cast<const float*>(data)[index];
    case Type::f16:
      return float_from_f16(static_cast<const std::uint16_t*>(data)[index]);
    case Type::bf16:
      return float_from_bf16(static_cast<const std::uint16_t*>(data)[index]);
    case Type::boolean:
      return static_cast<const std::uint8_t*>(data)[index] != 0 ? 1 : 0;
    case Type::i32:
      return static_cast<const std::int32_t*>(data)[index];
    case Type::none:
      break;
  }
  return 0;
}

void store(void* data, Type type, Index index, double value) {
  switch (type) {
    case Type::f64:
      static_cast<double*>(data)[index] = value;
      break;
    case Type::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case Type::f16:
      static_cast<std::uint16_t*>(data)[index] = f16_from_float(float_to_odd(value));
      break;
    case Type::bf16:
      static_cast<std::uint16_t*>(data)[index] = bf16_from_float(float_to_odd(value));
      break;
    case Type::boolean:
      static_cast<std::uint8_t*>(data)[index] = value != 0;
      break;
    case Type::i32:
      static_cast<std::int32_t*>(data)[index] = static_cast<std::int32_t>(value);
      break;
    case Type::none:
      break;
  }
}

double rounded(double value, Type type) {
  double cell = 0;
  store(&cell, type, 0, value);
  return load(&cell, type, 0);
}

double unit_roundoff(Type type) {
  switch (type) {
    case Type::f64:
      return 0x1p-53;
    case Type::f32:
      return 0x1p-24;
    case Type::f16:
      return 0x1p-11;
    case Type::bf16:
      return 0x1p-8;
    default:
      return 0;
  }
}

double smallest_step(Type type) {
  switch (type) {
    case Type::f64:
      return std::numeric_limits<double>::min();  // subnormals may be flushed
    case Type::f16:
      return 0x1p-24;
    default:
      return std::numeric_limits<float>::min();
  }
}

double largest_finite(Type type) {
  switch (type) {
    case Type::f64:
      return std::numeric_limits<double>::max();
    case Type::f16:
      return 65504;
    case Type::bf16:
      return 0x1.fep127;
    default:
      return std::numeric_limits<float>::max();
  }
}

Index count_of(const Sizes& sizes, const std::string& argument) {
  Index count = 1;
  bool none = false;
  for (Index size : sizes) {
    if (size < 0) {
      throw Error(Code::invalid_argument, argument, std::to_string(size), "sizes are 0 or more");
    }
    if (size == 0) none = true;
    if (size > 0 && __builtin_mul_overflow(count, size, &count)) {
      throw Error(Code::invalid_argument, argument, fmt::format("{}", fmt::join(sizes, "x")),
                  "the sizes multiply to more elements than 64 bits can count");
    }
  }
  return none ? 0 : count;
}

std::uint64_t physical_memory() {
  return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::uint64_t>(sysconf(_SC_PAGE_SIZE));
}

Array::Array(Type type, Sizes sizes) : type(type), sizes(std::move(sizes)) {
  count_ = count_of(this->sizes, "sizes");
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<std::size_t>(count_), size_of(type), &bytes) ||
      bytes > std::size_t{1} << 62) {
    throw std::bad_alloc();
  }
  bytes = (bytes + 64) / 64 * 64;  // at least one line: the pointer of no elements is not null
  data_.reset(std::aligned_alloc(64, bytes));
  if (!data_) throw std::bad_alloc();
  std::memset(data_.get(), 0, bytes);
}

Tensor dense_tensor(Type type, const Sizes& sizes, void* data) {
  Tensor tensor;
  tensor.data = data;
  tensor.type = type;
  tensor.rank = static_cast<int>(sizes.size());
  Index stride = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    tensor.sizes[axis] = sizes[axis];
    tensor.strides[axis] = stride;
    stride *= sizes[axis] > 0 ? sizes[axis] : 1;
  }
  return tensor;
}

Array converted(const Tensor& tensor, Type type) {
  if (!tensor.given()) return {};
  Array array(type, Sizes(tensor.sizes.begin(), tensor.sizes.begin() + tensor.rank));
  Index next = 0;
  for_each_offset(tensor, [&](Index offset) {
    store(array.data(), type, next++, load(tensor.data, tensor.type, offset));
  });
  return array;
}

Tensor permuted(const Tensor& tensor, std::initializer_list<int> order) {
  if (!tensor.given()) return tensor;
  Tensor result = tensor;
  int axis = 0;
  for (int from : order) {
    result.sizes[axis] = tensor.sizes[from];
    result.strides[axis] = tensor.strides[from];
    ++axis;
  }
  return result;
}

}  // namespace regard::cli
