// Which blocks see some of an interval, against a look at each of them; and how many looks it
// takes.
#include "plan/cpu/kernel/block_sets.h"

#include <doctest/doctest.h>

#include <vector>

#include "tests/cpu/case.hpp"

using namespace regard;
using regard::tests::uniform;

namespace {

int64 looks = 0;

struct CountingSet : IntervalSet {
  bool meets(Interval x) const { return ++looks, IntervalSet::meets(x); }
};

// A tree that owns its sets.
struct Tree {
  std::vector<CountingSet> sets;
  int64 leaves;

  explicit Tree(const std::vector<IntervalSet>& blocks)
      : sets(std::size_t(2 * leaves_for(int64(blocks.size())))),
        leaves(leaves_for(int64(blocks.size()))) {
    for (std::size_t n = 0; n < blocks.size(); ++n) {
      sets[std::size_t(leaves) + n].add(blocks[n]);
    }
    for (std::size_t n = std::size_t(leaves); n-- > 1;) {
      sets[n].add(sets[2 * n]);
      sets[n].add(sets[2 * n + 1]);
    }
  }
  BlockSets<CountingSet> view() const { return {sets.data(), leaves}; }
};

// What blocks of 8 rows see under a window of 16 keys, and of the first 4.
Tree windows(int64 count) {
  std::vector<IntervalSet> blocks(static_cast<std::size_t>(count));
  for (int64 n = 0; n < count; ++n) {
    blocks[std::size_t(n)].add({8 * n - 16, 8 * n + 8});
    blocks[std::size_t(n)].add({0, 4});
  }
  return Tree(blocks);
}

}  // namespace

TEST_SUITE_BEGIN("plan");

TEST_CASE("a tree finds the blocks that see some of an interval, in both directions") {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    std::uint64_t n = 0;
    const auto below = [&](int64 bound) { return int64(uniform(seed, 8, n++) * double(bound)); };
    std::vector<IntervalSet> blocks(std::size_t(1 + below(20)));
    for (IntervalSet& block : blocks) {
      for (int64 left = below(4); left > 0; --left) {
        const int64 begin = below(100);
        block.add({begin, begin + 1 + below(6)});
      }
    }
    const Tree tree(blocks);
    const auto count = int64(blocks.size());
    for (int64 from = 0; from <= count; ++from) {
      const int64 begin = below(100);
      const Interval x{begin, begin + 1 + below(10)};
      int64 next = from, last = from - 1;
      while (next < count && !blocks[std::size_t(next)].meets(x)) ++next;
      while (last >= 0 && !blocks[std::size_t(last)].meets(x)) --last;
      CAPTURE(seed);
      CAPTURE(from);
      CHECK(tree.view().first_from(from, x) == (next < count ? next : kNone));
      CHECK(tree.view().last_before(from, x) == last);
    }
  }
}

TEST_CASE("under a window, twice as many blocks take about twice as many looks") {
  const auto looks_for = [](int64 count, bool forwards) {
    const Tree tree = windows(count);
    looks = 0;
    int64 found = 0;
    for (int64 begin = 8; begin < 8 * count; begin += 8) {
      const Interval x{begin, begin + 8};
      for (int64 n = 0; forwards && (n = tree.view().first_from(n, x)) != kNone; ++n) ++found;
      for (int64 n = count; !forwards && (n = tree.view().last_before(n, x)) >= 0;) ++found;
    }
    CHECK(found >= 3 * (count - 2));
    return looks;
  };
  for (const bool forwards : {false, true}) {
    const int64 once = looks_for(4096, forwards), twice = looks_for(8192, forwards);
    CHECK(once > 4096);
    CHECK(twice < once * 23 / 10);
  }
}

TEST_SUITE_END();
