// The error does not grow with the number of keys, has no bias, and large scores lose nothing.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tests/cpu/case.hpp"
#include "tests/cpu/forced.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

struct Errors {
  double out, lse, dq, dv;
  double mean;  // of out's signed errors, relative to their root mean square
};

Errors errors_at(Type type, std::int64_t len_k, std::int64_t len_q) {
  Settings s{.type = type,
             .len_q = len_q,
             .len_k = len_k,
             .dim = 16,
             .dim_v = 4,
             .wide_results = true,
             .value_shift = 1};
  s.seed = std::uint64_t(len_k);
  const Case got(s), want(s, Case::Values::exact);
  got.both({.threads = 2});
  want.both({.threads = 2, .backend = "reference"});
  double sum = 0, squares = 0;
  for (std::int64_t n = 0; n < got.out.count(); ++n) {
    const double error = got.out.get(n) - want.out.get(n);
    sum += error;
    squares += error * error;
  }
  const double count = double(got.out.count());
  return {row_error(got.out, want.out), row_error(got.lse, want.lse), row_error(got.dq, want.dq),
          row_error(got.dv, want.dv), sum / count / std::sqrt(squares / count)};
}

}  // namespace

TEST_SUITE_BEGIN("accuracy");

TEST_CASE("no growth from 2^7 to 2^17 keys, forward and backward") {
  forced_backend();
  for (Type type : {f32, bf16}) {
    // out is 1 and more: its error in units of the type's precision at the smaller length.
    const double unit = type == f32 ? 0x1p-24 : 0x1p-9;
    const Errors few = errors_at(type, 1 << 7, 4);
    for (std::int64_t len_k : {1 << 12, 1 << 17}) {
      const Errors many = errors_at(type, len_k, 4);
      CAPTURE(std::string(name_of(type)));
      CAPTURE(len_k);
      CHECK(many.out <= 2 * few.out + 2 * unit);
      CHECK(many.lse <= 2 * few.lse + 4 * 0x1p-24);
      // P is recomputed from an lse that is rounded to f32, and lse itself grows with log(Sk).
      CHECK(many.dv <= 2 * few.dv + 4 * unit + 12 * 0x1p-24);
    }
  }
}

TEST_CASE("the signed mean error shows no bias") {
  forced_backend();
  for (Type type : {f32, f16, bf16}) {
    const Errors e = errors_at(type, 300, 500);
    CAPTURE(std::string(name_of(type)));
    CHECK(std::fabs(e.mean) < 0.25);
  }
}

TEST_CASE("scores of a thousand and more neither overflow nor lose the row") {
  forced_backend();
  for (Type type : {f64, f32, f16, bf16}) {
    for (double scale : {300.0, 3000.0, -3000.0}) {
      Settings s{.type = type, .len_q = 33, .len_k = 65, .scale = scale, .wide_results = true};
      const Case got(s), want(s, Case::Values::exact);
      got.forward();
      want.forward({.backend = "reference"});
      // A score's own rounding is what the softmax sees: relative in lse, and most rows have one
      // winner by far.
      CHECK(row_error(got.lse, want.lse) < 1e-6);
      int finite = 0, agree = 0;
      for (std::int64_t n = 0; n < got.out.count(); ++n) {
        finite += std::isfinite(got.out.get(n));
        agree += std::fabs(got.out.get(n) - want.out.get(n)) < 2e-2;
      }
      CHECK(finite == got.out.count());
      CHECK(agree > got.out.count() * 9 / 10);
    }
  }
}

// Relative to a maximum of the first keys, weights of the last ones would be as large as e^660.
TEST_CASE("scores that rise or fall from one tile of keys to the next") {
  forced_backend();
  for (const Type type : {f64, f32, f16, bf16}) {
    for (const double step : {3.0, 11.0, 60.0, -60.0}) {
      for (const unsigned features : {0u, 1u, 2u, 4u, 7u}) {
        Settings s{.type = type, .heads_q = 2, .len_q = 300, .len_k = 700, .dim = 40, .scale = 1};
        if (features & 1) s.causal = Causal::bottom_right;
        s.dropout = features & 2 ? 0.25 : 0;
        s.sink = features & 4;
        const Case got(s), want(s, Case::Values::exact);
        for (const Case* c : {&got, &want}) {
          for (const Array* x : {&c->q, &c->k}) {  // scores that f32 holds exactly
            for (std::int64_t n = 0; n < x->count(); ++n)
              x->set(n, std::round(16 * x->get(n)) / 16);
          }
          for (std::int64_t n = 0; n < c->q.count(); n += s.dim) c->q.set(n, 1);
          for (std::int64_t n = 0; n < c->k.count(); n += s.dim) {
            c->k.set(n, step * double(n / s.dim / 64));
          }
          if (s.sink) c->sink.set(1, -900);
        }
        CAPTURE(to_string(s));
        CAPTURE(step);
        got.forward({.threads = 1});
        want.forward({.threads = 1, .backend = "reference"});
        CHECK(row_error(got.out, want.out) < tolerance(type));
        CHECK(row_error(got.lse, want.lse) < tolerance(type == bf16 || type == f16 ? f32 : type));
      }
    }
  }
}

TEST_CASE("f16: products see whole elements, from subnormal to largest") {
  forced_backend();
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    const Settings s{.type = f16,
                     .len_q = seed > 3 ? 260 : 40,
                     .len_k = seed > 3 ? 300 : 70,
                     .dim = 48,
                     .dim_v = 20,
                     .wide_results = true,
                     .narrow_dout = true,
                     .seed = seed};
    const Case got(s), want(s, Case::Values::exact);
    const auto number = [&](std::uint64_t stream, std::int64_t n, double least, double most) {
      const auto at = std::uint64_t(n);
      const double power = least + (most - least) * uniform(seed, stream, at);
      const double sign = uniform(seed, stream + 1, at) < 0.5 ? -1 : 1;
      return rounded(f16, sign * std::exp2(power));
    };
    for (const Case* c : {&got, &want}) {
      for (std::int64_t n = 0; n < c->q.count(); ++n) c->q.set(n, number(10, n, -24, 1));
      for (std::int64_t n = 0; n < c->k.count(); ++n) c->k.set(n, number(20, n, -24, 1));
      for (std::int64_t n = 0; n < c->v.count(); ++n) c->v.set(n, number(30, n, -24, 15.9));
      for (std::int64_t n = 0; n < c->dout.count(); ++n) c->dout.set(n, number(50, n, -24, 10));
      // Two columns whose products nearly cancel: 200 x against 200 (x + 1/8).
      for (std::int64_t i = 0; seed % 2 == 0 && i < s.len_q; ++i) {
        for (std::int64_t d : {0, 1}) c->q.set(i * s.dim + d, 200.125);
      }
      for (std::int64_t j = 0; seed % 2 == 0 && j < s.len_k; ++j) {
        const double x = rounded(f16, 129 + 60 * uniform(seed, 40, std::uint64_t(j)));
        c->k.set(j * s.dim, x);
        c->k.set(j * s.dim + 1, -x - (j % 3) * 0.125);
      }
    }
    got.both();
    want.both({.backend = "reference"});
    CAPTURE(seed);
    // Sums of up to 200 x 189 are rounded to f32, some twenty times.
    const double of_score = seed % 2 == 0 ? 20 * 200 * 189 * 0x1p-24 / std::sqrt(48.0) : 1e-6;
    double most = 0;
    for (std::int64_t n = 0; n < got.lse.count(); ++n) {
      most = std::fmax(most, std::fabs(got.lse.get(n) - want.lse.get(n)));
    }
    CHECK(most < of_score);
    most = 0;
    for (std::int64_t n = 0; n < got.out.count(); ++n) {
      most = std::fmax(most, std::fabs(got.out.get(n) - want.out.get(n)));
    }
    CHECK(most < 65504 * (0x1p-17 + 2 * of_score));
    if (seed % 2 == 0) continue;
    // Two terms of bf16 hold P and dS to 2^-17.
    const double of_term = 0x1p-16;
    CHECK(row_error(got.dq, want.dq) < of_term);
    CHECK(row_error(got.dk, want.dk) < of_term);
    CHECK(row_error(got.dv, want.dv) < of_term);
  }
}

TEST_CASE("options at the limits of f32 mean what they mean in float64") {
  forced_backend();
  for (double softcap : {1e-30, 1e-46, 1e30, 1e39, 1e300}) {
    const Settings s{.len_q = 9, .len_k = 20, .softcap = softcap};
    const Case got(s), want(s, Case::Values::exact);
    for (const Case* c : {&got, &want}) {
      for (std::int64_t d = 0; d < 8; ++d) c->q.set(d, 0);  // a row of zero scores
    }
    got.forward();
    want.forward({.backend = "reference"});
    CAPTURE(softcap);
    CHECK(row_error(got.out, want.out) < 1e-5);
  }
  for (double scale : {0.0, 1e-46, -1e-46, 1e-38}) {
    const Settings s{.len_q = 9, .len_k = 20, .scale = scale};
    const Case got(s), want(s, Case::Values::exact);
    got.forward();
    want.forward({.backend = "reference"});
    CAPTURE(scale);
    CHECK(row_error(got.out, want.out) < 1e-5);
  }
}

TEST_CASE("a float64 bias too low for f32 hides nothing") {
  forced_backend();
  const Settings s{.len_q = 9, .len_k = 20, .bias = f64};
  const Case got(s), want(s, Case::Values::exact);
  for (const Case* c : {&got, &want}) c->bias.fill(-1e300);
  got.forward();
  want.forward({.backend = "reference"});
  CHECK(row_error(got.out, want.out) < 1e-5);
}

TEST_CASE("long head sizes lose no more than short ones") {
  forced_backend();
  double few = 0;
  for (std::int64_t dim : {256, 1024, 2000}) {
    const Settings s{.len_q = 40, .len_k = 70, .dim = dim, .dim_v = dim, .scale = 1 / double(dim)};
    const Case got(s), want(s, Case::Values::exact);
    for (const Case* c : {&got, &want}) {  // products of one sign, whose sum rises all the way
      for (const Array* x : {&c->q, &c->k}) {
        for (std::int64_t n = 0; n < x->count(); ++n) x->set(n, rounded(f32, 4 + x->get(n)));
      }
    }
    got.both({.threads = 2});
    want.both({.backend = "reference"});
    double most = 0;
    for (std::int64_t n = 0; n < got.lse.count(); ++n) {
      most = std::fmax(most, std::fabs(got.lse.get(n) - want.lse.get(n)));
    }
    if (dim == 256) few = most;
    CAPTURE(dim);
    CHECK(most < 1.5 * few);
  }
}

TEST_CASE("a sum of many terms is rounded once where dbias holds much") {
  forced_backend();
  for (Type type : {f32, f64}) {
    const Settings s{.type = type,
                     .batch = 2,
                     .heads_q = 2,
                     .heads_kv = 2,
                     .len_q = 300,
                     .len_k = 7,
                     .bias = type,
                     .bias_broadcast = {true, true, true, false},
                     .accumulate = true};
    const Case got(s), want(s, Case::Values::exact);
    for (const Case* c : {&got, &want}) c->dbias.fill(1000);
    got.both({.threads = 2});
    want.both({.backend = "reference"});
    const double unit = type == f32 ? 0x1p-15 : 0x1p-44;  // of a number below 1024, halved
    for (std::int64_t n = 0; n < got.dbias.count(); ++n) {
      CHECK(std::fabs(got.dbias.get(n) - want.dbias.get(n)) < 3 * unit);
    }
  }
}

TEST_SUITE_END();
