// Conversions between double and the narrow types: every half, every bf16, and every tie.
#include "rows/element.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tests/cpu/guarded.hpp"
#include "tests/cpu/half.hpp"

using namespace regard;

namespace {

constexpr int kAll = 65536;

double value_of(Type type, int bits) {
  return type == f16 ? f16_to_f32(std::uint16_t(bits)) : bf16_to_f32(std::uint16_t(bits));
}

std::uint16_t to_bits(Type type, double x) { return type == f16 ? f64_to_f16(x) : f64_to_bf16(x); }

}  // namespace

TEST_SUITE_BEGIN("rows");

TEST_CASE("every half is what the compiler says") {
  int wrong = 0;
  for (int bits = 0; bits < kAll; ++bits) {
    const double want = double(std::bit_cast<tests::Half>(std::uint16_t(bits)));
    const double got = value_of(f16, bits);
    wrong += std::isnan(want)
                 ? !std::isnan(got)
                 : std::bit_cast<std::uint64_t>(got) != std::bit_cast<std::uint64_t>(want);
  }
  CHECK(wrong == 0);
}

TEST_CASE("every element survives the way to double and back") {
  for (Type type : {f16, bf16}) {
    int wrong = 0, nans = 0;
    for (int bits = 0; bits < kAll; ++bits) {
      const double value = value_of(type, bits);
      const std::uint16_t back = to_bits(type, value);
      if (std::isnan(value)) {
        ++nans;
        wrong += !std::isnan(value_of(type, back));
      } else {
        wrong += back != bits;
      }
    }
    CHECK(wrong == 0);
    CHECK(nans == (type == f16 ? 2 * 1023 : 2 * 127));
  }
}

TEST_CASE("between neighbours: the nearer one, and the even one from the middle") {
  for (Type type : {f16, bf16}) {
    const int largest = type == f16 ? 0x7bff : 0x7f7f;
    int wrong = 0;
    for (int bits = 0; bits < largest; ++bits) {
      const double low = value_of(type, bits), high = value_of(type, bits + 1);
      const double middle = low + (high - low) / 2;
      for (double sign : {1.0, -1.0}) {
        const int base = sign < 0 ? 0x8000 : 0;
        wrong += to_bits(type, sign * middle) != base + (bits % 2 ? bits + 1 : bits);
        wrong += to_bits(type, sign * std::nextafter(middle, low)) != base + bits;
        wrong += to_bits(type, sign * std::nextafter(middle, high)) != base + bits + 1;
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("overflow and underflow") {
  CHECK(f64_to_f16(65519.999) == 0x7bff);
  CHECK(f64_to_f16(65520) == 0x7c00);
  CHECK(f64_to_f16(-1e300) == 0xfc00);
  CHECK(f64_to_f16(0x1p-25) == 0);
  CHECK(f64_to_f16(0x1.00001p-25) == 1);
  CHECK(f64_to_f16(-1e-300) == 0x8000);
  CHECK(f64_to_bf16(0x1.ff0p127) == 0x7f80);
  CHECK(f64_to_bf16(0x1.feffffp127) == 0x7f7f);
  CHECK(f64_to_bf16(1e300) == 0x7f80);
  CHECK(f64_to_bf16(1e-300) == 0);
  CHECK(f64_to_bf16(-0.0) == 0x8000);
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(f64_to_f16(infinity) == 0x7c00);
  CHECK(f64_to_bf16(-infinity) == 0xff80);
}

TEST_CASE("load_element and store_element of every type") {
  for (Type type : {f64, f32, f16, bf16, boolean}) {
    const tests::Array array(type, {4});
    const View view{.data = array.tensor().data, .type = type, .strides = {}};
    const double values[] = {0, 1, type == boolean ? 1 : -2.5, 0};
    for (int n = 0; n < 4; ++n) store_element(view, n, values[n]);
    for (int n = 0; n < 4; ++n) {
      CHECK(array.get(n) == values[n]);
      CHECK(load_element(view, n) == values[n]);
    }
  }
  const std::uint8_t truths[] = {0, 1, 2, 255};
  const View view{.data = const_cast<std::uint8_t*>(truths), .type = boolean, .strides = {}};
  for (int n = 0; n < 4; ++n) CHECK(load_element(view, n) == (n > 0));
}

TEST_SUITE_END();
