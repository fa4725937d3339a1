// What is hidden spoils nothing: NaN in hidden rows, in padding and in gaps.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tests/cpu/case.hpp"
#include "tests/cpu/forced.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

const double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void fill_row(const Array& array, std::array<std::int64_t, 4> at, double value) {
  for (at[3] = 0; at[3] < array.row_size(); ++at[3]) array.set(array.index(at), value);
}

// Two heads and 70 queries see the keys up to the diagonal of 90; keys 20 to 24 are hidden from
// every query and queries 30 to 33 see nothing, by mask or by bias.
Settings hidden_settings(Type type, bool by_bias) {
  Settings s{.type = type,
             .heads_q = 2,
             .heads_kv = 1,
             .len_q = 70,
             .len_k = 90,
             .dim = 12,
             .dim_v = 7,
             .causal = Causal::bottom_right};
  s.mask = !by_bias;
  s.bias = by_bias ? f32 : Type::none;
  return s;
}

bool hidden_key(std::int64_t j) { return j >= 20 && j < 25; }
bool blind_query(std::int64_t i) { return i >= 30 && i < 34; }

void hide(const Case& c) {
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t i = 0; i < c.s.len_q; ++i) {
      for (std::int64_t j = 0; j < c.s.len_k; ++j) {
        const bool hidden = hidden_key(j) || blind_query(i);
        if (c.mask.given()) c.mask.set(c.mask.index({0, h, i, j}), hidden ? 0 : 1);
        if (!c.bias.given()) continue;
        const std::int64_t n = c.bias.index({0, h, i, j});
        if (hidden) c.bias.set(n, -kInfinity);
        // What the diagonal hides may hold anything.
        if (j > i + c.s.len_k - c.s.len_q) c.bias.set(n, 1);
      }
    }
  }
}

// Sets every hidden place of the inputs to `value`.
void poison(const Case& c, double value) {
  for (std::int64_t j = 20; j < 25; ++j) {
    fill_row(c.k, {0, 0, j, 0}, value);
    fill_row(c.v, {0, 0, j, 0}, value);
  }
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t i = 30; i < 34; ++i) {
      fill_row(c.q, {0, h, i, 0}, value);
      fill_row(c.dout, {0, h, i, 0}, value);
    }
    for (std::int64_t i = 0; c.bias.given() && i < c.s.len_q; ++i) {
      for (std::int64_t j = i + 21; j < c.s.len_k; ++j) {
        c.bias.set(c.bias.index({0, h, i, j}), value);
      }
    }
  }
}

bool all_finite(const Array& array) {
  for (std::int64_t n = 0; n < array.count(); ++n) {
    if (std::isnan(array.get(n)) || array.get(n) == kInfinity) return false;
  }
  return true;
}

}  // namespace

TEST_SUITE_BEGIN("hidden");

TEST_CASE("a row of the lowest biases, whether or not it is computed again for a hidden NaN") {
  forced_backend();
  for (Type type : {f32, f16, bf16}) {
    for (const Type bias : {f32, f64}) {
      const Settings s{.type = type,
                       .len_q = 40,
                       .len_k = 40,
                       .bias = bias,
                       .bias_broadcast = {true, true, false, false},
                       .mask = true};
      CAPTURE(to_string(s));
      const double lowest = bias == f64 ? -1e300 : -double(std::numeric_limits<float>::max());
      const Case clean(s), spoiled(s);
      for (const Case* c : {&clean, &spoiled}) {
        for (std::int64_t j = 0; j < s.len_k; ++j) c->bias.set(j, lowest);
        for (std::int64_t n = 0; n < c->mask.count(); ++n) c->mask.set(n, n % s.len_k == 7 ? 0 : 1);
      }
      for (std::int64_t h = 0; h < s.heads_kv; ++h) fill_row(spoiled.v, {0, h, 7, 0}, kNan);
      clean.both({.threads = 2});
      spoiled.both({.threads = 2});
      CHECK(spoiled.lse.get(0) == clean.lse.get(0));
      CHECK(std::isfinite(clean.lse.get(0)));
      CHECK(all_finite(spoiled.dbias));
    }
  }
}

TEST_CASE("NaN and infinity in hidden rows and pairs give what zeros there give") {
  forced_backend();
  for (Type type : tested_types()) {
    for (bool by_bias : {false, true}) {
      for (double value : {kNan, kInfinity, -kInfinity}) {
        const Settings s = hidden_settings(type, by_bias);
        CAPTURE(to_string(s));
        CAPTURE(value);
        const Case clean(s), spoiled(s);
        hide(clean);
        hide(spoiled);
        poison(clean, 0);
        poison(spoiled, value);
        clean.both({.threads = 2});
        spoiled.both({.threads = 2});
        for (std::size_t r = 0; r < 6; ++r) {
          const Array& got = *spoiled.results()[r];
          if (!got.given()) continue;
          CAPTURE(std::string(kResultNames[r]));
          CHECK(all_finite(got));
          // Rows that the value reached are computed again, alone: they may round otherwise.
          CHECK(row_error(got, *clean.results()[r]) <= tolerance(type));
        }
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t i = 30; i < 34; ++i) {
            CHECK(spoiled.lse.get(h * 70 + i) == -kInfinity);
            for (std::int64_t d = 0; d < 7; ++d) {
              CHECK(spoiled.out.get(spoiled.out.index({0, h, i, d})) == 0);
            }
            for (std::int64_t d = 0; d < 12; ++d) {
              CHECK(spoiled.dq.get(spoiled.dq.index({0, h, i, d})) == 0);
            }
          }
        }
        for (std::int64_t j = 20; j < 25; ++j) {
          for (std::int64_t d = 0; d < 12; ++d) {
            CHECK(spoiled.dk.get(spoiled.dk.index({0, 0, j, d})) == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("the same with gradients that accumulate") {
  forced_backend();
  for (Type type : tested_types()) {
    for (int place = 0; place < 4; ++place) {
      Settings s{.type = type,
                 .len_q = 40,
                 .len_k = 40,
                 .causal = Causal::bottom_right,
                 .accumulate = true};
      const Case clean(s), spoiled(s);
      // The last key is hidden from all but the last query, the first query from all but one key.
      const auto fill = [&](const Case& c, double value) {
        if (place == 0) fill_row(c.dout, {0, 0, 0, 0}, value);
        if (place == 1) fill_row(c.q, {0, 0, 0, 0}, value);
        if (place == 2) fill_row(c.k, {0, 0, 39, 0}, value);
        if (place == 3) fill_row(c.v, {0, 0, 39, 0}, value);
      };
      fill(clean, 0);
      fill(spoiled, kNan);
      clean.both({.threads = 1});
      spoiled.both({.threads = 1});
      CAPTURE(place);
      CAPTURE(std::string(name_of(type)));
      int wrong = 0;
      const auto compare = [&](const Array& got, const Array& want, std::int64_t row) {
        for (std::int64_t d = 0; d < got.row_size(); ++d) {
          const double x = got.get(row * got.row_size() + d);
          const double y = want.get(row * got.row_size() + d);
          wrong += !(std::fabs(x - y) <= 4 * tolerance(type));
        }
      };
      for (std::int64_t row = 1; row < 39; ++row) {
        compare(spoiled.out, clean.out, row);
        compare(spoiled.dq, clean.dq, row);
        // A NaN in query 0 reaches key 0, and in key 39 query 39, and through it every key.
        if (place < 2) compare(spoiled.dk, clean.dk, row);
        if (place < 2) compare(spoiled.dv, clean.dv, row);
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("a NaN in a visible score spoils its own row only") {
  forced_backend();
  for (Type type : tested_types()) {
    for (unsigned features : {0x0u, 0x1u, 0x4u, 0x40u}) {
      const Settings s = with_features({.type = type, .len_q = 40, .len_k = 50}, features);
      const Case clean(s), spoiled(s);
      fill_row(spoiled.q, {0, 0, 11, 0}, kNan);
      clean.forward();
      spoiled.forward();
      for (std::int64_t i = 0; i < 40; ++i) {
        for (std::int64_t d = 0; d < 8; ++d) {
          const double got = spoiled.out.get(i * 8 + d), want = clean.out.get(i * 8 + d);
          const bool same =
              multiplies_by_terms(type) ? std::fabs(got - want) <= 0x1p-10 : got == want;
          if (i == 11 ? !std::isnan(got) : !same) FAIL_CHECK("row " << i);
        }
        CHECK(std::isnan(spoiled.lse.get(i)) == (i == 11));
      }
    }
  }
}

TEST_CASE("padding behind seqused, and gaps, change no bit and are not written") {
  forced_backend();
  for (Type type : tested_types()) {
    Settings s{.type = type,
               .batch = 3,
               .heads_q = 2,
               .heads_kv = 1,
               .len_q = 40,
               .len_k = 50,
               .bias = f32,
               .mask = true,
               .seqused = true,
               .gaps = true};
    const Case clean(s), spoiled(s);
    const auto pad = [&](const Case& c, double value) {
      for (std::int64_t b = 0; b < 3; ++b) {
        for (std::int64_t i = std::int64_t(c.used_q.get(b)); i < 40; ++i) {
          for (std::int64_t h = 0; h < 2; ++h) {
            fill_row(c.q, {b, h, i, 0}, value);
            fill_row(c.dout, {b, h, i, 0}, value);
            fill_row(c.bias, {b, h, i, 0}, value);
          }
        }
        for (std::int64_t j = std::int64_t(c.used_k.get(b)); j < 50; ++j) {
          fill_row(c.k, {b, 0, j, 0}, value);
          fill_row(c.v, {b, 0, j, 0}, value);
        }
      }
    };
    pad(clean, 0);
    pad(spoiled, kNan);
    CHECK(clean.used_q.get(1) < 40);
    CHECK(clean.used_k.get(1) < 50);
    clean.both({.threads = 2});
    spoiled.both({.threads = 2});
    CHECK(spoiled.result_bytes() == clean.result_bytes());
    const Case untouched(s);
    for (std::int64_t i = std::int64_t(s.batch ? clean.used_q.get(1) : 0); i < 40; ++i) {
      const std::int64_t n = clean.out.index({1, 1, i, 0});
      CHECK(spoiled.out.get(n) == untouched.out.get(n));
      CHECK(spoiled.dq.get(n) == untouched.dq.get(n));
    }
    for (const Array* array : spoiled.every()) {
      if (array->given()) CHECK(array->gaps_intact());
    }
  }
}

TEST_SUITE_END();
