// Divisions whose divisors are known before a launch.
#pragma once

#include "semantics/portable.h"

namespace regard {

// A positive number, with what makes a division by it a multiplication and a shift, which take a
// tenth of the time. Source: Granlund and Montgomery, Division by Invariant Integers using
// Multiplication (1994), figure 4.1.
struct Divisor {
  uint32 value = 1;
  uint32 factor = 1;
  int32 shift = 0;

  bool operator==(const Divisor&) const = default;
};

// value: 1 to 2^31.
inline Divisor divisor_of(int64 value) {
  const uint64 d = uint64(value);
  int32 shift = 0;
  while ((uint64(1) << shift) < d) ++shift;
  return {.value = uint32(d),
          .factor = uint32((((uint64(1) << shift) - d) << 32) / d + 1),
          .shift = shift};
}

struct Divided {
  int32 quotient, rest;
};

// n: 0 to 2^31 - 1.
REGARD_INLINE Divided divide(int32 n, const Divisor& d) {
  const uint32 high = uint32(uint64(uint32(n)) * d.factor >> 32);
  const uint32 quotient = (high + uint32(n)) >> d.shift;
  return {.quotient = int32(quotient), .rest = int32(uint32(n) - quotient * d.value)};
}

}  // namespace regard
