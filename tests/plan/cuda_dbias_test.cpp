// How Hopper's backward kernel makes the gradient of a bias.
#include <array>

#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

namespace {

struct Asked {
  std::array<std::int64_t, 4> sizes;  // of the bias
  std::int64_t batch = 4;
  Type type = bf16;
  bool causal = false;
  bool deterministic = false;
};

Problem biased(const Asked& x) {
  Attention a = attention({.batch = x.batch, .len_k = x.sizes[3]});
  a.bias = Tensor(nullptr, x.type, {x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3]});
  a.causal = x.causal ? Causal::top_left : Causal::none;
  a.deterministic = x.deterministic;
  return problem(a, Pass::backward);
}

const KernelConfig& config(const CudaPlan& plan) {
  CHECK(plan.name() == "cuda:wgmma");
  const CudaLaunch* const launch = launch_of(plan, Kernel::backward);
  REQUIRE(launch);
  return launch->config;
}

}  // namespace

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("wgmma: blocks of a cluster share the bias, one for each batch entry") {
  for (const std::int64_t batch : {2, 3, 4, 8}) {
    for (const bool causal : {false, true}) {
      const CudaPlan plan =
          planned(biased({.sizes = {1, 8, 1024, 1024}, .batch = batch, .causal = causal}));
      CHECK(config(plan).cluster == batch);
      CHECK(config(plan).dbias.how == BiasGradient::store);
      CHECK(config(plan).dbias.aligned);
      CHECK(!converts_dbias(plan));
      CHECK(says(plan, "dbias: clusters of blocks sum over the batch"));
      const BlockGrid& grid = launch_of(plan, Kernel::backward)->grid;
      CHECK(grid.batch == batch);
      // Consecutive blocks are the batch entries of one tile of one head.
      for (std::int64_t n = 0; n < grid.blocks(); n += batch) {
        const BlockCoords first = block_coords(grid, n);
        for (std::int64_t b = 0; b < batch; ++b) {
          const BlockCoords place = block_coords(grid, n + b);
          REQUIRE(place.tile == first.tile);
          REQUIRE(place.head == b * grid.heads / batch + first.head);
        }
      }
    }
  }
}

TEST_CASE("wgmma: what a cluster cannot sum is added to f32 sums") {
  const auto check = [](const Asked& asked, BiasGradient how, int cluster) {
    const CudaPlan plan = planned(biased(asked));
    CHECK(config(plan).dbias.how == how);
    CHECK(config(plan).cluster == cluster);
    CHECK(converts_dbias(plan) == (how != BiasGradient::store));
  };
  check({.sizes = {4, 8, 1024, 1024}}, BiasGradient::store, 1);
  check({.sizes = {4, 8, 1024, 1024}, .causal = true}, BiasGradient::store, 1);
  check({.sizes = {4, 1, 1024, 1024}}, BiasGradient::add, 1);
  check({.sizes = {1, 1, 1024, 1024}}, BiasGradient::add, 4);
  check({.sizes = {1, 8, 1024, 1024}, .batch = 16}, BiasGradient::add, 8);
  check({.sizes = {1, 8, 1024, 1024}, .batch = 9}, BiasGradient::add, 3);
  check({.sizes = {1, 8, 1024, 1024}, .batch = 11}, BiasGradient::add, 1);
  check({.sizes = {4, 1, 1, 1024}}, BiasGradient::add_to_row, 1);
  check({.sizes = {1, 8, 1024, 1024}, .batch = 1}, BiasGradient::store, 1);
  // Four elements of a row of the sums are one access.
  CHECK(planned(biased({.sizes = {1, 1, 1024, 1032}})).dbias_strides.row == 1032);
}

TEST_CASE("wgmma: deterministic, only what is written once is made together with dq") {
  const CudaPlan once = planned(biased({.sizes = {1, 8, 1024, 1024}, .deterministic = true}));
  CHECK(config(once).dbias.how == BiasGradient::store);
  CHECK(config(once).ordered_dq);
  CHECK(launch_of(once, Kernel::backward)->grid.heads_per_group % 4 == 0);
  const CudaPlan pass = planned(biased({.sizes = {1, 1, 1024, 1024}, .deterministic = true}));
  CHECK(config(pass).dbias.how == BiasGradient::none);
  CHECK(config(pass).cluster == 1);
  CHECK(launch_of(pass, Kernel::bias_gradient));
  CHECK(says(pass, "deterministic: a broadcast bias"));
}

TEST_CASE("wgmma: dbias as it lies in memory") {
  Problem p = biased({.sizes = {1, 8, 1024, 1024}});
  p.gradients_named = true;
  p.dq = p.q;
  p.dbias = p.bias;
  CHECK(config(planned(p)).dbias.aligned);
  CHECK(!config(planned(p)).dbias.is_f32);
  p.dbias.strides.row = 1026;
  CHECK(!config(planned(p)).dbias.aligned);
  p.dbias.type = f32;
  CHECK(config(planned(p)).dbias.is_f32);
  p.accumulate = true;
  CHECK(config(planned(p)).dbias.how == BiasGradient::store);
}

TEST_SUITE_END();
