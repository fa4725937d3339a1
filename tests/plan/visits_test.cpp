// The tiles that are visited are those with a visible pair, and no others.
#include "plan/cpu/kernel/visits.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "plan/cpu/plan.hpp"
#include "tests/cpu/case.hpp"

using namespace regard;
using regard::tests::uniform;

namespace {

constexpr CpuTiling kTiling{
    .shape = {.lanes = 4, .vectors = 1}, .block_q = 8, .block_k = 4, .chunk_k = 16};

struct Random {
  std::uint64_t seed;
  std::uint64_t n = 0;
  int64 below(int64 bound) { return int64(uniform(seed, 6, n++) * double(bound)); }
};

MaskParams random_mask(Random& random) {
  const auto end = [&] { return random.below(3) ? random.below(40) : -1; };
  return {.left = end(), .right = end(), .top_left = random.below(2) == 0};
}

// The least interval that holds every n in [0, count) with holds(n).
template <class Holds>
Interval least_interval(int64 count, Holds holds) {
  Interval found;
  for (int64 n = 0; n < count; ++n) {
    if (!holds(n)) continue;
    if (found.empty()) found.begin = n;
    found.end = n + 1;
  }
  return found;
}

bool rows_see(const MaskParams& mask, Interval rows, Interval keys, int64 len_q, int64 len_k) {
  for (int64 row = rows.begin; row < rows.end; ++row) {
    for (int64 key = keys.begin; key < keys.end; ++key) {
      if (visible_keys(mask, row % len_q, len_q, len_k).contains(key)) return true;
    }
  }
  return false;
}

bool same(Interval a, Interval b) {
  return (a.empty() && b.empty()) || (a.begin == b.begin && a.end == b.end);
}

}  // namespace

TEST_SUITE_BEGIN("plan");

TEST_CASE("a chunk of keys visits the row blocks that see it; the first chunk visits all") {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Random random{seed};
    const MaskParams mask = random_mask(random);
    const int64 len_q = 1 + random.below(100), len_k = 1 + random.below(100);
    const RowBlocks blocks(kTiling, len_q, 1 + random.below(5));
    const int64 count = blocks.packs_gqa ? blocks.count() : blocks.per_head();
    for (int64 begin = 0; begin < len_k; begin += kTiling.chunk_k) {
      const Interval keys{begin, std::min(begin + kTiling.chunk_k, len_k)};
      const Interval visited = visited_blocks(mask, blocks, {.len_q = len_q, .len_k = len_k}, keys);
      const auto sees = [&](int64 block) {
        const int64 first = blocks.packs_gqa ? 0 : blocks.first_row(block);
        const int64 rows = blocks.packs_gqa ? len_q : blocks.rows(block);
        return begin == 0 || rows_see(mask, {first, first + rows}, keys, len_q, len_k);
      };
      CAPTURE(seed);
      CHECK(same(visited, least_interval(count, sees)));
    }
  }
}

TEST_CASE("with gaps in the positions, every chunk between the ends that a block sees visits it") {
  CpuTiling tiling = kTiling;
  tiling.block_q = 48;  // blocks on both sides of a gap
  std::int64_t across_gaps = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Random random{seed};
    const MaskParams mask = random_mask(random);
    const int64 len_q = 1 + random.below(400), len_k = 1 + random.below(700);
    std::vector<int32> rows;
    for (int64 at = random.below(150); int64(rows.size()) * kPositionBlock < len_q;) {
      rows.push_back(int32(at));
      at += kPositionBlock + random.below(3) * 100;
    }
    const Positions at{.given = true, .rows = rows.data(), .first_key = random.below(200)};
    const Sequence s{.len_q = len_q, .len_k = len_k, .positions = at};
    const RowBlocks blocks(tiling, len_q, 1);
    for (int64 block = 0; block < blocks.per_head(); ++block) {
      Interval seen{len_k, 0};  // by some row of the block, from the first key to the last
      const int64 first = blocks.packs_gqa ? 0 : blocks.first_row(block);
      const int64 end = blocks.packs_gqa ? len_q : first + blocks.rows(block);
      for (int64 i = first; i < end; ++i) {
        const Interval keys = visible_keys(mask, s, i);
        if (!keys.empty()) seen = {smaller(seen.begin, keys.begin), larger(seen.end, keys.end)};
        for (int64 j = 0; j < len_k; ++j) {
          if (keys.contains(j) == visible_queries(mask, s, j).contains(i)) continue;
          FAIL("row ", i, " and key ", j, " do not see the same, seed ", seed);
        }
      }
      across_gaps += end > kPositionBlock && first < kPositionBlock;
      for (int64 begin = 0; begin < len_k; begin += tiling.chunk_k) {
        const Interval keys{begin, std::min(begin + tiling.chunk_k, len_k)};
        if (keys.end <= seen.begin || seen.end <= keys.begin) continue;
        CAPTURE(seed);
        CHECK(visited_blocks(mask, blocks, s, keys).contains(block));
      }
    }
  }
  CHECK(across_gaps > 100);
}

TEST_CASE("under a window, twice the rows are twice the row blocks that are prepared") {
  const auto prepared = [](int64 len) {
    const RowBlocks blocks(kTiling, len, 1);
    int64 count = 0;
    for (int64 begin = 0; begin < len; begin += kTiling.chunk_k) {
      const Interval keys{begin, begin + kTiling.chunk_k};
      const Interval visited =
          visited_blocks({.left = 64, .right = 0}, blocks, {.len_q = len, .len_k = len}, keys);
      count += visited.end - visited.begin;
    }
    return count;
  };
  CHECK(prepared(32'000) < prepared(16'000) * 21 / 10);
}

TEST_CASE("a split takes the chunks of keys that some row sees") {
  int splits = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Random random{seed};
    Problem p;
    p.mask_params = random_mask(random);
    p.sizes = {.batch = 1, .heads_q = 1, .heads_kv = 1};
    const int64 len_q = 1 + random.below(6), len_k = 1 + random.below(200);
    const int64 chunk = kTiling.chunk_k;
    const Interval split = split_chunks(p, kTiling, {.len_q = len_q, .len_k = len_k});
    const Interval seen = least_interval(chunks_of(kTiling, len_k), [&](int64 n) {
      const Interval keys{n * chunk, std::min((n + 1) * chunk, len_k)};
      return rows_see(p.mask_params, {0, len_q}, keys, len_q, len_k);
    });
    const bool splits_here =
        len_q <= kTiling.shape.panel() && len_k >= 2 * chunk && seen.end - seen.begin > 1;
    CAPTURE(seed);
    CHECK(same(split, splits_here ? seen : Interval{}));
    splits += splits_here;
  }
  CHECK(splits > 300);
}

TEST_SUITE_END();
