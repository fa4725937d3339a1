// What is known of the spans of whole blocks: no visible pair is missed, and the chunks of keys
// that a block of rows waits for are those that visit it.
#include "cpu/span_sets.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "problem/describe.hpp"
#include "tests/cpu/case.hpp"

using namespace regard;
using namespace regard::cpu_backend;
using regard::tests::uniform;

namespace {

constexpr CpuTiling kTiling{
    .shape = {.lanes = 4, .vectors = 1}, .block_q = 8, .block_k = 4, .pack_k = 4, .chunk_k = 16};
constexpr int64 kHeads = 2;

struct Random {
  std::uint64_t seed;
  std::uint64_t n = 0;
  int64 below(int64 bound) { return int64(uniform(seed, 9, n++) * double(bound)); }
};

// A call with random spans of rows, of keys or of both, by head or of all heads.
struct RandomCall {
  Random random;
  int64 len_q, len_k;
  std::vector<std::int32_t> ends[2];
  Attention a;

  explicit RandomCall(std::uint64_t seed) : random{seed} {
    len_q = 4 + random.below(120), len_k = 1 + random.below(120);
    a.q = Tensor(nullptr, f32, {1, kHeads, len_q, 8});
    a.k = a.v = Tensor(nullptr, f32, {1, 1, len_k, 8});
    if (random.below(3) == 0) a.causal = Causal::top_left;
    if (random.below(3) == 0) a.window.left = random.below(40);
    const int64 which = 1 + random.below(3);
    if (which & 1) a.row_spans = spans(ends[0], len_q, len_k);
    if (which & 2) a.key_spans = spans(ends[1], len_k, len_q);
  }
  Tensor spans(std::vector<std::int32_t>& to, int64 rows, int64 others) {
    const int64 count = 1 + random.below(8), heads = random.below(2) ? kHeads : 1;
    const int64 longest = 1 + random.below(12);
    for (int64 n = 0; n < heads * rows * count; ++n) {
      const bool is_near = random.below(4) > 0;  // to the diagonal
      const int64 begin = is_near ? n / count % rows * others / rows - 2 : random.below(others);
      to.push_back(std::int32_t(begin));
      to.push_back(std::int32_t(begin + random.below(longest + 1)));
    }
    return Tensor(to.data(), i32, {1, heads, rows, 2 * count});
  }
};

struct Call {
  TableCopies copies;
  const Problem p;
  const Batch batch;
  const SpanSets sets;
  const Sequence seq;

  Call(const Attention& a, Pass pass)
      : p(describe(a, pass, NullData::allowed, &copies)),
        batch(p, kTiling),
        sets(p, kTiling, batch, 1, {.threads = 1}),
        seq(sequence(p.sequences, 0)) {}

  bool sees(int64 head, Interval rows, Interval keys) const {
    for (int64 i = rows.begin; i < rows.end; ++i) {
      for (int64 j = keys.begin; j < keys.end; ++j) {
        if (visible_keys(p.mask_params, seq, i).contains(j) &&
            shown_by_spans(p.features, p, seq, 0, head, i, j)) {
          return true;
        }
      }
    }
    return false;
  }
};

}  // namespace

TEST_SUITE_BEGIN("work");

TEST_CASE("backward, a chunk of keys visits the blocks of rows that take it, and all that see it") {
  std::int64_t seen_pairs = 0, visits = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const RandomCall call(seed);
    const Call made(call.a, Pass::backward);
    const RowBlocks rows(kTiling, call.len_q, kHeads);
    const KeyChunks chunks(kTiling, call.len_k);
    for (int64 head = 0; head < kHeads; ++head) {
      const SpanReach& reach = made.sets.of(0, 0)[head];
      for (int64 block = 0; block < rows.per_head(); ++block) {
        const Interval own{block * rows.block, std::min((block + 1) * rows.block, call.len_q)};
        IntervalSet seen;
        for (int64 i = own.begin; i < own.end; ++i) {
          seen.add(visible_keys(made.p.mask_params, made.seq, i));
        }
        if (reach.keys_of_rows.known()) seen = reach.keys_of_rows[block];
        for (int64 chunk = 0; chunk < chunks.count; ++chunk) {
          const Interval keys = chunks.keys(chunk);
          const Interval visited = visited_blocks(made.p.mask_params, rows, made.seq, keys);
          const bool takes = next_keys(chunks, reach.rows_of_keys, seen, own, chunk) == chunk;
          const bool visits_it = visited.contains(block) &&
                                 previous_rows(rows, reach, chunk, keys, block + 1) == block;
          CAPTURE(seed);
          if (takes) CHECK(visits_it);
          const bool sees = made.sees(head, own, keys);
          if (sees) CHECK(takes);
          seen_pairs += sees, visits += takes;
        }
      }
    }
  }
  CHECK(seen_pairs > 5'000);
  CHECK(visits < seen_pairs * 5 / 4);
}

TEST_CASE("forward, the next block of keys is one that the spans of its keys show") {
  std::int64_t seen_pairs = 0, taken_pairs = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const RandomCall call(seed);
    const Call made(call.a, Pass::forward);
    const SpanReach* const reach = made.sets.of(0, 0);
    REQUIRE((reach != nullptr) == call.a.key_spans.given());
    if (!reach) continue;
    struct {
      int64 size;
      int64 of(int64 key) const { return key / size; }
      int64 begin(int64 n) const { return n * size; }
    } const blocks{kTiling.block_k};
    IntervalSet all;
    all.add({0, call.len_k});
    for (int64 head = 0; head < kHeads; ++head) {
      for (int64 first = 0; first < call.len_q; first += 4) {
        const Interval rows{first, std::min(first + 4, call.len_q)};
        for (int64 n = 0; n * blocks.size < call.len_k; ++n) {
          const Interval keys{n * blocks.size, std::min((n + 1) * blocks.size, call.len_k)};
          const bool taken = next_keys(blocks, reach[head].rows_of_keys, all, rows, n) == n;
          const bool sees = made.sees(head, rows, keys);
          CAPTURE(seed);
          if (sees) CHECK(taken);
          if (call.a.row_spans.given()) continue;  // which hide more
          seen_pairs += sees, taken_pairs += taken;
        }
      }
    }
  }
  CHECK(seen_pairs > 5'000);
  CHECK(taken_pairs < seen_pairs * 5 / 4);
}

TEST_SUITE_END();
