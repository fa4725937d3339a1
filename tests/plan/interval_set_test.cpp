// Sets of intervals against a list of the elements that they hold.
#include "plan/cpu/kernel/interval_set.h"

#include <doctest/doctest.h>

#include <vector>

#include "tests/cpu/case.hpp"

using namespace regard;
using regard::tests::uniform;

namespace {

constexpr int64 kElements = 60;

int64 first_of(const std::vector<bool>& held, int64 begin, int64 end) {
  for (int64 x = begin; x < end; ++x) {
    if (held[std::size_t(x)]) return x;
  }
  return -1;
}
int64 last_of(const std::vector<bool>& held, int64 begin, int64 end) {
  for (int64 x = end - 1; x >= begin; --x) {
    if (held[std::size_t(x)]) return x;
  }
  return -1;
}
int runs_of(const std::vector<bool>& held) {
  int runs = 0;
  for (std::size_t x = 0; x < held.size(); ++x) runs += held[x] && (x == 0 || !held[x - 1]);
  return runs;
}
std::vector<bool> elements_of(const IntervalSet& set) {
  std::vector<bool> held;
  for (int64 x = 0; x < kElements; ++x) held.push_back(set.meets({x, x + 1}));
  return held;
}

}  // namespace

TEST_SUITE_BEGIN("plan");

TEST_CASE("a set of intervals holds what was added, and gaps only where they are too many") {
  int joined = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    std::uint64_t n = 0;
    const auto below = [&](int64 bound) { return int64(uniform(seed, 7, n++) * double(bound)); };
    const int64 longest = 1 + below(8);
    std::vector<bool> added(kElements);
    IntervalSet set;
    for (int64 left = below(20); left > 0; --left) {
      const int64 begin = below(kElements), end = std::min(kElements, begin + below(longest + 1));
      set.add({begin, end});
      for (int64 x = begin; x < end; ++x) added[std::size_t(x)] = true;
    }
    const std::vector<bool> held = elements_of(set);
    CAPTURE(seed);
    CHECK(runs_of(held) <= IntervalSet::kMost);
    for (std::size_t x = 0; x < held.size(); ++x) CHECK(held[x] >= added[x]);
    if (runs_of(added) <= 1) CHECK(held == added);
    joined += held != added;
    IntervalSet twice = set;
    twice.add(set);
    CHECK(elements_of(twice) == held);
  }
  CHECK(joined > 50);
  CHECK(joined < 500);
}

TEST_CASE("a set of intervals keeps as many as it may, and then closes the least gap") {
  IntervalSet set;
  std::vector<bool> added(kElements);
  for (int64 n : {3, 1, 7, 0, 5, 2, 6, 4}) {
    set.add({7 * n, 7 * n + 2});
    added[std::size_t(7 * n)] = added[std::size_t(7 * n + 1)] = true;
  }
  CHECK(elements_of(set) == added);
  set.add({18, 19});  // between 14 to 16 and 21 to 23
  added[18] = added[16] = added[17] = true;
  if (!set.meets({16, 18})) added[16] = added[17] = false, added[19] = added[20] = true;
  CHECK(elements_of(set) == added);
}

TEST_CASE("a set of intervals finds the elements of an interval") {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::uint64_t n = 0;
    const auto below = [&](int64 bound) { return int64(uniform(seed, 7, n++) * double(bound)); };
    IntervalSet set;
    for (int64 left = below(6); left > 0; --left) {
      const int64 begin = below(kElements);
      set.add({begin, std::min(kElements, begin + 1 + below(5))});
    }
    const std::vector<bool> held = elements_of(set);
    CAPTURE(seed);
    CHECK(set.all().empty() == (first_of(held, 0, kElements) < 0));
    for (int64 begin = 0; begin < kElements; begin += 3) {
      const int64 next = first_of(held, begin, kElements);
      CHECK(set.first_from(begin) == (next < 0 ? kNone : next));
      CHECK(set.last_before(begin) == last_of(held, 0, begin));
      for (int64 end = begin + 1; end < kElements; end += 4) {
        const Interval within = set.within({begin, end});
        const int64 first = first_of(held, begin, end);
        CHECK(set.meets({begin, end}) == (first >= 0));
        CHECK(within.empty() == (first < 0));
        if (first < 0) continue;
        CHECK(within.begin == first);
        CHECK(within.end == last_of(held, begin, end) + 1);
      }
    }
  }
}

TEST_SUITE_END();
