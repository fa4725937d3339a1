// Both passes over several ranks against one call over the whole sequence. Four blocks of rows
// leave a rank of five without any.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "tests/distributed/rank_case.hpp"
#include "tests/distributed/thread_ranks.hpp"

using namespace regard;
using namespace regard::tests;
using distributed::Overlap;
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
  for (int rank = 0; rank < size; ++rank) parts.emplace_back(problem, found, plan, rank);
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
    const distributed::Moved more = uncounted_bytes(problem, plan, rank);
    const std::int64_t words = (size - 1) * 512;  // by which ranks agree
    CHECK(forward == moved.forward + more.forward + words);
    CHECK(mail.received(rank) - forward == moved.backward + more.backward + words);
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

using Schemes = std::vector<Scheme>;
const Schemes kSchemes = {Scheme::gather, Scheme::ulysses, Scheme::ring};  // for every mask

void check_case(WholeCase problem, const Schemes& schemes, double most = 1e-12,
                const std::vector<int>& worlds = {2, 5}) {
  const Case want = by_one_call(problem);
  CAPTURE(to_string(problem.settings));
  for (const Scheme scheme : schemes) {
    CAPTURE(int(scheme));
    problem.scheme = scheme;
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
}

void check_masks(const Settings& given, double most = 1e-12) {
  Settings s = settings(given);
  s.heads_q = 2;
  s.heads_kv = 1;
  check_case({.settings = s}, kSchemes, most);
  s.causal = Causal::bottom_right;
  check_case({.settings = s}, {Scheme::gather, Scheme::ring}, most);
  s.window = {150, -1};
  check_case({.settings = s}, {Scheme::halo}, most);
  s.causal = Causal::none;
  s.window = {30, 140};
  check_case({.settings = s, .cu_seqlens = kDocuments}, {Scheme::gather, Scheme::ring}, most);
  // Two ranks have three heads each, of which two read the same keys; five have one or two.
  s.heads_q = 6;
  s.heads_kv = 3;
  s.len_q = s.len_k = 261;
  check_case({.settings = s, .cu_seqlens = {0, 100, 250}}, {Scheme::ulysses}, most);
}

}  // namespace

TEST_SUITE_BEGIN("distributed");

TEST_CASE("ranks: every mask by every scheme") {
  for (const bool causal : {false, true}) {
    for (const Window window : {Window{}, Window{200, -1}, Window{30, 150}, Window{0, 0}}) {
      for (const bool documents : {false, true}) {
        Settings s = settings();
        s.causal = causal ? Causal::top_left : Causal::none;
        s.window = window;
        Schemes schemes = kSchemes;
        schemes.push_back(Scheme::automatic);
        if (documents || window.left >= 0) schemes.push_back(Scheme::halo);
        const auto cuts = documents ? kDocuments : std::vector<std::int32_t>{};
        check_case({.settings = s, .cu_seqlens = cuts}, schemes, 1e-12, {1, 2, 3, 5});
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
  check_case({.settings = s}, kSchemes, 4e-6);
}

// Two groups of heads forward, three backward, or one where heads share a gradient of the bias.
TEST_CASE("ranks: some heads while keys of others move") {
  const auto check_terms = [](const Settings& given) {
    WholeCase problem{.settings = settings(given), .overlap = Overlap::heads};
    problem.settings.heads_q = 6;
    problem.settings.heads_kv = 3;
    problem.settings.causal = Causal::top_left;
    check_case(problem, {Scheme::gather}, 1e-12, {2, 5});
    problem.settings.window = {150, -1};
    check_case(problem, {Scheme::halo}, 1e-12, {3});
    problem.cu_seqlens = {0, 100, 250};
    check_case(problem, {Scheme::gather}, 1e-12, {3});
  };
  check_terms({.bias = f64, .sink = true, .dropout = 0.3});
  check_terms({.bias = f64, .bias_broadcast = {true, true, false, false}, .accumulate = true});
  check_terms({.softcap = 2,
               .scale = 0.5,
               .bias = f64,
               .mask = true,
               .alibi = true,
               .sink = true,
               .dropout = 0.2,
               .accumulate = true,
               .gaps = true});
}

// Dropout counts heads and batch entries from there.
TEST_CASE("ranks: some heads and entries of a larger problem") {
  Settings s = settings({.dropout = 0.5});
  s.causal = Causal::top_left;
  check_case({.settings = s, .batch_begin = 3, .head_begin = 5}, kSchemes);
}

TEST_CASE("ranks: any length and any heads") {
  for (const std::int64_t length : {1, 127, 130, 300, 900}) {
    for (const auto& [heads_q, heads_kv] : {std::pair{5, 5}, {8, 1}, {2, 1}, {12, 3}}) {
      Settings s = settings({.sink = true});
      s.len_q = s.len_k = length;
      s.heads_q = heads_q;
      s.heads_kv = heads_kv;
      s.causal = Causal::top_left;
      if (length == 1) continue;
      check_case({.settings = s}, kSchemes);
      s.window = {40, 3};
      s.causal = Causal::none;
      check_case({.settings = s}, kSchemes);
    }
  }
}

// Rank 1 of 4 has 9 query heads, of which 3, 4 and 2 read the same keys.
TEST_CASE("ranks: heads of keys that are read unequally often") {
  Settings s = settings({.sink = true, .dropout = 0.2});
  s.heads_q = 36;
  s.heads_kv = 9;
  s.len_q = s.len_k = 130;
  check_case({.settings = s}, {Scheme::ulysses}, 1e-12, {4});
}

TEST_CASE("ranks: no batch entry") {
  Settings s = settings();
  s.batch = 0;
  s.dlse = false;
  check_case({.settings = s}, kSchemes);
}

// The error does not grow with the ranks, because parts are summed in f32.
TEST_CASE("ranks: bf16 is as exact as in one process") {
  Settings s = settings({.type = bf16});
  s.causal = Causal::top_left;
  s.len_q = s.len_k = 700;
  const Case want(s, Case::Values::exact), alone(s);
  want.both({.threads = 1});
  alone.both({.threads = 1});
  for (const Scheme scheme : kSchemes) {
    const Case found = by_ranks({.settings = s, .scheme = scheme}, 4);
    for (const auto& [got, one, exact] :
         {std::tuple{&found.dk, &alone.dk, &want.dk}, {&found.dv, &alone.dv, &want.dv}}) {
      CHECK(row_error(*got, *exact) <= 1.5 * row_error(*one, *exact));
    }
  }
}

// The bits of all results of three ranks.
std::string bits_of(const WholeCase& problem, const Case& inputs, int threads) {
  const distributed::Plan plan = problem.plan(3);
  Mail mail(3);
  std::vector<RankCase> parts;
  for (int rank = 0; rank < 3; ++rank) parts.emplace_back(inputs, plan, rank);
  on_ranks(3, [&](int rank) {
    parts[std::size_t(rank)].forward(plan, mail.of(rank), {.threads = threads});
    parts[std::size_t(rank)].backward(plan, mail.of(rank), {.threads = threads});
  });
  std::string bits;
  for (const RankCase& part : parts) {
    for (const Array* x : {&part.out, &part.lse, &part.dq, &part.dk, &part.dv, &part.dsink}) {
      bits += x->bytes();
    }
  }
  return bits;
}

TEST_CASE("ranks: results repeat to the bit, on any number of threads") {
  Settings s = settings({.sink = true});
  s.type = f32;
  s.causal = Causal::top_left;
  const Case inputs(s);
  for (const Scheme scheme : kSchemes) {
    const WholeCase problem{.settings = s, .scheme = scheme};
    const std::string once = bits_of(problem, inputs, 1);
    CHECK(bits_of(problem, inputs, 2) == once);
    CHECK(bits_of(problem, inputs, 3) == once);
    if (scheme != Scheme::gather) continue;
    CHECK(bits_of({.settings = s, .overlap = Overlap::heads}, inputs, 2) == once);
  }
}

std::vector<double> values_of(const Array& x) {
  std::vector<double> values;
  for (std::int64_t n = 0; n < x.count(); ++n) values.push_back(x.get(n));
  return values;
}

// Over the same keys twice: the same out, and twice the sum of exponents.
TEST_CASE("ranks: a result that is continued") {
  const Settings s = settings();
  for (const Scheme scheme : kSchemes) {
    const WholeCase problem{.settings = s, .scheme = scheme};
    const distributed::Plan plan = problem.plan(3);
    const Case whole(s);
    Mail mail(3);
    std::vector<RankCase> parts;
    for (int rank = 0; rank < 3; ++rank) parts.emplace_back(whole, plan, rank);
    const auto pass = [&](int rank) {
      parts[std::size_t(rank)].forward(plan, mail.of(rank), {.threads = 1});
    };
    on_ranks(3, pass);
    std::vector<std::vector<double>> outs, lses;
    for (RankCase& part : parts) {
      outs.push_back(values_of(part.out));
      lses.push_back(values_of(part.lse));
      part.a.continue_from = true;
    }
    for (const std::string& error : on_ranks(3, pass)) REQUIRE(error == "");
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      for (std::size_t n = 0; n < outs[rank].size(); ++n) {
        CHECK(parts[rank].out.get(std::int64_t(n)) == doctest::Approx(outs[rank][n]));
      }
      for (std::size_t n = 0; n < lses[rank].size(); ++n) {
        CHECK(parts[rank].lse.get(std::int64_t(n)) == doctest::Approx(lses[rank][n] + std::log(2)));
      }
    }
  }
}

// A tensor over all keys whose columns are every second element of its memory.
struct Spread {
  explicit Spread(const Array& x) : memory(x.tensor().type, sizes_of(x)), tensor(memory) {
    memory.fill(0);
    tensor.sizes[3] /= 2;
    tensor.strides[3] = 2;
    for (std::int64_t n = 0; n < x.count(); ++n) memory.set(2 * n, x.get(n));
  }
  static std::vector<std::int64_t> sizes_of(const Array& x) {
    const auto& sizes = x.tensor().sizes;
    return {sizes[0], sizes[1], sizes[2], 2 * sizes[3]};
  }
  Array memory;
  Tensor tensor;
};

TEST_CASE("ranks: columns of bias and mask that lie apart") {
  const Settings s = settings({.bias = f64, .mask = true, .accumulate = true});
  for (const Scheme scheme : kSchemes) {
    const WholeCase problem{.settings = s, .scheme = scheme};
    const distributed::Plan plan = problem.plan(2);
    const Case found(s), want = by_one_call(problem);
    Mail mail(2);
    std::vector<RankCase> parts;
    for (int rank = 0; rank < 2; ++rank) parts.emplace_back(found, plan, rank);
    const auto errors = on_ranks(2, [&](int rank) {
      RankCase& part = parts[std::size_t(rank)];
      const Spread bias(part.bias), mask(part.mask), dbias(part.dbias);
      part.a.bias = bias.tensor;
      part.a.mask = mask.tensor;
      part.forward(plan, mail.of(rank), {.threads = 1});
      distributed::backward(
          part.a, {.out = part.out, .lse = part.lse, .dout = part.dout, .dlse = part.dlse},
          {.dq = part.dq, .dbias = dbias.tensor, .accumulate = true}, plan, mail.of(rank),
          {.threads = 1});
      for (std::int64_t n = 0; n < part.dbias.count(); ++n) {
        part.dbias.set(n, dbias.memory.get(2 * n));
        CHECK(dbias.memory.get(2 * n + 1) == 0);
      }
    });
    for (const std::string& error : errors) REQUIRE(error == "");
    Case together(s);
    for (int rank = 0; rank < 2; ++rank) put(together, parts[std::size_t(rank)], plan, rank);
    CHECK(row_error(together.out, want.out) < 1e-12);
    CHECK(row_error(together.dq, want.dq) < 1e-12);
    CHECK(row_error(together.dbias, want.dbias) < 1e-12);
  }
}

TEST_SUITE_END();
