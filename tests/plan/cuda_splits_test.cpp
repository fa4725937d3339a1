// When Hopper's kernels split the keys of a tile of rows over blocks, and the query rows of a tile
// of keys.
#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

namespace {

CudaPlan backward(const Shape& shape, const std::string& name = "", bool causal = false,
                  bool deterministic = false) {
  Attention a = attention(shape);
  if (causal) a.causal = Causal::top_left;
  a.deterministic = deterministic;
  const Problem p = problem(a, Pass::backward);
  CudaPlan plan = planned(p, "sm_90", name);
  check_sound(p, chip("sm_90"), plan);
  return plan;
}

std::int64_t blocks(const CudaPlan& plan) { return launch_of(plan, Kernel::backward)->blocks(); }

}  // namespace

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("few tiles of keys with many iterations fill most of the chip") {
  const std::int64_t multiprocessors = chip("sm_90").multiprocessors;
  const std::int64_t nearly_all = multiprocessors * 7 / 8, most = multiprocessors * 2 / 3;
  for (const char* family : {"cuda:wgmma", "cuda:mma"}) {
    for (const std::int64_t heads_kv : {1, 4, 8}) {
      for (const std::int64_t length : {512, 2048}) {
        for (const std::int64_t dim : {64, 128}) {
          for (const bool causal : {false, true}) {
            CAPTURE(family);
            CAPTURE(heads_kv);
            CAPTURE(length);
            CAPTURE(dim);
            CAPTURE(causal);
            const Shape shape = {.batch = 1,
                                 .heads_q = 32,
                                 .heads_kv = heads_kv,
                                 .len_q = length,
                                 .len_k = length,
                                 .dim = dim};
            // Eight iterations more in each block take as long as the parts of more blocks.
            const bool adds_much = heads_kv == 1 && length == 512 && dim == 128;
            CHECK(blocks(backward(shape, family, causal)) >= (adds_much ? most : nearly_all));
          }
        }
      }
    }
    // Many rows, few keys.
    CHECK(blocks(backward({.batch = 1, .len_q = 8192, .len_k = 128}, family)) >= nearly_all);
  }
}

TEST_CASE("a split backward pass adds its parts in a kernel afterwards, which flags keys") {
  const Shape shape = {.batch = 1, .heads_q = 32, .heads_kv = 1};
  const CudaPlan plan = backward(shape, "", true);
  CHECK(kernels_of(plan) == "delta backward combine_dkv finish");
  CHECK(says(plan, "multiprocessors idle"));
  const KernelConfig& main = launch_of(plan, Kernel::backward)->config;
  CHECK(main.split_q);
  CHECK(!main.flags_nonfinite);
  CHECK(!main.out_by_tma);
  CHECK(launch_of(plan, Kernel::combine_dkv)->config.flags_nonfinite);
  // Whole heads, where the additions of a head to dq have an order.
  CHECK(backward(shape, "", true, true).splits == 16);
  // dq alone has no parts.
  Problem p = problem(attention(shape), Pass::backward);
  p.gradients_named = true;
  p.dq = {.type = bf16, .strides = p.q.strides};
  const CudaPlan dq = planned(p);
  CHECK(dq.splits > 1);
  CHECK(kernels_of(dq) == "delta backward finish");
  CHECK(dq.workspace.begin(WorkspacePart::partial_out) ==
        dq.workspace.end(WorkspacePart::partial_out));
}

TEST_CASE(
    "blocks that take long are split where few of them, or the longest, would keep others idle") {
  // Unequal blocks: twice as many end together, although the chip is full.
  CHECK(backward({.batch = 2, .heads_q = 18, .heads_kv = 2, .len_q = 6527, .len_k = 6527}, "", true)
            .splits > 1);
  // f32 on mma, and wide heads: an iteration takes longer than adding the parts.
  const Shape few_rows = {
      .type = f32, .batch = 3, .heads_q = 12, .heads_kv = 1, .len_q = 63, .len_k = 63};
  CHECK(backward(few_rows).splits == 12);
  CHECK(backward({.batch = 3, .heads_q = 28, .heads_kv = 4, .len_q = 89, .len_k = 89, .dim = 224},
                 "", true)
            .splits > 1);
}

TEST_CASE("few keys and many rows: one kernel, whose rows are split, or wgmma, by their times") {
  const auto plan_of = [](std::int64_t heads, std::int64_t rows, std::int64_t keys,
                          std::int64_t dim) {
    return backward(
        {.batch = heads, .heads_q = 1, .heads_kv = 1, .len_q = rows, .len_k = keys, .dim = dim});
  };
  const auto name = [&](auto... shape) { return plan_of(shape...).name(); };
  // What the faster of both took on an H200, and the other one.
  CHECK(name(95, 3712, 75, 64) == "cuda:wgmma");        // 178 us, 205
  CHECK(name(95, 1024, 75, 64) == "cuda:wgmma");        // 52, 77
  CHECK(name(320, 1024, 77, 64) == "cuda:wgmma");       // 168, 208
  CHECK(name(160, 4096, 75, 64) == "cuda:wgmma");       // 323, 342
  CHECK(name(256, 2048, 77, 64) == "cuda:mma");         // 234, 247
  CHECK(name(256, 2048, 77, 128) == "cuda:mma");        // 404, 481
  CHECK(name(95, 1024, 60, 256) == "cuda:mma");         // 145, 197
  const CudaPlan few_keys = plan_of(95, 3712, 40, 64);  // split 127 to 144, unsplit 192, wgmma 178
  CHECK(few_keys.name() == "cuda:mma");
  CHECK(kernels_of(few_keys) == "backward combine_dkv");
  CHECK(plan_of(160, 4096, 75, 128).splits == 4);  // 573, unsplit 777, wgmma 623
}

TEST_CASE("where one kernel of mma is chosen for few keys, it has all of them") {
  for (std::int64_t dim = 8; dim <= 256; dim += 24) {
    for (const std::int64_t keys : {16, 40, 64, 100, 128}) {
      for (const double softcap : {0.0, 20.0}) {
        for (const double dropout : {0.0, 0.1}) {
          Attention a = attention(
              {.batch = 256, .heads_q = 1, .heads_kv = 1, .len_q = 900, .len_k = keys, .dim = dim});
          a.softcap = softcap;
          a.dropout.p = dropout;
          CAPTURE(dim);
          CAPTURE(keys);
          const CudaPlan plan = planned(problem(a, Pass::backward));
          if (!says(plan, "one kernel of mma has all keys")) continue;
          CHECK(launch_of(plan, Kernel::backward)->config.whole_keys);
        }
      }
    }
  }
}

TEST_CASE("blocks of a cluster count as pairs, whether dq is wanted or not") {
  // Nine tiles for each of 14 heads are 126 blocks, but 140 in pairs: two waves on 132
  // multiprocessors.
  const Shape shape = {
      .batch = 7, .heads_q = 18, .heads_kv = 2, .len_q = 1916, .len_k = 515, .dim = 168};
  const int splits = backward(shape).splits;
  CHECK(splits >= 6);
  Problem p = problem(attention(shape), Pass::backward);
  p.gradients_named = true;
  p.dk = {.type = bf16, .strides = p.k.strides};
  CHECK(planned(p).splits == splits);
}

TEST_CASE("long unequal blocks of many query heads are split, where the last to begin end late") {
  const auto splits = [](std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv,
                         std::int64_t length, std::int64_t dim, bool deterministic = false) {
    const Shape shape = {.batch = batch,
                         .heads_q = heads_q,
                         .heads_kv = heads_kv,
                         .len_q = length,
                         .len_k = length,
                         .dim = dim};
    return backward(shape, "", true, deterministic).splits;
  };
  CHECK(splits(36, 25, 1, 678, 184) >= 4);
  CHECK(splits(3, 32, 2, 1500, 192) >= 4);
  CHECK(splits(5, 55, 5, 2048, 128) >= 3);
  CHECK(splits(2, 64, 8, 4096, 128) == 4);  // the parts take as much memory as dq's sums
  CHECK(splits(2, 64, 8, 4096, 128, true) > 1);
  CHECK(splits(24, 28, 4, 1100, 96) == 1);
  CHECK(splits(3, 72, 12, 692, 128) == 1);
  CHECK(splits(8, 40, 5, 777, 128) == 1);
  CHECK(splits(16, 16, 2, 1366, 128) == 1);
  CHECK(splits(4, 32, 8, 4096, 128) == 1);
  CHECK(splits(1, 16, 16, 4096, 128) == 1);
}

TEST_CASE(
    "forward, whole tiles of rows: keys are split where that spares more than merging takes") {
  const auto splits = [](std::int64_t heads_q, std::int64_t heads_kv, std::int64_t rows,
                         std::int64_t keys, std::int64_t dim) {
    const Shape shape = {.batch = 1,
                         .heads_q = heads_q,
                         .heads_kv = heads_kv,
                         .len_q = rows,
                         .len_k = keys,
                         .dim = dim};
    return planned(problem(attention(shape)), "sm_90",
                   "cuda:mma@rows=16,keys=16,key_warps=4,warps=4")
        .splits;
  };
  CHECK(splits(2, 2, 200, 312, 256) == 1);
  CHECK(splits(2, 2, 200, 640, 256) > 1);
  CHECK(splits(8, 1, 11, 456, 240) > 1);
  CHECK(splits(2, 2, 632, 632, 256) == 1);  // two blocks a multiprocessor do not fit
  CHECK(splits(8, 1, 8, 200, 256) > 1);     // 64 rows
}

TEST_CASE("decoding: a cluster merges the splits of few tiles, where it surely finds room") {
  const auto cluster = [](std::int64_t batch, std::int64_t keys, std::int64_t rows = 1,
                          const char* chip = "sm_90", Type type = bf16) {
    const Shape shape = {
        .type = type, .batch = batch, .heads_q = 32, .heads_kv = 8, .len_q = rows, .len_k = keys};
    const CudaPlan plan = planned(problem(attention(shape)), chip, "cuda:mma");
    const KernelConfig& main = launch_of(plan, Kernel::forward)->config;
    CHECK(main.merges_splits == (plan.splits > 1 && main.cluster == 1));
    CHECK(says(plan, "blocks of a cluster") == (main.cluster > 1));
    return main.cluster;
  };
  CHECK(cluster(1, 1024) == 8);
  CHECK(cluster(1, 2048, 4) == 8);
  CHECK(cluster(8, 4096) == 2);
  CHECK(cluster(1, 8192) == 1);     // 64 blocks leave too much of the chip idle
  CHECK(cluster(4, 4096) == 1);     // clusters of four would fill it
  CHECK(cluster(1, 1024, 5) == 1);  // two tiles of rows
  CHECK(cluster(1, 1024, 1, "sm_80") == 1);
  CHECK(cluster(1, 1024, 1, "sm_90", f32) == 1);
}

TEST_CASE("decoding by stream-K: where lengths may vary, or a second wave would be short") {
  const auto streams = [](std::int64_t batch, std::int64_t keys, bool lengths_vary,
                          std::int64_t rows = 1, bool continues = false) {
    Attention a =
        attention({.batch = batch, .heads_q = 32, .heads_kv = 8, .len_q = rows, .len_k = keys});
    if (lengths_vary) a.seqused_k = Tensor(nullptr, i32, {batch});
    a.continue_from = continues;
    const Problem p = problem(a);
    const CudaPlan plan = planned(p, "sm_90", "cuda:mma");
    check_sound(p, chip("sm_90"), plan);
    const CudaLaunch& main = *launch_of(plan, Kernel::forward);
    CHECK(says(plan, "stream-K") == main.config.stream_k);
    if (main.config.stream_k) CHECK(main.blocks() == 2 * chip("sm_90").multiprocessors);
    return main.config.stream_k;
  };
  CHECK(streams(32, 4096, true));
  CHECK(streams(8, 16384, true));
  CHECK(streams(40, 4096, false));  // 320 tiles
  CHECK(!streams(32, 4096, false));
  CHECK(!streams(1, 16384, true));     // one sequence has one length
  CHECK(!streams(4, 1024, true));      // a cluster takes less time
  CHECK(!streams(32, 4096, true, 9));  // two tiles of rows
  CHECK(!streams(32, 4096, true, 1, true));
  // One key head: the parts of a row must find room.
  for (const char* name : {"sm_80", "sm_90", "sm_120"}) {
    Attention a = attention({.batch = 64, .heads_q = 8, .heads_kv = 1, .len_q = 1, .len_k = 16384});
    a.seqused_k = Tensor(nullptr, i32, {64});
    const Problem p = problem(a);
    const CudaPlan plan = planned(p, name, "cuda:mma");
    check_sound(p, chip(name), plan);
    CHECK(launch_of(plan, Kernel::forward)->config.stream_k);
  }
}

TEST_CASE("what fills the chip, or is short, is not split") {
  const auto splits = [](const Shape& shape, bool causal = false) {
    return backward(shape, "", causal).splits;
  };
  CHECK(splits({.batch = 4, .heads_q = 16, .heads_kv = 16, .len_q = 4096, .len_k = 4096}) == 1);
  CHECK(splits({.batch = 4, .heads_q = 16, .heads_kv = 16, .len_q = 512, .len_k = 512}, true) == 1);
  CHECK(splits({.batch = 8, .heads_q = 32, .heads_kv = 8, .len_q = 4096, .len_k = 4096}) == 1);
  CHECK(splits({.batch = 1, .heads_q = 8, .heads_kv = 8, .len_q = 128, .len_k = 128}) == 1);
  // One head alone has too few rows to split by whole heads.
  CHECK(backward({.batch = 1, .heads_q = 1, .heads_kv = 1}, "", false, true).splits == 1);
  // A window leaves few iterations.
  Attention a = attention({.batch = 1, .heads_q = 8, .heads_kv = 8, .len_q = 8192, .len_k = 1024});
  a.window = {.left = 100, .right = 0};
  CHECK(planned(problem(a, Pass::backward)).splits == 1);
}

TEST_CASE("forward: few tiles of rows share out their keys") {
  const auto forward = [](const Shape& shape, auto... change) {
    Attention a = attention(shape);
    (change(a), ...);
    const Problem p = problem(a);
    CudaPlan plan = planned(p, "sm_90", "cuda:wgmma");
    check_sound(p, chip("sm_90"), plan);
    return plan;
  };
  const auto causal = [](Attention& a) { a.causal = Causal::bottom_right; };
  const Shape few = {.batch = 1, .heads_q = 8, .heads_kv = 1, .len_q = 512, .len_k = 32768};
  for (const std::int64_t dim : {64, 128, 256}) {
    Shape shape = few;
    shape.dim = dim;
    const CudaPlan plan = forward(shape);
    CHECK(kernels_of(plan) == "forward combine");
    CHECK(says(plan, "multiprocessors idle"));
    CHECK(plan.launches[0].config.split_kv);
    CHECK(!plan.launches[0].config.out_by_tma);
    CHECK(plan.launches[0].grid.blocks() >= chip("sm_90").multiprocessors * 7 / 8);
    CHECK(forward(shape, causal).splits == plan.splits);
  }
  // What is not finite is flagged where the parts are merged.
  const CudaPlan plan = forward(few, causal);
  CHECK(kernels_of(plan) == "forward combine forward*");
  CHECK(!plan.launches[0].config.flags_nonfinite);
  CHECK(plan.launches[1].config.flags_nonfinite);
  CHECK(kernels_of(forward(few, [](Attention& a) {
          a.mask = Tensor(nullptr, boolean, {1, 1, 512, 32768});
        })) == "row_map forward combine forward*");
  Shape of_f32 = few;
  of_f32.type = f32;
  CHECK(kernels_of(forward(of_f32)) == "split_f32 forward combine forward*");
  // A few more tiles than multiprocessors would end one after another.
  CHECK(
      forward({.batch = 1, .heads_q = 10, .heads_kv = 10, .len_q = 1792, .len_k = 8192, .dim = 128})
          .splits > 1);
  CHECK(forward({.batch = 8, .heads_q = 32, .heads_kv = 32, .len_q = 512, .len_k = 8192}).splits ==
        1);
  CHECK(forward({.batch = 1, .heads_q = 8, .heads_kv = 8, .len_q = 512, .len_k = 512}).splits == 1);
  // Unequal tiles begin with the longest, which ends with the others.
  CHECK(forward({.batch = 1, .heads_q = 8, .heads_kv = 8, .len_q = 2048, .len_k = 2048, .dim = 128},
                causal)
            .splits == 1);
  CHECK(forward({.batch = 1, .heads_q = 2, .heads_kv = 2, .len_q = 8192, .len_k = 8192, .dim = 128},
                causal)
            .splits == 2);
  // A window leaves little to split.
  CHECK(forward(few, [](Attention& a) { a.window = {.left = 100, .right = 0}; }).splits == 1);
}

TEST_SUITE_END();
