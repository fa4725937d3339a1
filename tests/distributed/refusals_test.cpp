// Wrong calls: every rank throws, nothing is written, and nobody waits for ever.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/distributed/rank_case.hpp"
#include "tests/distributed/thread_ranks.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

constexpr int kRanks = 3;

WholeCase problem_of(distributed::Scheme scheme) {
  return {.settings = {.type = f64,
                       .batch = 2,
                       .heads_q = 4,
                       .heads_kv = 2,
                       .len_q = 389,
                       .len_k = 389,
                       .causal = Causal::top_left,
                       .bias = f64,
                       .bias_broadcast = {true, true, false, false},
                       .sink = true,
                       .dlse = true},
          .scheme = scheme};
}

constexpr distributed::Scheme kSchemes[] = {
    distributed::Scheme::gather, distributed::Scheme::ulysses, distributed::Scheme::ring};

// One rank's call, which a test spoils.
struct RankCall {
  RankCall(const Case& whole, const distributed::Plan& its_plan, int rank)
      : plan(its_plan), data(whole, plan, rank), a(data.a) {
    gradients = {
        .dq = data.dq, .dk = data.dk, .dv = data.dv, .dbias = data.dbias, .dsink = data.dsink};
  }
  void run(const distributed::Collectives& ranks, bool backward) const {
    if (backward) {
      const BackwardInputs inputs = {
          .out = data.out, .lse = data.lse, .dout = data.dout, .dlse = data.dlse};
      distributed::backward(a, inputs, gradients, plan, ranks, where);
    } else {
      distributed::forward(a, {.out = data.out, .lse = data.lse}, plan, ranks, where);
    }
  }
  std::string result_bytes() const {
    std::string bytes;
    for (const Array* x : {&data.out, &data.lse, &data.dq, &data.dk, &data.dv, &data.dbias}) {
      bytes += x->bytes();
    }
    return bytes;
  }

  distributed::Plan plan;
  RankCase data;
  Attention a;
  Gradients gradients{};
  Run where{.threads = 1};
};

struct Told {
  std::vector<std::string> errors;
  bool is_untouched = true;
};

// Rank 1 spoils its call.
Told told(const WholeCase& problem, const std::function<void(RankCall&)>& spoil, bool backward) {
  static const Case whole(problem.settings);  // the same for all schemes; ranks have copies
  const distributed::Plan plan = problem.plan(kRanks);
  std::vector<RankCall> calls;
  for (int rank = 0; rank < kRanks; ++rank) calls.emplace_back(whole, plan, rank);
  spoil(calls[1]);
  std::vector<std::string> before;
  for (const RankCall& call : calls) before.push_back(call.result_bytes());
  Mail mail(kRanks);
  Told found;
  found.errors =
      on_ranks(kRanks, [&](int rank) { calls[std::size_t(rank)].run(mail.of(rank), backward); });
  for (std::size_t n = 0; n < calls.size(); ++n) {
    found.is_untouched = found.is_untouched && calls[n].result_bytes() == before[n];
  }
  CHECK(mail.is_empty());
  return found;
}

Told told(distributed::Scheme scheme, const std::function<void(RankCall&)>& spoil, bool backward) {
  return told(problem_of(scheme), spoil, backward);
}

bool begins(const std::string& text, const std::string& with) { return text.starts_with(with); }

struct Spoiled {
  std::string argument;
  std::function<void(RankCall&)> spoil;
  bool backward_only = false;
};

void resize(Tensor& x, int axis, std::int64_t size) { x.sizes[std::size_t(axis)] = size; }

}  // namespace

TEST_SUITE_BEGIN("distributed");

TEST_CASE("refused: one rank's argument is an error of all") {
  static const std::int32_t table[512] = {};
  const Tensor spans{table, i32, {1, 1, 1, 2}};
  const std::vector<Spoiled> all = {
      {"q", [](RankCall& c) { resize(c.a.q, 2, c.a.q.sizes[2] - 1); }},
      {"q", [](RankCall& c) { c.a.q = {}; }},
      {"q", [](RankCall& c) { c.a.q.rank = 3; }},
      {"k", [](RankCall& c) { resize(c.a.k, 1, 4); }},
      {"k", [](RankCall& c) { c.a.k.type = f32; }},
      {"k", [](RankCall& c) { c.a.k.data = nullptr; }},
      {"v", [](RankCall& c) { resize(c.a.v, 3, 7); }},
      {"v", [](RankCall& c) { resize(c.a.v, 0, 1); }},
      {"bias", [](RankCall& c) { resize(c.a.bias, 3, c.a.q.sizes[2]); }},
      {"bias", [](RankCall& c) { resize(c.a.bias, 2, 389); }},
      {"bias", [](RankCall& c) { c.a.bias.rank = 7; }},
      {"mask",
       [](RankCall& c) {
         c.a.mask = Tensor(c.data.q.tensor().data, f64, {1, 1, 1, 389});
       }},
      {"sink", [](RankCall& c) { c.a.sink.sizes[0] = 3; }},
      {"dbias",  // dsink among columns that this rank has no keys for
       [](RankCall& c) {
         c.gradients.dsink.data = static_cast<double*>(c.gradients.dbias.data) + c.a.q.sizes[2];
       },
       true},
      {"row_spans", [&](RankCall& c) { c.a.row_spans = spans; }},
      {"key_spans", [&](RankCall& c) { c.a.key_spans = spans; }},
      {"visible",
       [](RankCall& c) {
         Attention a = c.a;
         a.bias = {};
         a.mask = Tensor(table, boolean, {1, 1, 1, 1});
         c.a.visible = make_mask(a);
       }},
      {"cu_seqlens_q", [&](RankCall& c) { c.a.cu_seqlens_q = Tensor(table, i32, {3}); }},
      {"cu_seqlens_k", [&](RankCall& c) { c.a.cu_seqlens_k = Tensor(table, i32, {3}); }},
      {"seqused_q", [&](RankCall& c) { c.a.seqused_q = Tensor(table, i32, {2}); }},
      {"seqused_k", [&](RankCall& c) { c.a.seqused_k = Tensor(table, i32, {2}); }},
      {"max_seqlen_q", [](RankCall& c) { c.a.max_seqlen_q = 5; }},
      {"max_seqlen_k", [](RankCall& c) { c.a.max_seqlen_k = 5; }},
      {"q_positions", [&](RankCall& c) { c.a.q_positions = Tensor(table, i32, {2}); }},
      {"k_position", [](RankCall& c) { c.a.k_position = 32; }},
      {"causal", [](RankCall& c) { c.a.causal = Causal::top_left; }},
      {"window.left", [](RankCall& c) { c.a.window.left = 3; }},
      {"window.right", [](RankCall& c) { c.a.window.right = 0; }},
      {"dropout.p", [](RankCall& c) { c.a.dropout.p = 2; }},
      {"workspace.size",
       [](RankCall& c) {
         c.where.workspace = {c.a.q.data, 100};
       }},
      {"collectives.memory", [](RankCall& c) { c.where.device = chip("sm_90"); }},
      {"dk", [](RankCall& c) { resize(c.gradients.dk, 2, 5); }, true},
      {"dk", [](RankCall& c) { c.gradients.dv.data = c.gradients.dk.data; }, true},
      {"dq", [](RankCall& c) { c.gradients.dq.data = c.a.k.data; }, true},
      {"dbias", [](RankCall& c) { resize(c.gradients.dbias, 3, 388); }, true},
      {"dbias", [](RankCall& c) { resize(c.gradients.dbias, 3, 1); }, true},
      {"dsink", [](RankCall& c) { c.gradients.dsink.sizes[0] = 1; }, true},
  };
  for (const Spoiled& one : all) {
    for (const bool backward : {false, true}) {
      if (one.backward_only && !backward) continue;
      CAPTURE(one.argument);
      CAPTURE(backward);
      for (const distributed::Scheme scheme : kSchemes) {
        const Told found = told(scheme, one.spoil, backward);
        CAPTURE(found.errors[1]);
        CHECK(begins(found.errors[1], one.argument));
        for (const int other : {0, 2}) {
          CHECK(begins(found.errors[std::size_t(other)],
                       "collectives = rank " + std::to_string(other) +
                           " of 3: rank 1 refused: " + one.argument));
        }
        CHECK(found.is_untouched);
      }
    }
  }
}

// The message has 495 letters.
TEST_CASE("refused: a long value, with the reason for all") {
  const auto spoil = [](RankCall& c) { c.where.backend = std::string(600, 'x'); };
  const Told found = told(kSchemes[0], spoil, false);
  const std::string reason = ": no backend has this name; \"regard info\" lists them";
  CHECK(found.errors[1] == "backend = " + std::string(600, 'x') + reason);
  for (const int other : {0, 2}) {
    CHECK(found.errors[std::size_t(other)].ends_with("xxx..." + reason));
  }
}

TEST_CASE("refused: ranks with different plans or options") {
  const std::vector<std::function<void(RankCall&)>> all = {
      [](RankCall& c) { c.a.softcap = 3; },
      [](RankCall& c) { c.a.scale = 0.3; },
      [](RankCall& c) { c.a.dropout = {.p = 0.5, .seed = 1}; },
      [](RankCall& c) { c.a.sink = {}, c.gradients.dsink = {}; },
      [](RankCall& c) { c.a.bias = {}, c.gradients.dbias = {}; },
      [](RankCall& c) { c.a.batch_begin = 1; },
      [](RankCall& c) {
        auto whole = c.plan.whole();
        whole.window.left = 388;
        whole.causal = Causal::none;
        c.plan = distributed::plan(whole, kRanks, c.plan.scheme());
        const std::int64_t rows = c.plan.rows(1);
        for (Tensor* x : {&c.a.q, &c.a.k, &c.a.v, &c.a.bias}) resize(*x, 2, rows);
      },
  };
  for (const distributed::Scheme scheme : kSchemes) {
    for (const auto& spoil : all) {
      const Told found = told(scheme, spoil, false);
      for (const std::string& error : found.errors) {
        CHECK(error.find("has another plan, or other sizes, types or options") !=
              std::string::npos);
      }
      CHECK(found.is_untouched);
    }
    for (const auto gradient : {&Gradients::dk, &Gradients::dbias}) {
      const Told found = told(
          scheme, [&](RankCall& c) { c.gradients.*gradient = {}; }, true);
      CHECK(begins(found.errors[0], "collectives = rank 0 of 3: rank 1 has another plan"));
      CHECK(found.is_untouched);
    }
  }
}

// A rank whose heads share a gradient of the bias computes them all at once, and would send other
// messages than the rest.
TEST_CASE("refused: heads beside keys that travel, where only some ranks' biases have heads") {
  const auto give_heads = [](RankCall& c) {
    const std::vector<std::int64_t> sizes = {1, 4, c.a.q.sizes[2], 389};
    c.data.bias = Array(f64, sizes);
    c.data.dbias = Array(f64, sizes);
    c.data.bias.fill(0);
    c.data.dbias.fill(0);
    c.a.bias = c.data.bias;
    c.gradients.dbias = c.data.dbias;
  };
  WholeCase problem = problem_of(distributed::Scheme::gather);
  problem.overlap = distributed::Overlap::heads;
  const Told found = told(problem, give_heads, true);
  for (const std::string& error : found.errors) {
    CHECK(error.find("has another plan, or other sizes, types or options") != std::string::npos);
  }
  CHECK(found.is_untouched);
  problem.overlap = distributed::Overlap::none;
  for (const std::string& error : told(problem, give_heads, true).errors) CHECK(error == "");
}

// Where a rank alone has them, messages would not fit.
TEST_CASE("refused: by Ulysses, tensors that not all ranks give") {
  const std::vector<std::function<void(RankCall&)>> all = {
      [](RankCall& c) { c.data.dlse = {}; },
      [](RankCall& c) { c.gradients.dq = {}; },
      [](RankCall& c) { c.gradients.dbias = {}; },
  };
  for (const auto& spoil : all) {
    const Told found = told(distributed::Scheme::ulysses, spoil, true);
    for (const std::string& error : found.errors) {
      CHECK(error.find("has another plan, or other sizes, types or options") != std::string::npos);
    }
    CHECK(found.is_untouched);
  }
}

TEST_CASE("refused: a table that is not whole") {
  const WholeCase problem = problem_of(distributed::Scheme::gather);
  const Case whole(problem.settings);
  const distributed::Plan plan = problem.plan(kRanks);
  const RankCall call(whole, plan, 0);
  Mail mail(kRanks);
  const auto refused = [&](auto change) {
    distributed::Collectives ranks = mail.of(0);
    change(ranks);
    try {
      call.run(ranks, true);
    } catch (const Error& error) {
      return error.argument();
    }
    return std::string("accepted");
  };
  using Table = distributed::Collectives;
  CHECK(refused([](Table& t) { t.size = 2; }) == "collectives.size");
  CHECK(refused([](Table& t) { t.rank = 3; }) == "collectives.rank");
  CHECK(refused([](Table& t) { t.rank = -1; }) == "collectives.rank");
  CHECK(refused([](Table& t) { t.exchange = nullptr; }) == "collectives.exchange");
  using Kind = Device::Kind;
  for (const auto& [kind, name] :
       {std::pair{Kind::cuda, "cuda"}, {Kind::chip, "chip"}, {Kind(7), "7"}}) {
    Table ranks = mail.of(0);
    ranks.memory = kind;
    CHECK_THROWS_WITH_AS(call.run(ranks, true),
                         (std::string("collectives.memory = ") + name +
                          ": must be that of the call's device: exchange would move its tensors")
                             .c_str(),
                         Error);
  }
}

// Wherever a rank's exchange fails: its error has the function's own text, and the others get what
// their transport says.
TEST_CASE("refused: an exchange that fails") {
  const std::pair<distributed::Scheme, int> exchanges[] = {
      {kSchemes[0], 1}, {kSchemes[0], 2}, {kSchemes[0], 3},  // words, keys, sums
      {kSchemes[1], 2}, {kSchemes[1], 3},                    // heads, rows
      {kSchemes[2], 2}, {kSchemes[2], 3}, {kSchemes[2], 5},  // keys, sums, the last sums
  };
  for (const auto& [scheme, call] : exchanges) {
    const WholeCase problem = problem_of(scheme);
    const Case whole(problem.settings);
    const distributed::Plan plan = problem.plan(kRanks);
    Mail mail(kRanks);
    mail.break_at(1, call);
    std::vector<RankCall> calls;
    for (int rank = 0; rank < kRanks; ++rank) calls.emplace_back(whole, plan, rank);
    const auto errors = on_ranks(kRanks, [&](int rank) {
      try {
        calls[std::size_t(rank)].run(mail.of(rank), true);
      } catch (const Error& error) {
        CHECK(int(error.code()) == int(Code::device_failure));
        throw;
      }
    });
    CHECK(errors[1] == "collectives.exchange = rank 1 of 3: the wire is cut");
    CHECK(errors[0] == "collectives.exchange = rank 0 of 3: nothing came");
  }
}

TEST_CASE("refused: an argument where the exchange fails as well") {
  const Case whole(problem_of(kSchemes[0]).settings);
  const distributed::Plan plan = problem_of(kSchemes[0]).plan(kRanks);
  RankCall call(whole, plan, 1);
  call.a.softcap = -1;
  for (const bool throws : {false, true}) {
    Mail mail(kRanks);
    mail.break_at(1, 1);
    distributed::Collectives ranks = mail.of(1);
    if (throws) {
      ranks.exchange = [](void*, const distributed::Send*, std::size_t, const distributed::Receive*,
                          std::size_t,
                          void*) -> const char* { throw std::runtime_error("the wire is cut"); };
    }
    CHECK_THROWS_WITH_AS(call.run(ranks, false),
                         "softcap = -1: must be finite and not negative (0 = off)", Error);
  }
}

TEST_CASE("refused: NCCL that is not here") {
  CHECK_THROWS_WITH_AS(distributed::nccl_collectives(nullptr),
                       "communicator = null: must be an ncclComm_t", Error);
  if (dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)) return;
  int communicator = 0;
  try {
    distributed::nccl_collectives(&communicator);
    FAIL_CHECK("was accepted");
  } catch (const Error& error) {
    CHECK(int(error.code()) == int(Code::unavailable));
    CHECK(std::string(error.what()).find("libnccl.so.2 was not found; `pip install") !=
          std::string::npos);
  }
}

// What the caller's allocator was asked for.
struct Asked {
  std::vector<std::size_t> sizes{};
  std::vector<std::byte> memory{};
  static void* allocate(void* self, std::size_t bytes) {
    auto& asked = *static_cast<Asked*>(self);
    asked.sizes.push_back(bytes);
    asked.memory.resize(bytes);
    return asked.memory.data();
  }
};

void check_workspace(const WholeCase& problem) {
  const Case whole(problem.settings);
  const distributed::Plan plan = problem.plan(kRanks);
  for (const bool backward : {false, true}) {
    Mail mail(kRanks), too_small(kRanks);
    std::vector<RankCall> calls, alone;
    std::vector<std::unique_ptr<Guarded>> memory;
    for (int rank = 0; rank < kRanks; ++rank) {
      alone.emplace_back(whole, plan, rank);
      RankCall& call = calls.emplace_back(whole, plan, rank);
      const BackwardInputs inputs = {.out = call.data.out,
                                     .lse = call.data.lse,
                                     .dout = call.data.dout,
                                     .dlse = call.data.dlse};
      const std::size_t bytes =
          backward ? distributed::workspace(call.a, inputs, call.gradients, plan, rank, call.where)
                   : distributed::workspace(call.a, {.out = call.data.out, .lse = call.data.lse},
                                            plan, rank, call.where);
      memory.push_back(std::make_unique<Guarded>(bytes));
      call.where.workspace = {memory.back()->data(), bytes};
    }
    for (const auto& error : on_ranks(
             kRanks, [&](int rank) { calls[std::size_t(rank)].run(mail.of(rank), backward); })) {
      CHECK(error == "");
    }
    Mail other(kRanks);
    std::vector<Asked> asked(kRanks);
    for (std::size_t n = 0; n < alone.size(); ++n) {
      alone[n].where.allocator = {.allocate = Asked::allocate, .self = &asked[n]};
    }
    on_ranks(kRanks, [&](int rank) { alone[std::size_t(rank)].run(other.of(rank), backward); });
    for (std::size_t n = 0; n < calls.size(); ++n) {
      CHECK(asked[n].sizes == std::vector{calls[n].where.workspace.size});
      CHECK(memory[n]->lead_intact());
      CHECK(calls[n].result_bytes() == alone[n].result_bytes());
      --calls[n].where.workspace.size;
    }
    for (const auto& error : on_ranks(kRanks, [&](int rank) {
           calls[std::size_t(rank)].run(too_small.of(rank), backward);
         })) {
      CHECK(error.find("workspace.size") != std::string::npos);
    }
  }
}

TEST_CASE("workspace: as much as is asked for, at any address, or from the caller's allocator") {
  for (const distributed::Scheme scheme : kSchemes) check_workspace(problem_of(scheme));
}

TEST_SUITE_END();
