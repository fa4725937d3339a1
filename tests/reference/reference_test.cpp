// The reference against numbers worked out by hand, and its gradients against finite differences.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tests/cpu/case.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

const Run kReference{.threads = 2, .backend = "reference"};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What is differentiated: sum of out . dout + lse . dlse.
double objective(const Case& c) {
  c.forward(kReference);
  double sum = 0;
  for (std::int64_t n = 0; n < c.out.count(); ++n) sum += c.out.get(n) * c.dout.get(n);
  for (std::int64_t n = 0; c.dlse.given() && n < c.lse.count(); ++n) {
    if (std::isfinite(c.lse.get(n))) sum += c.lse.get(n) * c.dlse.get(n);
  }
  return sum;
}

double slope(const Case& c, const Array& array, std::int64_t n) {
  // The sink is f32: its step must be exact there.
  const double step = array.tensor().type == f32 ? 0x1p-10 : 1e-5;
  const double old = array.get(n);
  array.set(n, old + step);
  const double above = objective(c);
  array.set(n, old - step);
  const double below = objective(c);
  array.set(n, old);
  return (above - below) / (2 * step);
}

}  // namespace

TEST_SUITE_BEGIN("reference");

TEST_CASE("one query, two keys, by hand") {
  const Case c(Settings{.type = f64, .len_q = 1, .len_k = 2, .dim = 1, .dim_v = 1, .scale = 2.0});
  c.q.set(0, 0.5);
  c.k.set(0, std::log(3.0));  // scores log 3 and 0: weights 3/4 and 1/4
  c.k.set(1, 0);
  c.v.set(0, 8);
  c.v.set(1, -4);
  c.dout.set(0, 1);
  c.both(kReference);
  CHECK(c.out.get(0) == doctest::Approx(5).epsilon(1e-14));
  CHECK(c.lse.get(0) == doctest::Approx(std::log(4.0)).epsilon(1e-14));
  CHECK(c.dv.get(0) == doctest::Approx(0.75).epsilon(1e-14));
  CHECK(c.dv.get(1) == doctest::Approx(0.25).epsilon(1e-14));
  // ds = P (dout v - out) = 3/4 * 3 and 1/4 * -9.
  CHECK(c.dk.get(0) == doctest::Approx(2 * 2.25 * 0.5).epsilon(1e-14));
  CHECK(c.dk.get(1) == doctest::Approx(2 * -2.25 * 0.5).epsilon(1e-14));
  CHECK(c.dq.get(0) == doctest::Approx(2 * 2.25 * std::log(3.0)).epsilon(1e-14));
}

TEST_CASE("rows that see nothing, with and without a sink, in every type") {
  for (Type type : {f64, f32, f16, bf16}) {
    for (bool sink : {false, true}) {
      const Case c(Settings{
          .type = type, .len_q = 4, .len_k = 2, .causal = Causal::bottom_right, .sink = sink});
      c.both(kReference);
      for (int i = 0; i < 2; ++i) {  // rows 0 and 1 lie above the diagonal
        CHECK(c.lse.get(i) == (sink ? c.sink.get(0) : -kInfinity));
        for (int d = 0; d < 8; ++d) {
          CHECK(c.out.get(i * 8 + d) == 0);
          CHECK(c.dq.get(i * 8 + d) == 0);
        }
      }
      CHECK(std::isfinite(c.lse.get(2)));
    }
  }
}

TEST_CASE("all pairs of features: gradients against finite differences") {
  for (int first = 0; first < kFeatureCount; ++first) {
    for (int second = first; second < kFeatureCount; ++second) {
      Settings s{.type = f64,
                 .batch = 2,
                 .heads_q = 2,
                 .heads_kv = 1,
                 .len_q = 3,
                 .len_k = 4,
                 .dim = 2,
                 .dim_v = 3};
      s.seed = 100 + first * kFeatureCount + second;
      s = with_features(s, 1u << first | 1u << second);
      if (s.bias != Type::none) {
        s.bias = f64;
        s.bias_broadcast = {first % 2 == 0, second % 2 == 0, second % 3 == 0, false};
      }
      CAPTURE(to_string(s));
      const Case c(s);
      c.both(kReference);
      const std::pair<const Array*, const Array*> pairs[] = {
          {&c.q, &c.dq}, {&c.k, &c.dk}, {&c.v, &c.dv}, {&c.bias, &c.dbias}, {&c.sink, &c.dsink}};
      for (const auto& [input, gradient] : pairs) {
        for (std::int64_t n = 0; n < gradient->count(); n += 3) {
          if (std::isinf(input->get(n))) continue;
          if (s.seqused && input != &c.bias && input != &c.sink) {
            // Rows that are not real keep what their gradient held.
            const Array& used = input == &c.q ? c.used_q : c.used_k;
            const std::int64_t rows = input == &c.q ? s.len_q : s.len_k;
            const std::int64_t row = n / input->row_size();
            const std::int64_t heads = input == &c.q ? s.heads_q : s.heads_kv;
            if (double(row % rows) >= used.get(row / rows / heads)) continue;
          }
          const double want = slope(c, *input, n), got = gradient->get(n);
          if (std::fabs(got - want) > 2e-6 * (1 + std::fabs(want))) {
            FAIL_CHECK("element " << n << " of " << to_string(input->tensor()) << ": " << got
                                  << ", not " << want);
          }
        }
      }
    }
  }
}

TEST_CASE("accumulation adds to what is there") {
  Settings s{.type = f64, .heads_q = 2, .bias = f64, .sink = true};
  const Case plain(s);
  s.accumulate = true;
  const Case added(s), before(s);
  plain.both(kReference);
  added.both(kReference);
  for (std::size_t r = 2; r < plain.results().size(); ++r) {
    const Array& sum = *added.results()[r];
    CHECK(sum.count() > 0);
    for (std::int64_t n = 0; n < sum.count(); ++n) {
      const double want = plain.results()[r]->get(n) + before.results()[r]->get(n);
      CHECK(sum.get(n) == doctest::Approx(want).epsilon(1e-6));
    }
  }
}

TEST_SUITE_END();
