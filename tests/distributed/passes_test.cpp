// Both passes over several ranks against one call over the whole sequence. Four blocks of rows
// leave a rank of five without any.
#include <doctest/doctest.h>

#include <algorithm>
#include <tuple>

#include "tests/distributed/rank_case.hpp"
#include "tests/distributed/thread_ranks.hpp"

using namespace regard;
using namespace regard::tests;
using distributed::Scheme;

namespace {

constexpr std::int64_t kLength = 389;
const std::vector<std::int32_t> kDocuments = {0, 1, 90, 130, 130, 260, 380};

Settings settings(Settings s = {}) {
  s.type = s.type == f32 ? f64 : s.type;
  s.batch = 2;
  s.heads_q = 4;
  s.heads_kv = 2;
  s.len_q = s.len_k = kLength;
  s.dim = 8;
  s.dim_v = 6;
  s.dlse = true;
  return s;
}

// The results of all ranks, put together. Exactly as many bytes come as the plan says.
Case by_ranks(const WholeCase& problem, int size) {
  Case found(problem.settings);
  const distributed::Plan plan = problem.plan(size);
  Mail mail(size);
  std::vector<RankCase> parts;
  for (int rank = 0; rank < size; ++rank) parts.emplace_back(found, plan, rank);
  std::vector<std::int64_t> forward_bytes(std::size_t(size), 0);
  const auto errors = on_ranks(size, [&](int rank) {
    const RankCase& part = parts[std::size_t(rank)];
    part.forward(plan, mail.of(rank), {.threads = 1});
    forward_bytes[std::size_t(rank)] = mail.received(rank);
    part.backward(plan, mail.of(rank), {.threads = 1});
  });
  for (const std::string& error : errors) REQUIRE(error == "");
  CHECK(mail.is_empty());
  for (int rank = 0; rank < size; ++rank) {
    const RankCase& part = parts[std::size_t(rank)];
    CHECK(part.gaps_intact());
    put(found, part, plan, rank);
    const distributed::Moved moved = plan.moved(rank);
    const std::int64_t forward = forward_bytes[std::size_t(rank)];
    const std::int64_t sinks =
        problem.settings.sink ? (size - 1) * problem.settings.heads_q * 4 : 0;
    CHECK(forward == moved.forward);
    CHECK(mail.received(rank) - forward == moved.backward + sinks);
    if (problem.settings.sink) CHECK(part.dsink.bytes() == parts[0].dsink.bytes());
  }
  return found;
}

// By one call in float64.
Case by_one_call(const WholeCase& problem) {
  Case want(problem.settings, Case::Values::exact);
  Array spans;
  const Attention a = problem.attention(want, spans);
  regard::forward(a, want.outputs(), {.threads = 1});
  regard::backward(a, want.inputs(), want.gradients(), {.threads = 1});
  return want;
}

void check_case(const WholeCase& problem, double most = 1e-12,
                const std::vector<int>& worlds = {2, 5}) {
  const Case want = by_one_call(problem);
  CAPTURE(to_string(problem.settings));
  for (const int size : worlds) {
    CAPTURE(size);
    const Case found = by_ranks(problem, size);
    for (std::size_t n = 0; n < want.results().size(); ++n) {
      const Array& result = *want.results()[n];
      if (!result.given()) continue;
      CAPTURE(kResultNames[n]);
      // dsink is f32, and of narrow types the lse.
      const double allowed = result.tensor().type == f32 ? std::max(most, 1e-6) : most;
      CHECK(row_error(*found.results()[n], result) <= allowed);
    }
  }
}

void check_masks(const Settings& given, double most = 1e-12) {
  Settings s = settings(given);
  s.heads_q = 2;
  s.heads_kv = 1;
  check_case({.settings = s}, most);
  s.causal = Causal::bottom_right;
  check_case({.settings = s}, most);
  s.window = {150, -1};
  check_case({.settings = s, .scheme = Scheme::halo}, most);
  s.causal = Causal::none;
  s.window = {30, 140};
  check_case({.settings = s, .cu_seqlens = kDocuments}, most);
}

}  // namespace

TEST_SUITE_BEGIN("distributed");

TEST_CASE("ranks: every mask by every scheme") {
  for (const bool causal : {false, true}) {
    for (const Window window : {Window{}, Window{200, -1}, Window{30, 150}, Window{0, 0}}) {
      for (const bool documents : {false, true}) {
        for (const Scheme scheme : {Scheme::automatic, Scheme::gather, Scheme::halo}) {
          Settings s = settings();
          s.causal = causal ? Causal::top_left : Causal::none;
          s.window = window;
          const bool is_near = documents || window.left >= 0;
          if (scheme == Scheme::halo && !is_near) continue;
          check_case({.settings = s,
                      .cu_seqlens = documents ? kDocuments : std::vector<std::int32_t>{},
                      .scheme = scheme},
                     1e-12, {1, 2, 3, 5});
        }
      }
    }
  }
}

TEST_CASE("ranks: terms of the scores") {
  check_masks({.bias = f64});
  check_masks({.bias = f64, .bias_broadcast = {false, true, false, true}});
  check_masks({.mask = true, .mask_broadcast = {false, true, true, false}});  // padding
  check_masks({.mask = true, .mask_broadcast = {true, false, false, false}});
  check_masks({.softcap = 0.5, .scale = -0.7, .alibi = true});
  check_masks({.sink = true});
  check_masks({.sink = true, .dropout = 0.3, .gaps = true});
}

// Each rank's gradient is that of its rows; the whole one is their sum.
TEST_CASE("ranks: a bias that all rows share") {
  check_masks({.bias = f64, .bias_broadcast = {true, false, true, false}});
  check_masks({.bias = f64, .bias_broadcast = {true, true, true, true}});
}

TEST_CASE("ranks: everything at once, and accumulated") {
  check_masks({.softcap = 2,
               .scale = 0.5,
               .bias = f64,
               .mask = true,
               .alibi = true,
               .sink = true,
               .dropout = 0.2,
               .accumulate = true,
               .gaps = true});
}

TEST_CASE("ranks: other types") {
  check_masks({.type = bf16, .sink = true, .wide_results = true}, 3e-2);
  check_masks({.type = f16, .bias = f32, .accumulate = true}, 4e-3);
  Settings s = settings({.sink = true, .dropout = 0.1});
  s.type = f32;
  s.causal = Causal::top_left;
  check_case({.settings = s}, 4e-6);
}

TEST_CASE("ranks: any length and any heads") {
  for (const std::int64_t length : {1, 127, 130, 300, 900}) {
    for (const auto& [heads_q, heads_kv] : {std::pair{5, 5}, {8, 1}, {2, 1}}) {
      Settings s = settings({.sink = true});
      s.len_q = s.len_k = length;
      s.heads_q = heads_q;
      s.heads_kv = heads_kv;
      s.causal = Causal::top_left;
      if (length > 1) check_case({.settings = s});
      s.window = {40, 3};
      s.causal = Causal::none;
      if (length > 1) check_case({.settings = s});
    }
  }
}

TEST_CASE("ranks: no batch entry") {
  Settings s = settings();
  s.batch = 0;
  s.dlse = false;
  check_case({.settings = s});
}

// The error does not grow with the ranks, because parts are summed in f32.
TEST_CASE("ranks: bf16 is as exact as in one process") {
  Settings s = settings({.type = bf16});
  s.causal = Causal::top_left;
  s.len_q = s.len_k = 700;
  const WholeCase problem{.settings = s};
  const Case want(s, Case::Values::exact), alone(s);
  want.both({.threads = 1});
  alone.both({.threads = 1});
  const Case found = by_ranks(problem, 4);
  for (const auto& [got, one, exact] :
       {std::tuple{&found.dk, &alone.dk, &want.dk}, {&found.dv, &alone.dv, &want.dv}}) {
    CHECK(row_error(*got, *exact) <= 1.5 * row_error(*one, *exact));
  }
}

TEST_CASE("ranks: results repeat to the bit, on any number of threads") {
  Settings s = settings({.sink = true});
  s.type = f32;
  s.causal = Causal::top_left;
  const WholeCase problem{.settings = s};
  const Case inputs(s);
  const distributed::Plan plan = problem.plan(3);
  std::vector<std::string> bits(3);
  for (std::size_t n = 0; n < bits.size(); ++n) {
    Mail mail(3);
    std::vector<RankCase> parts;
    for (int rank = 0; rank < 3; ++rank) parts.emplace_back(inputs, plan, rank);
    on_ranks(3, [&](int rank) {
      parts[std::size_t(rank)].forward(plan, mail.of(rank), {.threads = int(n) + 1});
      parts[std::size_t(rank)].backward(plan, mail.of(rank), {.threads = int(n) + 1});
    });
    for (const RankCase& part : parts) {
      for (const Array* x : {&part.out, &part.lse, &part.dq, &part.dk, &part.dv, &part.dsink}) {
        bits[n] += x->bytes();
      }
    }
  }
  CHECK(bits[1] == bits[0]);
  CHECK(bits[2] == bits[0]);
}

TEST_SUITE_END();
