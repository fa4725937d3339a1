// The score's order of terms, and its slope against finite differences, for every combination.
#include "semantics/score.h"

#include <doctest/doctest.h>

#include <cstring>
#include <initializer_list>
#include <tuple>

#include "plan/cuda/config_members.hpp"
#include "tests/semantics/plain_lanes.hpp"

using namespace regard;
using tests::Plain;

namespace {

struct Combination {
  Features on;
  ScoreParams<double> params;
};

// Of all features, those to come as well; signed_scale follows from the scale.
template <class Check>
void each_combination(Check check) {
  constexpr int kCount = std::tuple_size_v<decltype(Listed<Features>::kMembers)>;
  for (int bits = 0; bits < 1 << kCount; ++bits) {
    for (double scale : {0.125, 1.0, 3.0, -0.5, 0.0}) {
      Combination c;
      int bit = 1;
      for_each_member(c.on, [&](const char*, bool& on) {
        on = (bits & bit) != 0;
        bit <<= 1;
      });
      if (c.on.signed_scale != (scale <= 0)) continue;
      for (double softcap : {0.7, 30.0}) {
        c.params.scale = scale;
        c.params.softcap = c.on.softcap ? softcap : 0;
        check(c);
      }
    }
  }
}

double logit_of(const Combination& c, double raw, double bias, double slope) {
  const auto logit = score<Plain>(c.on, c.params, raw, bias, {.alibi_slope = slope}, -7);
  return logit.value * logit.unit;
}

}  // namespace

TEST_SUITE_BEGIN("semantics");

TEST_CASE("the score is scale, softcap, bias, what the head adds, in this order") {
  each_combination([](const Combination& c) {
    for (double raw : {-11.0, -0.3, 0.0, 2.5, 40.0}) {
      double want = c.params.scale * raw;
      if (c.on.softcap) want = c.params.softcap * std::tanh(want / c.params.softcap);
      if (c.on.bias) want += 0.25;
      if (c.on.alibi) want -= 1.75;
      CHECK(logit_of(c, raw, 0.25, 0.25) == doctest::Approx(want).epsilon(1e-14));
    }
  });
}

TEST_CASE("terms that are off are not read") {
  const double nan = std::nan("");
  each_combination([&](const Combination& c) {
    const double logit = logit_of(c, 1.0, c.on.bias ? 0.5 : nan, c.on.alibi ? 0.5 : nan);
    CHECK(std::isfinite(logit));
  });
}

TEST_CASE("every logit's unit is the one that logit_unit promises, and positive") {
  each_combination([](const Combination& c) {
    const auto logit = score<Plain>(c.on, c.params, 2.0, 0.5, {.alibi_slope = 0.5}, 1);
    CHECK(logit.unit == logit_unit(c.on, c.params));
    CHECK(logit.unit > 0);
    if (is_plain(c.on)) CHECK(logit.value == 2.0);
  });
}

TEST_CASE("score_slope is the derivative by scale * raw") {
  each_combination([](const Combination& c) {
    if (c.params.scale == 0) return;
    for (double raw : {-3.0, -0.3, 0.0, 0.8, 5.0}) {
      const double step = 1e-5;
      const double rise = logit_of(c, raw + step, 0.1, 0.2) - logit_of(c, raw - step, 0.1, 0.2);
      const double want = rise / (2 * step * c.params.scale);
      CHECK(score_slope<Plain>(c.on, c.params, raw) == doctest::Approx(want).epsilon(1e-7));
    }
  });
}

TEST_CASE("narrowed_params keeps every parameter") {
  ScoreParams<double> wide;
  constexpr std::size_t kCount = sizeof wide / sizeof(double);
  double given[kCount];
  for (std::size_t n = 0; n < kCount; ++n) given[n] = 0.5 + 0.125 * double(n);
  std::memcpy(&wide, given, sizeof wide);
  const ScoreParams<float> narrow = narrowed_params(wide);
  float kept[kCount];
  static_assert(sizeof narrow == sizeof kept);
  std::memcpy(kept, &narrow, sizeof kept);
  for (std::size_t n = 0; n < kCount; ++n) CHECK(kept[n] == given[n]);
}

TEST_CASE("a shortcut knows each feature by itself") {
  constexpr Features none;
  for_each_member(none, [&](const char* one, bool) {
    Features on;
    for_each_member(on, [&](const char* name, bool& x) { x = std::strcmp(name, one) == 0; });
    CAPTURE(one);
    CHECK(!is_within(on, none));
    CHECK(is_within(on, on));
    CHECK(is_within(none, on));
  });
}

TEST_CASE("positions count from the bottom right diagonal") {
  CHECK(relative_position<double>(0, 0, 4, 4) == 0);
  CHECK(relative_position<double>(3, 0, 4, 4) == 3);
  CHECK(relative_position<double>(0, 3, 4, 4) == -3);
  CHECK(relative_position<double>(0, 0, 1, 9) == 8);
  CHECK(relative_position<double>(8, 0, 9, 1) == 0);
}

TEST_CASE("head_terms_change is the most by which a distance changes what the head adds") {
  const Features on{.alibi = true};
  const HeadTerms<Plain> head{.alibi_slope = -0.5};
  for (double distance : {1.0, 6.0}) {
    double most = 0;
    for (double position = -9; position < 9; ++position) {
      most = std::fmax(most, std::fabs(add_head_terms<Plain>(on, 0, head, position + distance) -
                                       add_head_terms<Plain>(on, 0, head, position)));
    }
    CHECK(head_terms_change<Plain>(on, head, distance) == most);
  }
}

TEST_SUITE_END();
