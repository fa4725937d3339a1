// How many launches a call on a GPU makes. Each costs a small problem 1 to 3 us.
#include <array>
#include <string>

#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

namespace {

Attention hidden(const Shape& shape, bool deterministic = false, double dropout = 0) {
  Attention a = attention(shape);
  a.causal = Causal::bottom_right;
  a.deterministic = deterministic;
  a.dropout.p = dropout;
  return a;
}

Attention with_bias(std::array<std::int64_t, 4> sizes, bool sink = false) {
  Attention a = attention({});
  a.bias = Tensor(nullptr, f32, {sizes[0], sizes[1], sizes[2], sizes[3]});
  if (sink) a.sink = Tensor(nullptr, f32, {8});
  return a;
}

struct LaunchCount {
  const char* name;
  Attention a;
  std::size_t forward[2], backward;  // forward on sm_80, where tiles are smaller, and on sm_90
};

}  // namespace

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("how many launches a call makes, and that it clears nothing before them") {
  const LaunchCount cases[] = {
      {"dense", attention({}), {1, 1}, 3},
      {"causal", hidden({}), {1, 1}, 3},
      {"causal, small", hidden({.batch = 1, .len_q = 128, .len_k = 129}), {1, 1}, 3},
      {"causal, large", hidden({.batch = 16}), {2, 2}, 3},
      {"causal, one row", hidden({.batch = 32, .len_q = 1, .len_k = 512}), {1, 1}, 3},
      {"causal, grouped", hidden({.batch = 32, .heads_kv = 2, .dim = 128}), {2, 2}, 3},
      {"causal, grouped, split", hidden({.heads_kv = 2, .dim = 128}), {2, 1}, 4},
      {"causal, wide", hidden({.dim = 256}), {2, 1}, 3},
      {"causal, deterministic", hidden({}, true), {1, 1}, 3},
      {"causal, dropout", hidden({}, false, 0.1), {1, 1}, 3},
      {"a bias for each head", with_bias({1, 8, 1024, 1024}), {1, 1}, 3},
      {"a bias of keys", with_bias({2, 1, 1, 1024}), {1, 1}, 3},
      {"a bias and a sink", with_bias({1, 1, 1, 1024}, true), {1, 1}, 4},
  };
  for (const LaunchCount& expected : cases) {
    for (const int chip : {0, 1}) {
      const char* const chip_name = chip == 0 ? "sm_80" : "sm_90";
      CAPTURE(std::string(expected.name));
      CAPTURE(chip);
      const CudaPlan forward = planned(problem(expected.a), chip_name);
      const CudaPlan backward = planned(problem(expected.a, Pass::backward), chip_name);
      CHECK(forward.launches.size() == expected.forward[chip]);
      CHECK(backward.launches.size() == expected.backward);
      CHECK(forward.workspace.clear + backward.workspace.clear == 0);
    }
  }
}

TEST_CASE("short sequences: one backward kernel, without a workspace") {
  const auto short_plan = [](const Shape& shape, const char* chip_name, auto... change) {
    Attention a = attention(shape);
    (change(a), ...);
    const Problem p = problem(a, Pass::backward);
    CudaPlan plan = planned(p, chip_name);
    check_sound(p, chip(chip_name), plan);
    return plan;
  };
  const Shape rows64 = {.len_q = 64, .len_k = 60, .dim = 128};
  for (const char* chip_name : {"sm_90", "sm_80", "sm_120"}) {
    const CudaPlan plan = short_plan(rows64, chip_name);
    CHECK(plan.name() == "cuda:mma");
    CHECK(kernels_of(plan) == "backward");
    CHECK(plan.launches[0].config.whole_keys);
    CHECK(plan.workspace.size == 0);
    CHECK(short_plan(rows64, chip_name, [](Attention& a) {
            a.deterministic = true;
          }).workspace.size == 0);
  }
  const auto kernels = [&](Shape shape, auto... change) {
    return kernels_of(short_plan(shape, "sm_80", change...));
  };
  Shape shape = rows64;
  shape.len_k = 128;
  CHECK(kernels(shape) == "backward");
  shape.len_k = 129;
  CHECK(kernels(shape) == "delta backward finish");
  shape.len_k = 0;
  CHECK(kernels(shape) == "delta finish");
  const auto causal = [](Attention& a) { a.causal = Causal::top_left; };
  CHECK(kernels(rows64, causal) == "backward");
  // A block has room for the flags of 512 rows.
  Shape many = {.heads_kv = 1, .len_q = 64, .len_k = 60};
  CHECK(kernels(many, causal) == "backward");
  many.len_q = 65;
  CHECK(kernels(many, causal) != "backward");
  CHECK(kernels(rows64, [](Attention& a) {
          a.bias = Tensor(nullptr, f32, {1, a.q.sizes[1], a.q.sizes[2], a.k.sizes[2]});
        }) == "delta backward finish");
  CHECK(kernels(rows64, [](Attention& a) { a.sink = Tensor(nullptr, f32, {a.q.sizes[1]}); }) ==
        "delta backward finish sink_gradient");
  // Many rows of few heads.
  CHECK(kernels({.batch = 1, .heads_q = 2, .heads_kv = 2, .len_q = 4096, .len_k = 77}) ==
        "backward combine_dkv");
  // Hopper's own kernel has few heads of more rows.
  const auto on_hopper = [&](const Shape& x, auto... change) {
    return short_plan(x, "sm_90", change...).name();
  };
  for (const std::int64_t batch : {1, 40}) {
    const char* const name = batch == 1 ? "cuda:wgmma" : "cuda:mma";
    CHECK(on_hopper({.batch = batch, .len_q = 100, .len_k = 100}, causal) == name);
    CHECK(on_hopper({.batch = batch, .len_q = 113, .len_k = 113, .dim = 96}, causal) == name);
    CHECK(on_hopper({.batch = batch, .len_q = 112, .len_k = 112, .dim = 96}, causal) ==
          "cuda:wgmma");
  }
  CHECK(on_hopper({.batch = 1, .len_q = 100, .len_k = 100}) == "cuda:mma");
  // Tiles of 64 keys are not for sequences that one of 128 holds.
  const Shape narrow = {.batch = 40, .len_q = 100, .len_k = 100, .dim = 80};
  const Shape wide = {.batch = 40, .len_q = 120, .len_k = 120, .dim = 128};
  for (const char* chip_name : {"sm_90", "sm_80"}) {
    CHECK(kernels_of(short_plan(narrow, chip_name)) == "backward");
    CHECK(kernels_of(short_plan(wide, chip_name, causal)) == "backward");
  }
  CHECK(on_hopper({.batch = 1, .len_q = 64, .len_k = 64, .dim = 256}, causal) == "cuda:mma");
  CHECK(on_hopper({.batch = 40, .len_q = 64, .len_k = 65, .dim = 136}) == "cuda:wgmma");
}

TEST_SUITE_END();
