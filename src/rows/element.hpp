// One element of any type, to and from double, rounded to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "problem/problem.h"

namespace regard {

inline float f16_to_f32(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 31u;
  const std::uint32_t fraction = bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) {
    const float value = float(fraction) * 0x1p-24f;
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

inline float bf16_to_f32(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t(bits) << 16);
}

// Rounds straight from double: going through f32 would round twice.
inline std::uint16_t f64_to_f16(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000u : 0;
  const double size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00u;
  if (size >= 65520.0) return sign | 0x7c00u;
  if (size == 0) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);
  const int unit = (exponent < -13 ? -13 : exponent) - 11;  // log2 of one unit in the last place
  const auto steps = std::uint32_t(std::nearbyint(std::ldexp(size, -unit)));
  return sign | std::uint16_t(steps + (std::uint32_t(unit + 24) << 10));
}

inline std::uint16_t f64_to_bf16(double value) {
  if (std::isnan(value)) return 0x7fc0u;
  float nearest = float(value);
  // Round to odd in f32, so that the second rounding sees what the first one dropped.
  std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  if (!std::isinf(nearest) && double(nearest) != value && (bits & 1u) == 0) {
    bits += std::fabs(double(nearest)) < std::fabs(value) ? 1u : -1u;
  }
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return std::uint16_t(bits >> 16);
}

inline double load_element(const View& view, int64 offset) {
  switch (view.type) {
    case Type::f64:
      return static_cast<const double*>(view.data)[offset];
    case Type::f32:
      return static_cast<const float*>(view.data)[offset];
    case Type::f16:
      return f16_to_f32(static_cast<const std::uint16_t*>(view.data)[offset]);
    case Type::bf16:
      return bf16_to_f32(static_cast<const std::uint16_t*>(view.data)[offset]);
    case Type::boolean:
      return static_cast<const std::uint8_t*>(view.data)[offset] != 0;
    case Type::i32:
      return static_cast<const std::int32_t*>(view.data)[offset];
    case Type::none:
      break;
  }
  return 0;
}

// `count` elements in a row.
inline void load_elements(const View& view, int64 offset, int64 count, double* to) {
  switch (view.type) {
    case Type::f64: {
      const auto* p = static_cast<const double*>(view.data) + offset;
      for (int64 d = 0; d < count; ++d) to[d] = p[d];
      break;
    }
    case Type::f32: {
      const auto* p = static_cast<const float*>(view.data) + offset;
      for (int64 d = 0; d < count; ++d) to[d] = p[d];
      break;
    }
    default:
      for (int64 d = 0; d < count; ++d) to[d] = load_element(view, offset + d);
  }
}

inline void store_element(const View& view, int64 offset, double value) {
  switch (view.type) {
    case Type::f64:
      static_cast<double*>(view.data)[offset] = value;
      break;
    case Type::f32:
      static_cast<float*>(view.data)[offset] = float(value);
      break;
    case Type::f16:
      static_cast<std::uint16_t*>(view.data)[offset] = f64_to_f16(value);
      break;
    case Type::bf16:
      static_cast<std::uint16_t*>(view.data)[offset] = f64_to_bf16(value);
      break;
    case Type::boolean:
      static_cast<std::uint8_t*>(view.data)[offset] = value != 0;
      break;
    case Type::i32:
    case Type::none:
      break;
  }
}

}  // namespace regard
