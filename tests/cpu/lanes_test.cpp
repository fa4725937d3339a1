// Every instruction set's lanes against plain arithmetic: conversions exhaustively, then functions.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

#include "cpu/cpuid.hpp"
#include "rows/element.hpp"
#include "tests/cpu/guarded.hpp"
#include "tests/cpu/lanes_table.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

constexpr int kAll = 65536;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

// Calls check(table) for each instruction set that this machine has; those for bf16 alone have
// AVX-512's.
template <class Check>
void each_lanes(Check check) {
  std::map<Isa, const LanesTable*> tables = {{Isa::scalar, &scalar_lanes}};
#if defined(__x86_64__)
  tables[Isa::avx2] = &avx2_lanes;
  tables[Isa::avx512] = &avx512_lanes;
#elif defined(__aarch64__)
  tables[Isa::neon] = &neon_lanes;
#endif
  for (Isa isa : cpu_backend::this_processor().usable) {
    if (multiplies_bf16(isa)) continue;
    CAPTURE(std::string(name_of(isa)));
    REQUIRE(tables.contains(isa));
    check(*tables.at(isa));
  }
}

// The count-element array of every bit pattern of a two-byte type, at the end of guarded memory.
Guarded every_pattern() {
  Guarded memory(kAll * 2);
  for (int bits = 0; bits < kAll; ++bits) {
    reinterpret_cast<std::uint16_t*>(memory.data())[bits] = std::uint16_t(bits);
  }
  return memory;
}

double element(Type type, int bits) {
  return type == f16 ? f16_to_f32(std::uint16_t(bits)) : bf16_to_f32(std::uint16_t(bits));
}

template <class Real>
bool same(Real a, Real b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// Values around every element: itself, its neighbours in Real, and the middles to the next one.
template <class Real>
std::vector<Real> around_elements(Type type) {
  std::vector<Real> list;
  for (int bits = 0; bits < kAll; ++bits) {
    const auto x = Real(element(type, bits)), next = Real(element(type, (bits + 1) % kAll));
    const Real middle = x + (next - x) / 2, up = Real(kInfinity);
    for (Real value : {x, middle, std::nextafter(middle, up), std::nextafter(middle, -up)}) {
      list.push_back(value);
    }
  }
  return list;
}

}  // namespace

TEST_SUITE_BEGIN("lanes");

TEST_CASE("loading every f16 and bf16") {
  const Guarded patterns = every_pattern();
  each_lanes([&](const LanesTable& lanes) {
    for (Type type : {f16, bf16}) {
      std::vector<float> singles(kAll);
      std::vector<double> doubles(kAll);
      lanes.load_f32(type, patterns.data(), singles.data(), kAll);
      lanes.load_f64(type, patterns.data(), doubles.data(), kAll);
      int wrong = 0;
      for (int bits = 0; bits < kAll; ++bits) {
        wrong += !same(double(singles[bits]), element(type, bits));
        wrong += !same(doubles[bits], element(type, bits));
      }
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE("storing f32 as f16 and bf16: every element, tie and neighbour") {
  each_lanes([](const LanesTable& lanes) {
    for (Type type : {f16, bf16}) {
      const std::vector<float> values = around_elements<float>(type);
      const auto count = std::int64_t(values.size());
      const Guarded stored(values.size() * 2);
      lanes.store_f32(type, stored.data(), values.data(), count);
      int wrong = 0;
      for (std::int64_t n = 0; n < count; ++n) {
        const auto bits = reinterpret_cast<const std::uint16_t*>(stored.data())[n];
        const auto want = type == f16 ? f64_to_f16(values[n]) : f64_to_bf16(values[n]);
        wrong += std::isnan(values[n]) ? !std::isnan(element(type, bits)) : bits != want;
      }
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE("partial vectors: nothing beyond the row is read or written") {
  each_lanes([](const LanesTable& lanes) {
    for (Type type : {f64, f32, f16, bf16, boolean}) {
      for (std::int64_t count = 1; count <= 33; ++count) {
        const Array from(type, {count}), to(type, {count});
        std::vector<float> singles(count);
        std::vector<double> doubles(count);
        for (std::int64_t n = 0; n < count; ++n) from.set(n, double(n % 2));
        lanes.load_f32(type, from.tensor().data, singles.data(), count);
        lanes.load_f64(type, from.tensor().data, doubles.data(), count);
        int wrong = 0;
        for (std::int64_t n = 0; n < count; ++n) {
          wrong += singles[n] != float(n % 2) || doubles[n] != double(n % 2);
        }
        if (type != boolean && type != f64) {
          lanes.store_f32(type, to.tensor().data, singles.data(), count);
          wrong += to.bytes() != from.bytes();
        }
        if (type != boolean) {
          to.fill(7);
          lanes.store_f64(type, to.tensor().data, doubles.data(), count);
          wrong += to.bytes() != from.bytes() || !to.gaps_intact();
        }
        if (wrong) FAIL_CHECK(name_of(type) << ", " << count << " elements");
      }
    }
  });
}

TEST_CASE("exp2: to a few units in the last place, 0 below, NaN for NaN") {
  each_lanes([](const LanesTable& lanes) {
    std::vector<float> x, y;
    std::vector<double> x64, y64;
    for (int n = -126 * 64; n <= 127 * 64; ++n) {
      x.push_back(float(n) / 64 + float(n % 7) * 1e-3f);
      x64.push_back(double(n) / 64 * 8 + n % 7 * 1e-4);
    }
    y.resize(x.size());
    y64.resize(x64.size());
    lanes.exp2_f32(x.data(), y.data(), std::int64_t(x.size()));
    lanes.exp2_f64(x64.data(), y64.data(), std::int64_t(x64.size()));
    double worst = 0, worst64 = 0;
    for (std::size_t n = 0; n < x.size(); ++n) {
      if (x[n] >= -126 && x[n] < 128) {
        worst = std::fmax(worst, std::fabs(y[n] / std::exp2(double(x[n])) - 1));
      }
      if (x64[n] >= -1022 && x64[n] < 1023.9) {
        worst64 = std::fmax(worst64, std::fabs(y64[n] / std::exp2(x64[n]) - 1));
      }
    }
    CHECK(worst < 3e-7);
    CHECK(worst64 < 1e-15);
    const float edges[] = {0, -0.0f, 1, -1, -200, -1e30f, -float(kInfinity), float(kNan)};
    float got[8];
    lanes.exp2_f32(edges, got, 8);
    for (int n = 0; n < 4; ++n) CHECK(got[n] == std::exp2(edges[n]));
    for (int n = 4; n < 7; ++n) CHECK(got[n] == 0);
    CHECK(std::isnan(got[7]));
    const double edges64[] = {0, -1, 2, -1e4, -1e300, -kInfinity, kNan};
    double got64[7];
    lanes.exp2_f64(edges64, got64, 7);
    for (int n = 0; n < 3; ++n) CHECK(got64[n] == std::exp2(edges64[n]));
    for (int n = 3; n < 6; ++n) CHECK(got64[n] == 0);
    CHECK(std::isnan(got64[6]));
  });
}

TEST_CASE("log2 of sums of weights that are rounded to bf16") {
  each_lanes([](const LanesTable& lanes) {
    if (!lanes.weight_log2) return;
    std::vector<float> x;
    for (double size = 1e-38; size < 1e38; size *= 1.007) x.push_back(float(size));
    for (int n = 1; n <= 40; ++n) {
      for (int sign : {1, -1}) x.push_back(1 + float(sign * n) * 0x1p-20f);
    }
    std::vector<float> y(x.size());
    lanes.weight_log2(x.data(), y.data(), std::int64_t(x.size()));
    double worst = 0;
    for (std::size_t n = 0; n < x.size(); ++n) {
      worst = std::fmax(worst, std::fabs(y[n] / std::log2(double(x[n])) - 1));
    }
    CHECK(worst < 3e-7);
    const float edges[] = {0, 1, 8, float(kInfinity), float(kNan)};
    float got[5];
    lanes.weight_log2(edges, got, 5);
    for (int n = 0; n < 4; ++n) CHECK(got[n] == std::log2(edges[n]));
    CHECK(std::isnan(got[4]));
  });
}

TEST_CASE("tanh: exact near 0, 1 far away, odd, NaN for NaN") {
  each_lanes([](const LanesTable& lanes) {
    std::vector<float> x;
    std::vector<double> x64;
    for (double size = 1e-30; size < 1e6; size *= 1.07) {
      for (double sign : {1.0, -1.0}) {
        x.push_back(float(sign * size));
        x64.push_back(sign * size);
      }
    }
    std::vector<float> y(x.size());
    std::vector<double> y64(x64.size());
    lanes.tanh_f32(x.data(), y.data(), std::int64_t(x.size()));
    lanes.tanh_f64(x64.data(), y64.data(), std::int64_t(x64.size()));
    double worst = 0, worst64 = 0;
    for (std::size_t n = 0; n < x.size(); ++n) {
      worst = std::fmax(worst, std::fabs(y[n] / std::tanh(double(x[n])) - 1));
      worst64 = std::fmax(worst64, std::fabs(y64[n] / std::tanh(x64[n]) - 1));
    }
    CHECK(worst < 4e-7);
    CHECK(worst64 < 2e-15);
    const float edges[] = {0, -0.0f, float(kInfinity), -float(kInfinity), float(kNan)};
    float got[5];
    lanes.tanh_f32(edges, got, 5);
    CHECK(same(got[0], 0.0f));
    CHECK(same(got[1], -0.0f));
    CHECK(got[2] == 1);
    CHECK(got[3] == -1);
    CHECK(std::isnan(got[4]));
  });
}

TEST_CASE("log2, transposes and masks") {
  each_lanes([](const LanesTable& lanes) {
    const float x[] = {0, 1, 8, 0.1f, float(kInfinity)};
    float y[5];
    lanes.log2_f32(x, y, 5);
    for (int n = 0; n < 5; ++n) CHECK(y[n] == float(std::log2(double(x[n]))));

    float tile[256];
    double tile64[64];
    for (int n = 0; n < 256; ++n) tile[n] = float(n);
    for (int n = 0; n < 64; ++n) tile64[n] = n;
    const int size = lanes.transpose_f32(tile), size64 = lanes.transpose_f64(tile64);
    int wrong = 0;
    for (int n = 0; n < size * size; ++n) wrong += tile[n] != float(n % size * size + n / size);
    for (int n = 0; n < size64 * size64; ++n) {
      wrong += tile64[n] != n % size64 * size64 + n / size64;
    }
    for (std::uint64_t bits = 0; bits<(std::uint64_t(1) << size); bits += size> 8 ? 37 : 1) {
      float lane[16];
      wrong += lanes.mask_f32(bits | ~std::uint64_t(0) << size, lane) != bits;
      for (int t = 0; t < size; ++t) wrong += lane[t] != float(bits >> t & 1);
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("sums of rows, and bf16 in pairs") {
  const Guarded patterns = every_pattern();
  each_lanes([&](const LanesTable& lanes) {
    if (!lanes.sums_f32) return;
    float tile[256], sums[16];
    double tile64[64], sums64[8];
    for (int n = 0; n < 256; ++n) tile[n] = float(n * n);
    for (int n = 0; n < 64; ++n) tile64[n] = n * n;
    float copy[256];
    double copy64[64];
    std::copy(tile, tile + 256, copy);
    std::copy(tile64, tile64 + 64, copy64);
    const int size = lanes.transpose_f32(copy), size64 = lanes.transpose_f64(copy64);
    lanes.sums_f32(tile, sums);
    lanes.sums_f64(tile64, sums64);
    for (int t = 0; t < size; ++t) {
      CHECK(sums[t] == std::accumulate(tile + t * size, tile + (t + 1) * size, 0.0f));
    }
    for (int t = 0; t < size64; ++t) {
      CHECK(sums64[t] == std::accumulate(tile64 + t * size64, tile64 + (t + 1) * size64, 0.0));
    }
    int wrong = 0;
    for (int bits = 0; bits < kAll; bits += 2 * size) {
      float got[32];
      lanes.even_and_odd(patterns.data() + 2 * bits, got);
      for (int t = 0; t < 2 * size; ++t) {
        wrong += !same(got[t % 2 * size + t / 2], float(element(bf16, bits + t)));
      }
    }
    CHECK(wrong == 0);
  });
}

TEST_SUITE_END();
