// Plans against the definition of each mask, pair by pair, without devices.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "regard/distributed.hpp"

using namespace regard;
using namespace regard::distributed;

namespace {

const std::vector<std::int32_t> kDocuments = {0, 40, 40, 333, 420};

WholeSequence whole(std::int64_t length) {
  return {.length = length, .heads_q = 8, .heads_kv = 2, .head_size = 64};
}

bool is_visible(const WholeSequence& w, std::int64_t i, std::int64_t j) {
  if (w.causal != Causal::none && j > i) return false;
  if (w.window.left >= 0 && i - j > w.window.left) return false;
  if (w.window.right >= 0 && j - i > w.window.right) return false;
  const auto& cuts = w.cu_seqlens;
  bool together = cuts.empty();
  for (std::size_t n = 1; n < cuts.size(); ++n) {
    const auto holds = [&](std::int64_t row) { return cuts[n - 1] <= row && row < cuts[n]; };
    if (holds(i) && holds(j)) together = true;
  }
  return together;
}

bool is_in(const std::vector<Rows>& runs, std::int64_t row) {
  return std::any_of(runs.begin(), runs.end(),
                     [&](const Rows& run) { return run.begin <= row && row < run.end; });
}

std::vector<WholeSequence> masks(std::int64_t length) {
  std::vector<WholeSequence> all;
  for (const Causal causal : {Causal::none, Causal::bottom_right}) {
    for (const Window window : {Window{}, Window{200, 70}, Window{150, -1}, Window{-1, 0}}) {
      for (const bool documents : {false, true}) {
        WholeSequence w = whole(length);
        w.causal = causal;
        w.window = window;
        if (documents) w.cu_seqlens = kDocuments;
        all.push_back(w);
      }
    }
  }
  return all;
}

void check_rows(const Plan& p) {
  std::vector<int> owners(std::size_t(p.whole().length), 0);
  for (int rank = 0; rank < p.ranks(); ++rank) {
    const auto positions = p.positions(rank);
    const auto& first = p.first_positions(rank);
    CHECK(std::int64_t(positions.size()) == p.rows(rank));
    CHECK(first.size() == (positions.size() + 127) / 128);
    for (std::size_t i = 0; i < positions.size(); ++i) {
      CHECK(positions[i] == first[i / 128] + std::int64_t(i % 128));
      ++owners[std::size_t(positions[i])];
    }
  }
  CHECK(std::all_of(owners.begin(), owners.end(), [](int count) { return count == 1; }));
}

// Areas, and that every visible key is among those that the rank has or receives.
void check_keys(const Plan& p, int rank) {
  const WholeSequence& w = p.whole();
  double area = 0;
  std::int64_t received = 0, returned = 0;
  std::vector<bool> has(std::size_t(w.length));
  for (int owner = 0; owner < p.ranks(); ++owner) {
    const std::vector<Rows> runs = p.runs(owner, rank);
    for (const std::int64_t key : p.positions(owner)) {
      has[std::size_t(key)] = is_in(runs, key);
      if (owner != rank) received += is_in(runs, key);
      if (owner == rank) CHECK(is_in(runs, key));
    }
    if (owner == rank) continue;
    for (const Rows& run : p.runs(rank, owner)) returned += run.end - run.begin;
  }
  const Rows keys = p.keys(rank);
  for (std::int64_t begin = 0; begin < w.length; begin += 128) {
    bool seen = false;
    for (std::int64_t j = begin; j < std::min(w.length, begin + 128); ++j) {
      for (const std::int64_t i : p.positions(rank)) {
        if (!is_visible(w, i, j)) continue;
        ++area;
        seen = true;
      }
    }
    if (!seen) continue;
    CHECK(has[std::size_t(begin)]);
    CHECK(keys.begin <= begin);
    CHECK(keys.end > begin);
  }
  CHECK(p.area(rank) == area);
  CHECK(p.moved(rank).forward == received * 2 * 128 * 2);
  CHECK(p.moved(rank).backward == received * 2 * 128 * 2 + returned * 2 * 128 * 4);
}

}  // namespace

TEST_SUITE_BEGIN("distributed_plan");

TEST_CASE("plan: every row once, every visible key there, every pair counted") {
  for (const WholeSequence& w : masks(517)) {
    for (const int ranks : {1, 2, 3, 7}) {
      for (const Scheme scheme : {Scheme::gather, Scheme::automatic}) {
        const Plan p = plan(w, ranks, scheme);
        check_rows(p);
        for (int rank = 0; rank < ranks && p.scheme() != Scheme::ulysses; ++rank) {
          check_keys(p, rank);
        }
      }
    }
  }
}

// Rank 1 of 3 has query heads 2 to 4 of 8, which read both heads of keys.
TEST_CASE("plan: heads") {
  for (WholeSequence w : masks(517)) {
    w.head_size_v = 32;
    const Plan p = plan(w, 3, Scheme::ulysses);
    CHECK(p.dealing() == Dealing::contiguous);
    check_rows(p);
    double pairs = 0;
    for (std::int64_t i = 0; i < w.length; ++i) {
      for (std::int64_t j = 0; j < w.length; ++j) pairs += is_visible(w, i, j);
    }
    const std::int64_t rows = p.rows(1), others = w.length - rows;
    CHECK(p.area(1) == doctest::Approx(pairs * 3 / 8));
    CHECK(p.balance() == doctest::Approx(9 / 8.0));
    CHECK(p.keys(1) == Rows{0, w.length});
    CHECK(p.runs(0, 1) == std::vector<Rows>{{0, p.rows(0)}});
    const std::int64_t inputs = (3 * 64 + 2 * 96) * 2;
    CHECK(p.moved(1).forward == others * inputs + rows * 5 * 32 * 2);
    // Ranks 0 and 2 read one head of keys each.
    CHECK(p.moved(1).backward ==
          others * (inputs + 3 * (2 * 32 * 2 + 4)) + rows * (5 * 64 * 2 + 2 * 96 * 4));
  }
  const Plan few = plan({.length = 300, .heads_q = 2}, 3, Scheme::ulysses);
  CHECK(few.area(0) == 0);
  CHECK(few.keys(0) == Rows{0, 0});
  CHECK(few.runs(1, 0).empty());
  CHECK(few.explain().find("each rank has all rows of its heads") != std::string::npos);
}

// Keys pass by every rank, and sums come home after a full turn.
TEST_CASE("plan: a ring") {
  for (const WholeSequence& w : masks(517)) {
    const Plan ring = plan(w, 3, Scheme::ring), gather = plan(w, 3, Scheme::gather);
    check_rows(ring);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(ring.blocks(rank) == gather.blocks(rank));
      CHECK(ring.area(rank) == gather.area(rank));
      const std::int64_t others = w.length - ring.rows(rank);
      CHECK(ring.moved(rank).forward == others * 2 * 128 * 2);
      CHECK(ring.moved(rank).backward == others * 2 * 128 * 2 + w.length * 2 * 128 * 4);
    }
  }
  CHECK(plan(whole(517), 1, Scheme::ring).moved(0).backward == 0);
}

// As in docs/distributed.md.
TEST_CASE("plan: heads where that takes less time") {
  WholeSequence w = {.length = 65536, .heads_q = 32, .heads_kv = 8, .head_size = 128};
  w.causal = Causal::top_left;
  const Plan slow = plan(w, 8, Scheme::automatic, {.bytes_per_second = 4e9, .flops = 3e14});
  CHECK(slow.scheme() == Scheme::ulysses);
  CHECK(slow.balance() == 1);
  CHECK(slow.explain().find(", ulysses ") != std::string::npos);
  CHECK(plan(w, 64, Scheme::automatic, {.bytes_per_second = 4e9}).scheme() == Scheme::gather);
  w.causal = Causal::none;
  w.window = {1023, 0};
  CHECK(plan(w, 8).scheme() == Scheme::halo);
}

TEST_CASE("plan: keys that no row sees do not move") {
  WholeSequence w = whole(128 * 64);
  for (std::int32_t cut = 0; cut <= 128 * 64; cut += 128) w.cu_seqlens.push_back(cut);
  for (int rank = 0; rank < 4; ++rank) {
    CHECK(plan(w, 4, Scheme::gather).moved(rank).backward == 0);
  }
  WholeSequence near = whole(65536);
  near.window = {1023, 0};
  const Plan halo = plan(near, 8);
  CHECK(halo.scheme() == Scheme::halo);
  CHECK(halo.moved(1).forward == 1024 * 2 * 128 * 2);
  CHECK(halo.moved(0).forward == 0);
}

// What regard.torch.distributed.plan returns for the same arguments.
TEST_CASE("plan: deals as the Python package does") {
  using Numbers = std::vector<std::int64_t>;
  WholeSequence w = whole(5000);
  w.causal = Causal::top_left;
  const Plan zigzag = plan(w, 3, Scheme::gather);
  CHECK(zigzag.blocks(0) == Numbers{0, 1, 2, 3, 4, 5, 33, 34, 35, 36, 37, 38, 39});
  CHECK(zigzag.blocks(1) == Numbers{6, 7, 8, 9, 10, 11, 26, 27, 28, 29, 30, 31, 32});
  CHECK(zigzag.area(2) == 4359040);
  const Plan ring = plan(w, 3, Scheme::ring);
  CHECK(ring.blocks(1) == zigzag.blocks(1));
  CHECK(ring.moved(1).forward == 1708032);
  CHECK(ring.moved(1).backward == 6828032);
  const Plan heads = plan(w, 3, Scheme::ulysses);
  CHECK(heads.blocks(1).front() == 13);
  CHECK(heads.area(1) == 4688437.5);
  CHECK(heads.moved(1).forward == 4054016);  // backward, inputs come again
  w.cu_seqlens = {0, 100, 1500, 1501, 4700};
  const Plan documents = plan(w, 3, Scheme::gather);
  CHECK(documents.dealing() == Dealing::documents);
  CHECK(documents.blocks(0) == Numbers{0, 1, 11, 15, 16, 23, 24, 29, 30, 35, 36, 37, 38, 39});
  CHECK(documents.blocks(2) == Numbers{2, 3, 6, 7, 10, 14, 17, 20, 21, 26, 27, 32, 33});
  CHECK(documents.area(1) == 2062528);
  const Plan halo = plan(w, 3, Scheme::halo);
  CHECK(halo.rows(2) == 1672);
  CHECK(halo.balance() == doctest::Approx(1.695).epsilon(0.001));
  CHECK(halo.moved(1).forward == 131072);
  const Plan cut = plan(w, 3, Scheme::halo, {}, RowCounts::by_area);
  CHECK(cut.rows(0) == 2944);
  CHECK(cut.rows(2) == 1032);
  CHECK(cut.balance() == doctest::Approx(1.019).epsilon(0.001));
  w.cu_seqlens = {0, 0};  // rows see nothing
  CHECK(plan(w, 3, Scheme::halo, {}, RowCounts::by_area).blocks(1) == halo.blocks(1));
  WholeSequence wide = whole(2000);  // a window that hides nothing
  wide.causal = Causal::top_left;
  wide.window = {2000, 0};
  CHECK(plan(wide, 2, Scheme::gather).dealing() == Dealing::zigzag);
  CHECK(plan(wide, 2, Scheme::halo).dealing() == Dealing::contiguous);
  wide.cu_seqlens = {0, 907};  // rows behind the last document
  wide.window = {43, -1};
  CHECK(plan(wide, 3, Scheme::gather).blocks(1) == Numbers{2, 5, 7, 11, 12});
  WholeSequence near = whole(5000);
  near.window = {300, 20};
  CHECK(plan(near, 4, Scheme::gather).blocks(2) == Numbers{5, 9, 13, 17, 21, 25, 29, 33, 37, 39});
}

TEST_CASE("plan: work is spread evenly") {
  for (const int ranks : {2, 3, 4, 8}) {
    for (const std::int64_t rest : {0, 1, 700, 5000}) {
      WholeSequence w = whole(64 * 128 * ranks + rest);
      w.causal = Causal::top_left;
      const Plan causal = plan(w, ranks, Scheme::gather);
      CHECK(causal.dealing() == Dealing::zigzag);
      CHECK(causal.balance() <= 1.02);
      w.cu_seqlens = {0};
      for (std::int32_t n = 1; w.cu_seqlens.back() < w.length - 5000; ++n) {
        w.cu_seqlens.push_back(w.cu_seqlens.back() + (n * 1237) % 4096);
      }
      const Plan documents = plan(w, ranks, Scheme::gather);
      CHECK(documents.dealing() == Dealing::documents);
      CHECK(documents.balance() <= 1.1);
      CHECK(plan(w, ranks, Scheme::halo).dealing() == Dealing::contiguous);
      const Plan cut = plan(w, ranks, Scheme::halo, {}, RowCounts::by_area);
      CHECK(cut.dealing() == Dealing::contiguous_by_area);
      CHECK(cut.balance() <= 1.1);
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        for (const std::int64_t block : cut.blocks(rank)) CHECK(block == next++);
      }
      CHECK(next == (w.length + 127) / 128);
    }
  }
}

TEST_CASE("plan: explains itself") {
  WholeSequence w = whole(65536);
  w.window = {1024, 0};
  const std::string text = plan(w, 8).explain();
  CHECK(text.starts_with("halo over 8 ranks, 65536 rows dealt contiguous, balance 1.0"));
  CHECK(text.find("192-255") != std::string::npos);
  CHECK(text.find("- halo: the least time of a forward and backward pass by the rates: gather ") !=
        std::string::npos);
  const std::string cut = plan(w, 8, Scheme::automatic, {}, RowCounts::by_area).explain();
  CHECK(cut.starts_with("halo over 8 ranks, 65536 rows dealt contiguous by area, balance 1.0"));
  w.window = {};
  CHECK(plan(w, 1).explain().find("one rank: nothing moves") != std::string::npos);
  CHECK(plan(whole(1), 3).explain().find("none") != std::string::npos);
}

// Not row by row, which takes most of a minute.
TEST_CASE("plan: the longest sequence") {
  WholeSequence w = whole(INT32_MAX);
  w.causal = Causal::top_left;
  const Plan p = plan(w, 2);
  CHECK(p.rows(0) + p.rows(1) == INT32_MAX);
  CHECK(p.area(0) + p.area(1) ==
        doctest::Approx(double(INT32_MAX) * (double(INT32_MAX) + 1) / 2).epsilon(1e-9));
}

TEST_CASE("plan: errors name the member") {
  const auto refused = [](const WholeSequence& w, int ranks, Scheme scheme, Rates rates = {}) {
    try {
      plan(w, ranks, scheme, rates);
    } catch (const Error& error) {
      return error.argument();
    }
    return std::string("accepted");
  };
  const auto with = [&](auto change) {
    WholeSequence w = whole(300);
    change(w);
    return refused(w, 2, Scheme::gather);
  };
  using W = WholeSequence;
  CHECK(with([](W&) {}) == "accepted");
  CHECK(with([](W& w) { w.length = 0; }) == "length");
  CHECK(with([](W& w) { w.length = std::int64_t(1) << 31; }) == "length");
  CHECK(with([](W& w) { w.batch = -1; }) == "batch");
  CHECK(with([](W& w) { w.heads_q = 7; }) == "heads_q");
  CHECK(with([](W& w) { w.heads_kv = -2; }) == "heads_kv");
  CHECK(with([](W& w) { w.head_size = 0; }) == "head_size");
  CHECK(with([](W& w) { w.head_size_v = -1; }) == "head_size_v");
  CHECK(with([](W& w) { w.type = i32; }) == "type");
  CHECK(with([](W& w) { w.window.left = -2; }) == "window.left");
  CHECK(with([](W& w) { w.window.right = -2; }) == "window.right");
  CHECK(with([](W& w) { w.cu_seqlens = {0}; }) == "cu_seqlens");
  CHECK(with([](W& w) { w.cu_seqlens = {1, 20}; }) == "cu_seqlens[0]");
  CHECK(with([](W& w) { w.cu_seqlens = {0, 20, 10}; }) == "cu_seqlens[2]");
  CHECK(with([](W& w) { w.cu_seqlens = {0, 301}; }) == "length");
  CHECK(refused(whole(300), 0, Scheme::gather) == "ranks");
  CHECK(refused(whole(300), 4097, Scheme::gather) == "ranks");
  CHECK(refused(whole(300), 2, Scheme::halo) == "scheme");
  CHECK(refused(whole(300), 2, Scheme::gather, {.flops = 0}) == "rates.flops");
  CHECK(refused(whole(300), 2, Scheme::gather, {.bytes_per_second = NAN}) ==
        "rates.bytes_per_second");
  CHECK_THROWS_WITH_AS(plan(whole(300), 2, Scheme::gather, {.bytes_per_second = INFINITY}),
                       "rates.bytes_per_second = inf: must be finite and above 0", Error);
  for (const int rank : {-1, 2}) {
    CHECK_THROWS_WITH_AS(plan(whole(300), 2).rows(rank),
                         ("rank = " + std::to_string(rank) + ": the plan is for 2 ranks").c_str(),
                         Error);
  }
  // Distances beyond any sequence do not wrap around.
  WholeSequence far = whole(300);
  far.window = {INT64_MAX, INT64_MAX};
  const Plan p = plan(far, 2, Scheme::gather);
  CHECK(p.area(0) + p.area(1) == 300 * 300);
}

TEST_CASE("plan: errors have the number that is no value of an enumeration") {
  const auto refused = [](auto... arguments) {
    try {
      plan(arguments...);
    } catch (const Error& error) {
      CHECK(int(error.code()) == int(Code::invalid_argument));
      return error.argument() + " = " + error.value();
    }
    return std::string("accepted");
  };
  WholeSequence w = whole(300);
  const auto ring = [&](RowCounts counts, distributed::Overlap overlap) {
    return refused(w, 2, Scheme::ring, Rates{}, counts, overlap);
  };
  using distributed::Overlap;
  CHECK(ring(RowCounts::by_area, Overlap::heads) == "accepted");
  CHECK(ring(RowCounts(9), Overlap::none) == "counts = 9");
  CHECK(ring(RowCounts::by_area, Overlap(9)) == "overlap = 9");
  CHECK(refused(w, 2, Scheme(77)) == "scheme = 77");
  w.causal = Causal(9);
  CHECK(refused(w, 2) == "causal = 9");
  w.type = Type(99);
  CHECK(refused(w, 2) == "type = 99");
}

TEST_SUITE_END();
