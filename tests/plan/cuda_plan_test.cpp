// Plans for every chip: they fit, they cover everything, and their workspace is enough.
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <tuple>
#include <utility>

#include "cuda/kernels/params.h"
#include "plan/cuda/config_text.hpp"
#include "plan/cuda/possible_calls.hpp"
#include "plan/cuda/representative.hpp"
#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

namespace {

constexpr Type kTypes[] = {f64, f32, f16, bf16};
constexpr Pass kPasses[] = {Pass::forward, Pass::backward};

struct Feature {
  std::string name;
  std::function<void(Attention&, const Shape&)> add;
};

const Feature kFeatures[] = {
    {"plain", [](Attention&, const Shape&) {}},
    {"causal", [](Attention& a, const Shape&) { a.causal = Causal::bottom_right; }},
    {"softcap", [](Attention& a, const Shape&) { a.softcap = 30; }},
    {"bias f32",
     [](Attention& a, const Shape& s) {
       a.bias = Tensor(nullptr, f32, {s.batch, s.heads_q, s.len_q, s.len_k});
     }},
    {"bias bf16",
     [](Attention& a, const Shape& s) {
       a.bias = Tensor(nullptr, bf16, {s.batch, s.heads_q, s.len_q, s.len_k});
     }},
    {"broadcast bias",
     [](Attention& a, const Shape& s) {
       a.bias = Tensor(nullptr, f64, {1, 1, s.len_q, s.len_k});
     }},
    {"dropout, sink",
     [](Attention& a, const Shape& s) {
       a.dropout.p = 0.5;
       a.sink = Tensor(nullptr, f32, {s.heads_q});
     }},
    {"deterministic, bias, softcap",
     [](Attention& a, const Shape& s) {
       a.deterministic = true;
       a.softcap = 30;
       a.bias = Tensor(nullptr, bf16, {1, s.heads_q, s.len_q, s.len_k});
     }},
    {"seqused, mask",
     [](Attention& a, const Shape& s) {
       a.seqused_k = Tensor(nullptr, i32, {s.batch});
       a.mask = Tensor(nullptr, boolean, {s.len_k});
     }},
    {"bias, spans",
     [](Attention& a, const Shape& s) {
       a.bias = Tensor(nullptr, bf16, {s.batch, s.heads_q, s.len_q, s.len_k});
       a.row_spans = Tensor(nullptr, i32, {s.len_q, 2});
     }},
    {"deterministic, mask for each head",
     [](Attention& a, const Shape& s) {
       a.deterministic = true;
       a.mask = Tensor(nullptr, boolean, {s.batch, s.heads_q, s.len_q, s.len_k});
     }},
};

}  // namespace

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("wgmma: four warpgroups of rows where they are short and tiles many") {
  const auto problem_of = [](std::int64_t batch, std::int64_t length, Causal causal) {
    Attention a = attention(
        {.batch = batch, .heads_q = 32, .heads_kv = 32, .len_q = length, .len_k = length});
    a.causal = causal;
    return a;
  };
  const auto rows = [](const Attention& a) {
    return planned(problem(a), "sm_90").launches.front().config.tiling.rows;
  };
  constexpr Causal kFull = Causal::none, kCausal = Causal::bottom_right;
  CHECK(rows(problem_of(32, 512, kFull)) == 256);
  CHECK(rows(problem_of(32, 512, kCausal)) == 256);
  CHECK(rows(problem_of(32, 1024, kCausal)) == 256);
  CHECK(rows(problem_of(32, 1024, kFull)) == 256);
  CHECK(rows(problem_of(32, 4096, kFull)) == 192);
  CHECK(rows(problem_of(32, 2048, kCausal)) == 128);
  CHECK(rows(problem_of(1, 512, kCausal)) == 128);  // fewer tiles than multiprocessors
  CHECK(planned(problem(problem_of(32, 512, kCausal)), "sm_90", "cuda:wgmma@rows=128")
            .launches.front()
            .config.tiling.keys == 128);
  Attention many = problem_of(32, 512, kCausal);
  many.k = many.v = Tensor(nullptr, bf16, {32, 32, 4096, 64});
  CHECK(rows(many) == 128);
  Attention terms = problem_of(32, 512, kCausal);
  terms.softcap = 30;
  CHECK(rows(terms) == 128);
}

TEST_CASE("every chip, type, head size, pass and feature has a sound plan") {
  for (const Chip& chip : known_chips()) {
    for (Type type : kTypes) {
      for (std::int64_t dim : {1, 8, 33, 64, 72, 96, 128, 192, 256, 257, 512}) {
        for (const Feature& feature : kFeatures) {
          for (Pass pass : kPasses) {
            for (std::int64_t rows : {100, 300}) {
              const Shape shape{
                  .type = type, .heads_kv = 2, .len_q = rows, .len_k = rows + 55, .dim = dim};
              Attention a = attention(shape);
              feature.add(a, shape);
              const Problem p = problem(a, pass);
              CAPTURE(chip.name);
              CAPTURE(int(type));
              CAPTURE(dim);
              CAPTURE(rows);
              CAPTURE(feature.name);
              CAPTURE(p.backward);
              check_sound(p, chip, plan_cuda(p, chip, {}, Reasons::left_out));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("odd shapes have sound plans") {
  const Shape shapes[] = {{.len_q = 1, .len_k = 100000},
                          {.batch = 1, .heads_q = 64, .heads_kv = 1, .len_q = 5, .len_k = 9999},
                          {.len_q = 0},
                          {.len_k = 0},
                          {.batch = 0},
                          {.batch = 1, .heads_q = 1, .heads_kv = 1, .len_q = 1, .len_k = 1},
                          {.len_q = 4097, .dim = 192, .dim_v = 128},
                          {.dim = 16, .dim_v = 500},
                          {.dim = 500, .dim_v = 16}};
  for (const char* name : {"sm_61", "sm_75", "sm_80", "sm_89", "sm_90", "sm_120"}) {
    for (Type type : kTypes) {
      for (Shape shape : shapes) {
        shape.type = type;
        for (Pass pass : kPasses) {
          const Problem p = problem(attention(shape), pass);
          CAPTURE(std::string(name));
          CAPTURE(to_string(p));
          check_sound(p, chip(name), planned(p, name));
        }
      }
    }
  }
}

TEST_CASE("packed sequences") {
  const Tensor begins(nullptr, i32, {4});
  Attention a{.q = Tensor(nullptr, bf16, {1000, 8, 64}),
              .k = Tensor(nullptr, bf16, {3000, 2, 64}),
              .v = Tensor(nullptr, bf16, {3000, 2, 64}),
              .cu_seqlens_q = begins,
              .cu_seqlens_k = begins,
              .max_seqlen_q = 500,
              .max_seqlen_k = 2000,
              .causal = Causal::bottom_right};
  for (Pass pass : kPasses) {
    const Problem p = problem(a, pass);
    const CudaPlan plan = planned(p);
    check_sound(p, chip("sm_90"), plan);
    CHECK(plan.launches.front().config.varlen);
  }
  // Tables in the GPU's memory are not read.
  Problem p = problem(a);
  p.sequences.begins_q = p.sequences.begins_k = reinterpret_cast<const int32*>(8);
  CHECK(cuda_explanation(p, chip("sm_90"), planned(p)).find("longest sequences") !=
        std::string::npos);
}

TEST_CASE("a packed batch of no sequences has a plan") {
  const Tensor q(nullptr, bf16, {600, 8, 128}), k(nullptr, bf16, {600, 2, 128});
  const Tensor begins(nullptr, i32, {1});
  const Attention a{.q = q,
                    .k = k,
                    .v = k,
                    .cu_seqlens_q = begins,
                    .cu_seqlens_k = begins,
                    .max_seqlen_q = 512,
                    .max_seqlen_k = 512,
                    .causal = Causal::bottom_right};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    CHECK(planned(problem(a, pass), "sm_90").supported());
  }
}

TEST_CASE("division by a number that is known before") {
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  std::int64_t divisor = 1;
  const auto check = [&](std::int64_t n) {
    if (n < 0 || n > most) return;
    const Divided found = divide(std::int32_t(n), divisor_of(divisor));
    CHECK(found.quotient == n / divisor);
    CHECK(found.rest == n % divisor);
  };
  while (divisor <= most) {
    for (std::int64_t near :
         {std::int64_t(0), divisor, 7 * divisor, most / divisor * divisor, most}) {
      for (int step : {-1, 0, 1}) check(near + step);
    }
    divisor += 1 + divisor / 97;
  }
  divisor = most;
  for (std::int64_t n : {std::int64_t(0), most - 1, most}) check(n);
}

TEST_CASE("blocks cover every tile of every head once, earlier tiles of a head first") {
  for (const BlockGrid& grid :
       {BlockGrid{.heads = 5, .tiles = 7, .splits = 1},
        BlockGrid{.heads = 5, .tiles = 3, .splits = 4, .heads_per_group = 2},
        BlockGrid{.heads = 33, .tiles = 4, .heads_per_group = 16},
        BlockGrid{.heads = 6, .tiles = 5, .splits = 2, .heads_per_group = 4, .batch = 3}}) {
    const GridDivisors by = divisors_of(grid, {});
    std::vector<int> seen(std::size_t(grid.blocks()));
    std::vector<int> last(std::size_t(grid.heads), -1);
    for (std::int64_t block = 0; block < grid.blocks(); ++block) {
      const BlockCoords place = block_coords(grid, block), same = block_coords(grid, by, block);
      CHECK(std::tie(place.head, place.tile, place.split) ==
            std::tie(same.head, same.tile, same.split));
      const int tile = place.split * grid.tiles + place.tile;
      ++seen.at(std::size_t((place.head * grid.splits + place.split) * grid.tiles + place.tile));
      CHECK(tile > last.at(std::size_t(place.head)));
      last[std::size_t(place.head)] = tile;
    }
    for (int count : seen) CHECK(count == 1);
  }
}

// Every choice of gradients needs at most what was asked for before there was one.
void check_named(Problem p) {
  const std::int64_t asked = planned(p).workspace.size;
  p.gradients_named = true;
  p.bias.data = reinterpret_cast<void*>(8);
  for (int named = 0; named < 32; ++named) {
    p.q.data = named & 16 ? reinterpret_cast<void*>(2) : nullptr;  // not aligned
    p.dq = named & 1 ? p.q : View{};
    p.dk = named & 2 ? p.k : View{};
    p.dv = named & 4 ? p.v : View{};
    p.dbias = named & 8 && p.features.bias ? p.bias : View{};
    for (bool accumulate : {false, true}) {
      p.accumulate = accumulate;
      const CudaPlan plan = planned(p);
      check_sound(p, chip("sm_90"), plan);
      CAPTURE(named);
      CHECK(plan.workspace.size <= asked);
    }
  }
}

TEST_CASE("what a call with names needs never exceeds the workspace that was asked for") {
  for (const Feature& feature : kFeatures) {
    for (const auto& [type, dim] : {std::pair(bf16, 64), std::pair(bf16, 128), std::pair(bf16, 192),
                                    std::pair(f32, 64), std::pair(f32, 128)}) {
      for (bool deterministic : {false, true}) {
        for (const auto& [rows, keys] : {std::pair(300, 555), std::pair(16, 131072)}) {
          const Shape shape{.type = type, .heads_kv = 2, .len_q = rows, .len_k = keys, .dim = dim};
          Attention a = attention(shape);
          feature.add(a, shape);
          a.deterministic = deterministic;
          CAPTURE(dim);
          CAPTURE(keys);
          CAPTURE(deterministic);
          check_named(problem(a, Pass::backward));
        }
      }
    }
  }
}

// What a caller is told who asks by shapes alone.
int64 asked_workspace(const Problem& p, const Chip& chip) {
  int64 most = plan_cuda(p, chip, {}, Reasons::left_out).workspace.size;
  for (const Problem& call : possible_calls(p)) {
    most = larger(most, plan_cuda(call, chip, {}, Reasons::left_out).workspace.size);
  }
  return most;
}

// A call that has what the problem has, some gradients, and each address aligned or not.
Problem random_call(const Problem& asked, std::mt19937& random) {
  Problem p = asked;
  const auto address = [&] { return reinterpret_cast<void*>(random() % 2 ? 16 : 2); };
  p.q.data = p.k.data = p.v.data = address();
  if (p.bias.given()) p.bias.data = address();
  if (p.mask.given()) p.mask.data = address();
  p.out = p.q;
  p.out.data = address();
  if (!p.backward) return p;
  p.gradients_named = true;
  p.dout = p.q;
  const std::pair<View*, const View*> gradients[] = {
      {&p.dq, &p.q}, {&p.dk, &p.k}, {&p.dv, &p.v}, {&p.dbias, &p.bias}, {&p.dsink, &p.sink}};
  for (const auto& [gradient, like] : gradients) {
    if (random() % 4 == 0) continue;
    *gradient = *like;
    gradient->data = like->given() ? address() : nullptr;
  }
  return p;
}

TEST_CASE("a workspace that is asked for by shapes has room for any call") {
  constexpr int kProblems = 250, kCalls = 6;
  constexpr std::pair<int, int> kHeads[] = {{1, 1}, {3, 3}, {12, 12}, {8, 2}, {32, 4}, {66, 66}};
  constexpr int kDims[] = {32, 64, 72, 128, 192, 256, 320};
  std::mt19937 random(1);
  const auto length = [&] { return std::int64_t(std::pow(2.0, double(random() % 1400) / 100)); };
  for (int n = 0; n < kProblems; ++n) {
    const auto [heads_q, heads_kv] = kHeads[random() % std::size(kHeads)];
    const std::int64_t len_q = length(), len_k = random() % 2 ? len_q : length();
    const Shape shape{.type = kTypes[random() % std::size(kTypes)],
                      .batch = std::int64_t(1 + random() % 8),
                      .heads_q = heads_q,
                      .heads_kv = heads_kv,
                      .len_q = len_q,
                      .len_k = len_k,
                      .dim = kDims[random() % std::size(kDims)]};
    const Feature& feature = kFeatures[random() % std::size(kFeatures)];
    Attention a = attention(shape);
    feature.add(a, shape);
    CAPTURE(n);
    CAPTURE(feature.name);
    for (const Pass pass : kPasses) {
      const Problem p = problem(a, pass);
      for (const Chip& chip : known_chips()) {
        const int64 asked = asked_workspace(p, chip);
        CAPTURE(chip.name);
        for (int call = 0; call < kCalls; ++call) {
          const CudaPlan plan = plan_cuda(random_call(p, random), chip, {}, Reasons::left_out);
          CHECK(plan.workspace.size <= asked);
        }
      }
    }
  }
}

TEST_CASE("a plan is a pure function") {
  for (Pass pass : kPasses) {
    const Problem p = problem(attention({.type = f32}), pass);
    CHECK(cuda_explanation(p, chip("sm_86"), planned(p, "sm_86")) ==
          cuda_explanation(p, chip("sm_86"), planned(p, "sm_86")));
  }
}

TEST_CASE("planning is cheap, and says nothing where nobody asks") {
  Attention a = attention({.heads_kv = 2, .len_q = 4, .len_k = 100000, .dim = 128});
  a.causal = Causal::bottom_right;
  for (Pass pass : kPasses) {
    const Problem p = problem(a, pass);
    double best = 1;
    for (int attempt = 0; attempt < 20; ++attempt) {
      constexpr int kCalls = 500;
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kCalls; ++i) {
        CHECK_UNARY(plan_cuda(p, chip("sm_90"), {}, Reasons::left_out).reasons.empty());
      }
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
      best = std::min(best, time.count() / kCalls);
    }
    MESSAGE("seconds of a plan: " << best);
    CHECK(best < 50e-6);  // about half a microsecond; sanitizers and busy machines included
  }
}

TEST_CASE("representative kernels: up to 170 for a chip, of every kind") {
  CHECK(representative_problems().size() > 20);
  for (const Chip& chip : known_chips()) {
    const std::vector<KernelConfig> kernels = representative_kernels(chip);
    CHECK(kernels.size() >= 40);
    CHECK(kernels.size() <= 170);
    if (chip.capability() < 80) continue;
    bool seen[kKernelCount] = {};
    for (const KernelConfig& config : kernels) seen[int(config.kernel)] = true;
    for (int kernel = 0; kernel < kKernelCount; ++kernel) {
      CAPTURE(std::string(name_of(Kernel(kernel))));
      const bool of_hopper =
          Kernel(kernel) == Kernel::split_f32 || Kernel(kernel) == Kernel::copy_inputs;
      const bool elsewhere = of_hopper && chip.major != 9;
      CHECK((seen[kernel] || Kernel(kernel) == Kernel::bias_gradient || elsewhere));
    }
  }
}

TEST_CASE("configs as text: distinct, and without what is as by default") {
  CHECK(to_text({}) ==
        "regard::KernelConfig{.kernel = regard::Kernel::forward, .family = regard::Family::simt, "
        ".level = 80}");
  CHECK(to_text({.kernel = Kernel::backward,
                 .family = Family::mma,
                 .level = 75,
                 .type = f16,
                 .products = Products::direct,
                 .features = {.interval = true},
                 .dim = 64,
                 .dim_v = 32,
                 .tiling = {.rows = 32, .stages = 1},
                 .aligned = false,
                 .dbias = {.how = BiasGradient::add}}) ==
        "regard::KernelConfig{.kernel = regard::Kernel::backward, .family = regard::Family::mma, "
        ".level = 75, .type = regard::Type::f16, .features = regard::Features{.interval = true}, "
        ".dim = 64, .dim_v = 32, .tiling = regard::Tiling{.rows = 32, .stages = 1}, "
        ".aligned = false, .dbias = regard::DbiasForm{.how = regard::BiasGradient::add}}");
  const std::vector<KernelConfig> kernels = representative_kernels(chip("sm_80"));
  for (const KernelConfig& a : kernels) {
    for (const KernelConfig& b : kernels) CHECK((to_text(a) == to_text(b)) == (a == b));
  }
}

TEST_SUITE_END();
