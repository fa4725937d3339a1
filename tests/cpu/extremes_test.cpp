// Sinks, softcaps and inputs at the edge of f32: the same classes of numbers as in float64.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tests/cpu/case.hpp"
#include "tests/cpu/forced.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Type kTypes[] = {f64, f32, f16, bf16};

// Of few rows and of split keys.
std::vector<Settings> shapes(Type type) {
  const Settings s{.type = type, .heads_q = 2, .heads_kv = 2, .len_q = 37, .len_k = 53, .dim = 24};
  Settings split = s;
  split.len_q = 2;
  split.len_k = 8300;
  return {s, split};
}

// What forward gives is what the reference gives of the same numbers.
void check_forward(const Case& got, const Case& want, double allowed) {
  CAPTURE(to_string(got.s));
  got.forward({.threads = 1});
  want.forward({.threads = 1, .backend = "reference"});
  CHECK(row_error(got.out, want.out) < allowed);
  CHECK(row_error(got.lse, want.lse) < allowed);
}

void check_both(const Case& got, const Case& want) {
  check_forward(got, want, tolerance(got.s.type));
  got.backward({.threads = 1});
  want.backward({.threads = 1, .backend = "reference"});
  for (std::size_t n = 0; n < got.results().size(); ++n) {
    if (!got.results()[n]->given()) continue;
    CAPTURE(kResultNames[n]);
    CHECK(row_error(*got.results()[n], *want.results()[n], 1) < 4 * tolerance(got.s.type));
  }
}

}  // namespace

TEST_SUITE_BEGIN("hidden");

TEST_CASE("sinks that f32 cannot divide by the scale") {
  forced_backend();
  struct Sink {
    double value, scale;
  };
  for (const Type type : kTypes) {
    for (const Sink sink : {Sink{3e38, 0.2},
                            {-3e38, 0.2},
                            {1e9, 0x1p-99},
                            {-1e9, 0x1p-99},
                            {3e38, 1},
                            {1e3, 0x1p-99}}) {
      for (Settings s : shapes(type)) {
        s.sink = true;
        s.scale = sink.scale;
        const Case got(s), want(s, Case::Values::exact);
        for (const Case* c : {&got, &want}) c->sink.set(1, sink.value);
        CAPTURE(sink.value);
        check_forward(got, want, tolerance(type));
      }
    }
  }
}

TEST_CASE("softcaps far above the scores bend none of them") {
  forced_backend();
  struct Cap {
    double softcap, scale;
  };
  for (const Type type : kTypes) {
    for (const Cap cap : {Cap{1e300, 0.2},
                          {1e20, 0.2},
                          {1e38, 0.2},
                          {1e300, 0x1p-99},
                          {1e300, 0x1p-20},
                          {1e20, 0x1p60},
                          {1e300, 0x1p60},
                          {1e-3, 0x1p100}}) {
      for (Settings s : shapes(type)) {
        s.softcap = cap.softcap;
        s.scale = cap.scale;
        const Case got(s), want(s, Case::Values::exact);
        CAPTURE(cap.softcap);
        check_forward(got, want, cap.scale > 1 ? 1e-2 : tolerance(type));
      }
    }
  }
}

TEST_CASE("infinite inputs give what the formulas give") {
  forced_backend();
  for (const Type type : kTypes) {
    for (std::uint64_t seed = 1; seed <= 48; ++seed) {
      Settings s{.type = type,
                 .heads_q = 2,
                 .heads_kv = 1,
                 .len_q = seed > 40 ? 260 : 37,
                 .len_k = seed > 40 ? 270 : 53,
                 .dim = 1,
                 .dim_v = 3,
                 .seed = seed};
      if (seed % 2) s.causal = Causal::bottom_right;
      s.mask = seed % 3 == 0;
      s.sink = seed % 5 == 0;
      const Case got(s), want(s, Case::Values::exact);
      for (const Case* c : {&got, &want}) {
        // Scores of an infinite row are -inf where signs differ: with keys of one sign, everywhere.
        for (std::int64_t n = 0; n < c->k.count(); ++n) {
          c->k.set(n, rounded(type, std::fabs(c->k.get(n)) + 0.125));
        }
        c->q.set(5, -kInfinity);
        if (seed % 4 < 2) c->q.set(40, kInfinity);
        if (seed % 8 < 4) c->k.set(7, kInfinity);
        if (seed % 16 < 8) c->v.set(3 * 9 + 1, -kInfinity);
      }
      check_both(got, want);
    }
  }
}

TEST_SUITE_END();
