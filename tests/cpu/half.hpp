// An f16 that shares no code with the library, an oracle for conversions: the compiler's own one.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace regard::tests {

#if defined(__aarch64__) && !defined(__clang__)
using Half = __fp16;  // g++ 12 has no _Float16 for C++ there
#elif defined(__FLT16_MAX__)
using Half = _Float16;
#else  // by arithmetic: g++ 12 has none for riscv64
class Half {
 public:
  Half() = default;

  // Rounds to the nearest, ties to even.
  explicit Half(double x) {
    const double size = std::fabs(x);
    if (std::isnan(x)) {
      bits_ = 0x7e00;
    } else if (size >= 65520) {
      bits_ = 0x7c00;
    } else {
      const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
      const double fraction = std::nearbyint(std::ldexp(size, 10 - exponent));
      bits_ = std::uint16_t(((exponent + 14) << 10) + int(fraction));
    }
    if (std::signbit(x)) bits_ |= 0x8000;
  }

  explicit operator double() const {
    const int exponent = bits_ >> 10 & 31, fraction = bits_ & 1023;
    double size =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) {
      size = fraction == 0 ? std::numeric_limits<double>::infinity()
                           : std::numeric_limits<double>::quiet_NaN();
    }
    return bits_ & 0x8000 ? -size : size;
  }

 private:
  std::uint16_t bits_ = 0;
};
#endif

}  // namespace regard::tests
