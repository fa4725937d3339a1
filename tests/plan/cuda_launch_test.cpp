// Which kernels a plan for a GPU launches, and why.
#include <utility>

#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

namespace {

Attention causal(const Shape& shape = {}) {
  Attention a = attention(shape);
  a.causal = Causal::bottom_right;
  return a;
}

// A backward problem with the gradients that are named, as types.
Problem named(Problem p, Type dq, Type dk, Type dv, Type dbias = Type::none) {
  p.gradients_named = true;
  p.dq = {.type = dq, .strides = p.q.strides};
  p.dk = {.type = dk, .strides = p.k.strides};
  p.dv = {.type = dv, .strides = p.v.strides};
  p.dbias = {.type = dbias, .strides = p.bias.strides};
  return p;
}

Attention biased(std::array<std::int64_t, 4> sizes, Type type = f32) {
  Attention a = attention({});
  a.bias = Tensor(nullptr, type, {sizes[0], sizes[1], sizes[2], sizes[3]});
  return a;
}

// By the mma kernels: those of Hopper are in cuda_dbias_test.cpp.
CudaPlan planned_mma(const Problem& p) { return planned(p, "sm_90", "cuda:mma"); }

BiasGradient how(const CudaPlan& plan) {
  const CudaLaunch* const launch = launch_of(plan, Kernel::backward);
  REQUIRE(launch);
  return launch->config.dbias.how;
}

}  // namespace

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("launch lists") {
  const Pass backward = Pass::backward;
  CHECK(kernels_of(planned(problem(attention({})))) == "forward");
  CHECK(kernels_of(planned(problem(causal()))) == "forward");
  CHECK(kernels_of(planned(problem(attention({.type = f32})))) == "split_f32 forward");
  CHECK(kernels_of(planned(problem(attention({.type = f32})), "sm_80")) == "forward forward*");
  CHECK(kernels_of(planned(problem(attention({.type = f64})))) == "forward");
  CHECK(kernels_of(planned(problem(attention({}), backward))) == "delta backward finish");
  CHECK(kernels_of(planned(problem(causal(), backward))) == "delta backward finish");
  CHECK(kernels_of(planned(problem(causal(), backward), "sm_90", "cuda:simt")) ==
        "delta key_gradient query_gradient");
  Attention a = biased({1, 8, 1024, 1024});
  a.sink = Tensor(nullptr, f32, {8});
  CHECK(kernels_of(planned(problem(a, backward))) == "delta backward finish sink_gradient");
  CHECK(kernels_of(planned(problem(a, backward), "sm_90", "cuda:mma")) ==
        "delta backward finish sink_gradient");
  CHECK(kernels_of(planned(problem(a, backward), "sm_90", "cuda:simt")) ==
        "delta key_gradient query_gradient bias_gradient sink_gradient");
}

TEST_CASE("only what is wanted is computed") {
  const Problem p = problem(causal(), Pass::backward);
  const Type no = Type::none;
  CHECK(kernels_of(planned(named(p, bf16, no, no))) == "delta backward finish");
  CHECK(kernels_of(planned(named(p, no, bf16, no))) == "delta backward finish");
  CHECK(kernels_of(planned(named(p, no, no, f32))) == "delta backward finish");
  CHECK(kernels_of(planned(named(p, no, no, no))) == "delta");
  CHECK(kernels_of(planned(named(p, bf16, no, no), "sm_61")) == "delta query_gradient");
  const CudaPlan plan = planned(named(p, no, no, bf16));
  CHECK(plan.workspace.begin(WorkspacePart::dq_sums) == plan.workspace.end(WorkspacePart::dq_sums));
  CHECK(!launch_of(plan, Kernel::backward)->config.wanted.dk);
  CHECK(!launch_of(plan, Kernel::delta)->config.wanted.dq);
}

TEST_CASE("empty problems launch what writes zeros, and nothing else") {
  CHECK(kernels_of(planned(problem(attention({.len_q = 0})))) == "");
  CHECK(kernels_of(planned(problem(attention({.batch = 0})))) == "");
  CHECK(kernels_of(planned(problem(attention({.len_k = 0})))) == "forward");
  CHECK(kernels_of(planned(problem(attention({.len_q = 0}), Pass::backward))) == "backward");
  CHECK(kernels_of(planned(problem(attention({.len_k = 0}), Pass::backward))) == "delta finish");
}

TEST_CASE("dbias: stored, added, or a pass of its own") {
  const auto plan = [](std::array<std::int64_t, 4> sizes) {
    return planned_mma(problem(biased(sizes), Pass::backward));
  };
  CHECK(how(plan({2, 8, 1024, 1024})) == BiasGradient::store);
  CHECK(how(plan({1, 8, 1024, 1024})) == BiasGradient::add);
  CHECK(how(plan({2, 1, 1024, 1024})) == BiasGradient::add);
  CHECK(how(plan({2, 8, 1, 1024})) == BiasGradient::add_to_row);
  CHECK(how(plan({2, 8, 1024, 1})) == BiasGradient::add_to_column);
  CHECK(how(plan({1, 1, 1, 1})) == BiasGradient::add_to_row);
  const Strides strides = plan({1, 8, 1024, 1024}).dbias_strides;
  CHECK(strides.batch == 0);
  CHECK(strides.head == 1024 * 1024);
  CHECK(strides.row == 1024);
  CHECK(strides.column == 1);
  // Tiles that are hidden would not be stored.
  Attention a = biased({2, 8, 1024, 1024});
  a.causal = Causal::top_left;
  Problem p = problem(a, Pass::backward);
  CHECK(how(planned_mma(p)) == BiasGradient::add);
  p = named(p, bf16, bf16, bf16, f32);
  p.accumulate = true;
  CHECK(how(planned_mma(p)) == BiasGradient::store);
}

TEST_CASE("dbias is summed in place where it is f32 and accumulated into") {
  Problem p = named(problem(biased({1, 8, 1024, 1024}), Pass::backward), bf16, bf16, bf16, f32);
  CHECK(converts_dbias(planned_mma(p)));
  p.accumulate = true;
  const CudaPlan plan = planned_mma(p);
  CHECK(!converts_dbias(plan));
  CHECK(plan.workspace.bytes(WorkspacePart::dbias_sums) == 0);
  CHECK(plan.dbias_strides.row == p.dbias.strides.row);
  CHECK(launch_of(plan, Kernel::backward)->config.dbias.pairs);
  p.dbias.strides.row = 1025;
  CHECK(!launch_of(planned_mma(p), Kernel::backward)->config.dbias.pairs);
  p.dbias.type = bf16;
  CHECK(converts_dbias(planned_mma(p)));
  CHECK(launch_of(planned_mma(p), Kernel::backward)->config.dbias.pairs);
}

TEST_CASE("deterministic: dq in order, broadcast dbias in a pass of its own") {
  Attention a = biased({1, 8, 1024, 1024});
  a.deterministic = true;
  CudaPlan plan = planned_mma(problem(a, Pass::backward));
  CHECK(how(plan) == BiasGradient::none);
  CHECK(launch_of(plan, Kernel::bias_gradient));
  CHECK(launch_of(plan, Kernel::bias_gradient)->config.family == Family::simt);
  CHECK(!converts_dbias(plan));
  const CudaLaunch& backward = *launch_of(plan, Kernel::backward);
  CHECK(backward.config.ordered_dq);
  CHECK(backward.grid.heads_per_group == 16);
  CHECK(plan.workspace.end(WorkspacePart::dq_semaphores) > 0);
  CHECK(says(plan, "deterministic: blocks add to dq in the order of their keys"));
  CHECK(says(plan, "deterministic: a broadcast bias"));
  // Each element of a whole bias is written once, in whatever order.
  a = biased({2, 8, 1024, 1024});
  a.deterministic = true;
  plan = planned_mma(problem(a, Pass::backward));
  CHECK(how(plan) == BiasGradient::store);
  CHECK(!launch_of(plan, Kernel::bias_gradient));
  // What does not want dq has no order to keep.
  const Problem keys = named(problem(a, Pass::backward), Type::none, bf16, bf16);
  CHECK(!launch_of(planned(keys), Kernel::backward)->config.ordered_dq);
  CHECK(!launch_of(planned(problem(attention({}), Pass::backward)), Kernel::backward)
             ->config.ordered_dq);
}

TEST_CASE("precision of f32") {
  Attention a = attention({.type = f32});
  const auto products = [&](const char* chip_name = "sm_90") {
    return launch_of(planned(problem(a), chip_name), Kernel::forward)->config.products;
  };
  CHECK(products() == Products::f16x3);
  CHECK(products("sm_80") == Products::tf32x3);
  a.precision = Precision::tf32;
  CHECK(products() == Products::tf32);
  CHECK(kernels_of(planned(problem(a))) == "forward");
  a.precision = Precision::bf16;
  CHECK(products() == Products::tf32);
  a = attention({.type = bf16});
  a.precision = Precision::tf32;
  CHECK(products() == Products::direct);
}

TEST_CASE("few rows of shared keys are packed into a tile") {
  const auto packs = [](Shape s) {
    return planned(problem(attention(s))).launches.front().config.pack_gqa;
  };
  CHECK(packs({.heads_q = 8, .heads_kv = 1, .len_q = 1}));
  CHECK(packs({.heads_q = 8, .heads_kv = 4, .len_q = 1}));
  CHECK(packs({.heads_q = 64, .heads_kv = 1, .len_q = 16}));
  CHECK(!packs({.heads_q = 8, .heads_kv = 8, .len_q = 1}));
  CHECK(!packs({.heads_q = 8, .heads_kv = 1, .len_q = 65}));
  CHECK(!packs({.heads_q = 8, .heads_kv = 1, .len_q = 1024}));
  // A tile of packed GQA walks over the keys that a window leaves to all heads.
  Attention a = attention({.heads_q = 8, .heads_kv = 1, .len_q = 1, .len_k = 65536});
  a.window = {.left = 1000, .right = 0};
  CHECK(planned(problem(a)).launches.front().config.pack_gqa);
}

TEST_CASE("keys are split where tiles of rows would leave the chip idle") {
  for (const Chip& chip : known_chips()) {
    if (chip.capability() < 80) continue;
    const Problem decode =
        problem(attention({.batch = 1, .heads_kv = 2, .len_q = 1, .len_k = 131072, .dim = 128}));
    const CudaPlan plan = planned(decode, chip.name.c_str());
    const CudaLaunch& forward = plan.launches.front();
    CAPTURE(chip.name);
    CHECK(forward.config.split_kv);
    CHECK(plan.splits == forward.grid.splits);
    CHECK(forward.grid.blocks() >= chip.multiprocessors * 2 / 3);
    CHECK(kernels_of(plan) == (forward.config.merges_splits ? "forward" : "forward combine"));
    CHECK(says(plan, "split: "));
    // Every key warp of a split has a tile.
    const Tiling& t = forward.config.tiling;
    CHECK(divide_up(131072, t.keys) / plan.splits >= t.key_warps);
  }
  const auto splits = [](Shape s) { return planned(problem(attention(s))).splits; };
  CHECK(splits({.batch = 16, .len_q = 4096, .len_k = 4096}) == 1);
  CHECK(splits({.batch = 128, .heads_q = 32, .heads_kv = 8, .len_q = 1, .len_k = 8192}) == 1);
  CHECK(splits({.batch = 1, .len_q = 1, .len_k = 100}) == 1);
  CHECK(splits({.batch = 1, .heads_q = 1, .heads_kv = 1, .len_q = 100, .len_k = 50000}) > 32);
  // A window leaves little to split.
  Attention a = attention({.len_q = 1, .len_k = 100000});
  a.window = {.left = 100, .right = 0};
  CHECK(planned(problem(a)).splits == 1);
  // Split rows are flagged where they are merged.
  CudaPlan plan = planned(problem(causal({.batch = 1, .len_q = 40, .len_k = 65536})));
  CHECK(kernels_of(plan) == "forward combine forward*");
  CHECK(!plan.launches[0].config.flags_nonfinite);
  CHECK(plan.launches[1].config.flags_nonfinite);
  plan = planned(problem(causal({.batch = 1, .len_q = 4, .len_k = 65536})));
  CHECK(kernels_of(plan) == "forward forward*");
  CHECK(plan.launches[0].config.flags_nonfinite);
}

TEST_CASE("few rows have warps that split the keys; splits fill the chip once") {
  struct Expected {
    Shape shape;
    int rows, key_warps;
    std::int64_t least, most;  // splits
  };
  const Expected cases[] = {
      {{.batch = 1, .heads_q = 32, .heads_kv = 8, .len_q = 1, .len_k = 8192, .dim = 128},
       16,
       4,
       12,
       16},
      {{.batch = 32, .heads_q = 32, .heads_kv = 8, .len_q = 1, .len_k = 4096, .dim = 128},
       16,
       4,
       1,
       1},
      {{.batch = 1, .heads_q = 32, .heads_kv = 8, .len_q = 8, .len_k = 8193, .dim = 64},
       32,
       4,
       8,
       16},
      {{.batch = 1, .heads_q = 8, .heads_kv = 8, .len_q = 16, .len_k = 64, .dim = 256},
       16,
       4,
       1,
       1},
      {{.batch = 1, .heads_q = 32, .heads_kv = 8, .len_q = 9, .len_k = 8192, .dim = 128},
       64,
       1,
       2,
       32}};
  for (const Expected& expected : cases) {
    const CudaPlan plan = planned(problem(attention(expected.shape)));
    const Tiling& t = plan.launches.front().config.tiling;
    CAPTURE(expected.rows);
    CAPTURE(expected.shape.dim);
    CHECK(t.rows == expected.rows);
    CHECK(t.key_warps == expected.key_warps);
    CHECK(says(plan, "split over warps: ") == (t.key_warps > 1));
    CHECK(plan.splits >= expected.least);
    CHECK(plan.splits <= expected.most);
  }
  // The last block merges a few rows of a few splits; more of them are a launch of their own.
  const auto merge = [](Shape s) { return kernels_of(planned(problem(attention(s)))); };
  const Shape one{.batch = 1, .heads_q = 32, .heads_kv = 8, .len_q = 1, .len_k = 8192, .dim = 128};
  CHECK(merge(one) == "forward");
  Shape more = one;
  more.len_q = 8;
  CHECK(merge(more) == "forward combine");
  more = one;
  more.heads_q = 8;
  more.heads_kv = 1;
  more.len_k = 131072;
  CHECK(merge(more) == "forward combine");
  // Copies that nobody waits for begin with level 80.
  const CudaPlan old =
      planned(problem(attention({.type = f16, .len_q = 1})), "sm_90", "cuda:mma75");
  CHECK(old.launches.front().config.tiling.key_warps == 1);
}

TEST_CASE("pointers and strides decide whether rows are read 16 bytes at a time") {
  Problem p = problem(attention({.type = bf16, .len_k = 200}));  // too few to be copied first
  const auto aligned = [&] { return planned(p, "sm_80").launches.front().config.aligned; };
  CHECK(aligned());
  p.k.data = reinterpret_cast<void*>(8);
  CHECK(!aligned());
  CHECK(says(planned(p, "sm_80"), "slow path: rows of q, k, v or dout"));
  p.k.data = reinterpret_cast<void*>(32);
  CHECK(aligned());
  p.v.strides.row = 68;
  CHECK(!aligned());
  p.v.strides.row = 72;
  CHECK(aligned());
  // The stride of one row, head or batch says nothing.
  p = problem(attention({.batch = 1, .heads_q = 1, .heads_kv = 1, .len_q = 1}));
  p.q.strides = {.batch = 1, .head = 1, .row = 1, .column = 1};
  CHECK(aligned());
  p = problem(attention({.len_k = 200, .dim = 33}), Pass::backward);
  CHECK(!launch_of(planned(p, "sm_80"), Kernel::backward)->config.aligned);
  CHECK(!launch_of(planned(p, "sm_80"), Kernel::backward)->config.exact_dims);
  p = problem(attention({}), Pass::backward);
  CHECK(launch_of(planned(p, "sm_80"), Kernel::backward)->config.exact_dims);
  CHECK(!launch_of(planned(p, "sm_80"), Kernel::backward)->config.dout_is_f32);
  p.dout = {.data = reinterpret_cast<void*>(4), .type = f32, .strides = p.q.strides};
  CHECK(!launch_of(planned(p, "sm_80"), Kernel::backward)->config.aligned);
  CHECK(launch_of(planned(p, "sm_80"), Kernel::backward)->config.dout_is_f32);
}

TEST_CASE("a bias is staged where its rows are whole and begin at 16 bytes") {
  const auto staged = [](const Attention& a) {
    return planned(problem(a)).launches.front().config.bias.aligned;
  };
  CHECK(staged(biased({2, 8, 1024, 1024})));
  CHECK(staged(biased({1, 1, 1, 1024}, bf16)));
  CHECK(!staged(biased({2, 8, 1024, 1})));
  CHECK(!staged(biased({2, 8, 1024, 1024}, f64)));
  CHECK(says(planned(problem(biased({2, 8, 1024, 1024}, f64))), "slow path: the bias"));
  Attention a = biased({2, 8, 1024, 1024});
  a.bias.strides[2] = 1026;
  CHECK(!staged(a));
  // Tiles do not depend on it.
  CHECK(planned(problem(a)).launches.front().config.tiling ==
        planned(problem(biased({2, 8, 1024, 1024}))).launches.front().config.tiling);
  a = attention({.heads_kv = 1, .len_q = 1});
  a.bias = Tensor(nullptr, f32, {2, 8, 1, 1024});
  CHECK(planned(problem(a)).launches.front().config.pack_gqa);
  CHECK(staged(a));
}

TEST_CASE("a bias or mask that all queries share is staged as one row") {
  const auto config = [](const Attention& a) {
    return launch_of(planned(problem(a), "sm_80"), Kernel::forward)->config;
  };
  Attention a = attention({.batch = 32});
  const Tiling plain = config(a).tiling;
  a.bias = Tensor(nullptr, bf16, {1, 8, 1, 1024});
  a.mask = Tensor(nullptr, boolean, {32, 1, 1, 1024});
  CHECK(config(a).bias.one_row);
  CHECK(config(a).mask.one_row);
  CHECK(config(a).tiling == plain);  // terms of keys need no lower tiles
  a.mask = Tensor(nullptr, boolean, {1, 1, 1024, 1024});
  CHECK(!config(a).mask.one_row);
  CHECK(config(a).tiling != plain);
  CHECK(!config(biased({2, 8, 1024, 1024}, bf16)).bias.one_row);
  CHECK(!config(biased({2, 8, 1, 1024}, f64)).bias.one_row);
  // The rows of a tile of packed GQA are those of several heads.
  a = attention({.heads_kv = 1, .len_q = 1});
  a.bias = Tensor(nullptr, f32, {2, 8, 1, 1024});
  a.mask = Tensor(nullptr, boolean, {2, 1, 1, 1024});
  CHECK(config(a).pack_gqa);
  CHECK(!config(a).bias.one_row);
  CHECK(config(a).mask.one_row);
}

TEST_CASE(
    "intervals: even groups of heads are interleaved, whose keys and values share the cache") {
  const auto group = [](const Attention& a) {
    return planned(problem(a)).launches.front().grid.heads_per_group;
  };
  CHECK(group(attention({.batch = 32})) == 1);
  CHECK(group(causal({.batch = 32, .len_q = 4096, .len_k = 4096, .dim = 128})) == 8);
  // 13 + 12 + 12 heads, not 16 + 16 + 5
  CHECK(
      group(causal(
          {.batch = 1, .heads_q = 37, .heads_kv = 37, .len_q = 2048, .len_k = 2048, .dim = 128})) ==
      13);
  const Shape grouped{
      .batch = 32, .heads_q = 8, .heads_kv = 2, .len_q = 4096, .len_k = 4096, .dim = 128};
  CHECK(group(causal(grouped)) == 32);
  CHECK(group(causal({.batch = 1, .len_q = 128, .len_k = 128})) == 8);
  CHECK(group(causal({.batch = 1, .heads_kv = 2, .len_q = 2000000, .len_k = 2000000})) == 4);
}

TEST_CASE("golden explanation") {
  Attention a = attention({.heads_q = 32, .heads_kv = 8, .dim = 128});
  a.deterministic = true;
  a.sink = Tensor(nullptr, f32, {32});
  const Problem p = problem(a, Pass::backward);
  const CudaPlan plan = planned(p, "sm_80", "cuda:mma@rows=64,keys=64,warps=4,stages=2,slices=1");
  CHECK(cuda_kernel_line(plan) == "backward mma level 80, tile 64 x 64, head 128, stages 2");
  const std::string text = cuda_explanation(p, chip("sm_80"), plan);
  CHECK(text.starts_with(
      "problem    2 x 32/8 heads, 1024 x 1024, D 128, bf16, sink, backward\n"
      "chip       sm_80, compute capability 8.0, 108 multiprocessors, 163 KB of shared memory for "
      "a block, 41.94 MB of cache\n"
      "backend    cuda:mma\n"
      "  because  mma: asked for by name\n"
      "  because  tiling: asked for by name\n"
      "  because  deterministic: blocks add to dq in the order of their keys, by a semaphore\n"
      "kernel     delta, "));
  CHECK(
      text.find("kernel     backward mma level 80, tile 64 x 64, head 128, stages 2, 128 threads, "
                "112.0 KB shared, 256 blocks = 16 heads x 16 tiles, 16 heads interleaved\n"
                "kernel     finish, ") != std::string::npos);
  CHECK(text.ends_with(
      "workspace  34.10 MB: dq semaphores 0.02 MB, row states 0.52 MB, dq sums 33.55 MB\n"));
}

TEST_CASE("TMA only stores rows of whole pieces of 16 bytes") {
  for (const std::int64_t dim : {64, 72, 127, 26, 20}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Problem p = problem(attention({.dim = dim}), pass);
      for (View* x : {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dk, &p.dv}) {
        *x = {.type = bf16, .strides = {.batch = 1 << 24, .head = 1 << 18, .row = 128}};
      }
      const CudaPlan plan = planned(p, "sm_90", "cuda:wgmma");
      REQUIRE(plan.name() == "cuda:wgmma");
      const Kernel main = pass == Pass::forward ? Kernel::forward : Kernel::backward;
      CHECK(launch_of(plan, main)->config.out_by_tma == (dim % 8 == 0));
    }
  }
}

TEST_CASE("wgmma stages tiles of bias and mask where there is room") {
  const auto made = [](std::int64_t dim, Type bias, bool mask) {
    Attention a = attention({.dim = dim});
    a.bias = Tensor(nullptr, bias, {1, 8, 1024, 1024});
    if (mask) a.mask = Tensor(nullptr, boolean, {2, 1, 1, 1024});  // which has no bits of pairs
    return planned(problem(a), "sm_90", "cuda:wgmma");
  };
  const auto staged = [](const CudaPlan& plan) {
    const KernelConfig& c = launch_of(plan, Kernel::forward)->config;
    return std::pair(c.bias.aligned, c.mask.copy_bytes == 16);
  };
  CHECK(staged(made(64, bf16, true)) == std::pair(true, true));
  CHECK(staged(made(128, f32, false)) == std::pair(true, false));
  CHECK(staged(made(128, f64, true)) == std::pair(false, true));
  CHECK(says(made(64, f64, true), "it is f64"));
  const CudaPlan large = made(256, f32, true);
  CHECK(large.name() == "cuda:wgmma");
  CHECK(staged(large) == std::pair(false, false));
  CHECK(says(large, "shared memory has no room for its tiles"));
  CHECK(says(large, "the mask's bytes are read one by one"));
}

TEST_CASE(
    "wide wgmma backward blocks are pairs, of an even number of tiles, where nothing forbids") {
  const auto made = [](const Shape& shape, auto&& set) {
    Attention a = attention(shape);
    set(a);
    return planned(problem(a, Pass::backward), "sm_90").launches;
  };
  const auto nothing = [](Attention&) {};
  const Shape wide{.len_q = 520, .len_k = 600, .dim = 256};
  const auto paired = made(wide, nothing);
  CHECK(paired.at(0).config.row_terms.joined);  // delta
  CHECK(paired.at(1).config.cta_pair);
  CHECK(paired.at(1).grid.tiles == 10);
  CHECK(made({.len_q = 520, .len_k = 590, .dim = 256}, nothing).at(1).grid.tiles == 10);
  CHECK(made(wide, [](Attention& a) { a.causal = Causal::top_left; }).at(1).config.cta_pair);
  // Whole 96 or 128 columns of dq each, where that is little more than the head has.
  for (const auto& [dim, columns] : {std::pair(160, 192), {192, 192}, {208, 256}, {248, 256}}) {
    const KernelConfig c = made({.dim = dim}, nothing).at(1).config;
    CHECK(c.cta_pair);
    CHECK(c.dim == columns);
    CHECK(c.dim_v == (dim + 15) / 16 * 16);
  }
  for (const Shape& shape : {Shape{.len_q = 250, .dim = 256}, Shape{.dim = 152}, Shape{.dim = 200},
                             Shape{.dim = 128}, Shape{.len_k = 64, .dim = 256}}) {
    CHECK_FALSE(made(shape, nothing).at(1).config.cta_pair);
  }
  const auto ordered = [](Attention& a) { a.deterministic = true; };
  CHECK(made(wide, ordered).at(1).config.cta_pair);
  CHECK(made(wide, ordered).at(1).grid.heads_per_group == 16);  // all
  // Two blocks a multiprocessor of 132.
  const auto group = [&](std::int64_t length, std::int64_t dim, auto set) {
    return made({.batch = 4, .len_q = length, .len_k = length, .dim = dim}, set)
        .at(1)
        .grid.heads_per_group;
  };
  CHECK(group(2048, 128, ordered) == 16);
  CHECK(group(4096, 128, ordered) == 8);
  CHECK(group(4096, 256, ordered) == 4);
  CHECK(group(65536, 64, ordered) == 1);
  // One where tiles differ in length and are not few.
  const auto causal = [](Attention& a) { a.causal = Causal::top_left; };
  CHECK(group(4096, 128, nothing) == 1);
  CHECK(group(4096, 128, causal) == 4);
  CHECK(group(512, 128, causal) == 1);
  CHECK_FALSE(made(wide, [](Attention& a) { a.dropout.p = 0.1; }).at(1).config.cta_pair);
  CHECK_FALSE(made(wide, [](Attention& a) { a.scale = -1; }).at(1).config.cta_pair);
}

TEST_SUITE_END();
