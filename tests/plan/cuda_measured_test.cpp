// Choices that measurements made: which family, tile and order of heads a problem gets.
#include <string>
#include <tuple>

#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("Hopper's own kernel, except little work and few rows") {
  const auto chosen = [](const Shape& shape, Causal causal = Causal::none) {
    Attention a = attention(shape);
    a.causal = causal;
    return planned(problem(a), "sm_90");
  };
  const auto of_heads = [&](std::int64_t heads, std::int64_t keys, std::int64_t dim) {
    return Shape{
        .batch = 1, .heads_q = heads, .heads_kv = heads, .len_q = 128, .len_k = keys, .dim = dim};
  };
  const auto little = [&](const Shape& shape, Causal causal = Causal::none) {
    return says(chosen(shape, causal), "so little work");
  };
  CHECK(chosen(of_heads(1, 1201, 128)).name() == "cuda:wgmma");
  CHECK(chosen(of_heads(4, 100000, 256)).name() == "cuda:wgmma");
  CHECK(little(of_heads(1, 7919, 64)));  // 60 keys for each multiprocessor are 7920
  CHECK(chosen(of_heads(1, 7920, 64)).name() == "cuda:wgmma");
  CHECK(little(of_heads(8, 1200, 64)));
  CHECK(chosen(of_heads(8, 1201, 64)).name() == "cuda:wgmma");
  CHECK(little(of_heads(8, 2048, 64), Causal::bottom_right));
  CHECK(chosen(of_heads(8, 2049, 64), Causal::bottom_right).name() == "cuda:wgmma");
  CHECK(little(of_heads(65, 256, 64)));
  CHECK(chosen(of_heads(66, 256, 64)).name() == "cuda:wgmma");
  Shape f32_rows = of_heads(8, 989, 64);
  f32_rows.type = f32, f32_rows.len_q = 129, f32_rows.heads_q = f32_rows.heads_kv = 4;
  CHECK(little(f32_rows));
  f32_rows.dim = 72;
  CHECK(chosen(f32_rows).name() == "cuda:wgmma");
  Attention windowed = attention(of_heads(10, 128 * 64, 64));
  windowed.window = {.left = 64, .right = 64};
  CHECK(says(planned(problem(windowed), "sm_90"), "so little work"));  // 256 keys a tile

  const auto few_rows = [&](const Shape& shape) { return says(chosen(shape), "of 128 idle"); };
  CHECK(few_rows({.batch = 64, .len_q = 32, .len_k = 256, .dim = 128}));
  CHECK(chosen({.batch = 64, .len_q = 33, .len_k = 256, .dim = 128}).name() == "cuda:wgmma");
  CHECK(few_rows({.batch = 64, .len_q = 33, .len_k = 256, .dim = 64}));
  CHECK(chosen({.batch = 64, .len_q = 33, .len_k = 513, .dim = 64}).name() == "cuda:wgmma");
  // 90 keys for each multiprocessor are 11880.
  const auto low = [&](std::int64_t keys) {
    return Shape{.batch = 1, .heads_q = 4, .heads_kv = 4, .len_q = 64, .len_k = keys, .dim = 128};
  };
  CHECK(few_rows(low(2969)));
  CHECK(chosen(low(2970)).name() == "cuda:wgmma");
  // Above 192 columns, where much is hidden; and above 256, where tiles do not overlap.
  const auto square = [](std::int64_t length, std::int64_t dim) {
    return Shape{.batch = 32, .len_q = length, .len_k = length, .dim = dim};
  };
  const auto low_tiles = [&](const Shape& shape, Causal causal) {
    const CudaPlan plan = chosen(shape, causal);
    const char* why = shape.dim > 256 ? "so few rows or keys, tiles of a" : "of 128 idle";
    return says(plan, why) &&
           launch_of(plan, Kernel::forward)->config.tiling.rows == (shape.dim > 256 ? 64 : 32);
  };
  CHECK(low_tiles(square(96, 224), Causal::top_left));
  CHECK(chosen(square(96, 224)).name() == "cuda:wgmma");
  CHECK(chosen(square(97, 224), Causal::top_left).name() == "cuda:wgmma");
  CHECK(low_tiles(square(128, 320), Causal::none));
  const auto widest = chosen(square(100, 512));
  CHECK(launch_of(widest, Kernel::forward)->config.tiling.min_blocks == 2);
  CHECK(chosen(square(129, 320)).name() == "cuda:wgmma");
  const auto packed = [](std::int64_t most, std::int64_t mean, std::int64_t dim) {
    const Tensor all(nullptr, bf16, {28 * mean, 8, dim}), begins(nullptr, i32, {29});
    const Attention a{.q = all,
                      .k = all,
                      .v = all,
                      .cu_seqlens_q = begins,
                      .cu_seqlens_k = begins,
                      .max_seqlen_q = most,
                      .max_seqlen_k = most,
                      .causal = Causal::top_left};
    return planned(problem(a), "sm_90");
  };
  CHECK(says(packed(147, 90, 208), "packed sequences with so few rows"));
  CHECK(launch_of(packed(147, 90, 208), Kernel::forward)->config.tiling.rows == 32);
  CHECK(packed(147, 90, 192).name() == "cuda:wgmma");
  CHECK(packed(193, 90, 208).name() == "cuda:wgmma");
}

TEST_CASE("16 bits: tiles whose blocks of keys are nearly full") {
  const auto tile = [](const Shape& shape, auto... change) {
    Attention a = attention(shape);
    (change(a), ...);
    const Tiling t = planned(problem(a), "sm_90", "cuda:wgmma").launches.front().config.tiling;
    return std::to_string(t.rows) + "x" + std::to_string(t.keys) + ", " + std::to_string(t.stages);
  };
  const auto square = [&](std::int64_t batch, std::int64_t length, std::int64_t dim,
                          auto... change) {
    return tile(
        {.batch = batch, .heads_q = 8, .heads_kv = 8, .len_q = length, .len_k = length, .dim = dim},
        change...);
  };
  const auto causal = [](Attention& a) { a.causal = Causal::bottom_right; };
  const auto capped = [](Attention& a) { a.softcap = 2; };
  // The tiling that was fastest, or within 3 %, at each of these sizes.
  CHECK(square(16, 150, 128) == "128x80, 3");
  CHECK(square(16, 190, 128) == "128x64, 4");
  CHECK(square(16, 226, 128) == "128x80, 3");
  CHECK(square(16, 280, 96) == "128x96, 3");
  CHECK(square(8, 1000, 128) == "128x128, 2");
  CHECK(square(1, 8192, 128) == "128x128, 2");
  CHECK(square(8, 140, 160) == "128x48, 3");
  CHECK(square(8, 256, 160) == "128x64, 2");
  CHECK(square(8, 700, 160) == "128x64, 3");
  CHECK(square(8, 450, 256) == "128x48, 3");
  CHECK(square(8, 300, 256) == "128x64, 2");
  CHECK(square(16, 140, 64) == "192x80, 4");
  CHECK(square(16, 512, 64) == "256x64, 4");
  CHECK(square(4, 512, 64) == "128x128, 3");
  CHECK(square(16, 1300, 64) == "192x112, 3");
  // Causal: blocks of 64 keys are skipped, except where rows are long.
  CHECK(square(8, 300, 64, causal) == "192x64, 4");
  CHECK(square(8, 500, 64, causal) == "256x64, 4");
  CHECK(square(8, 2048, 64, causal) == "128x128, 3");
  CHECK(square(8, 624, 128, causal) == "128x64, 4");
  CHECK(square(8, 1025, 128, causal) == "128x128, 2");
  CHECK(square(8, 246, 176, causal) == "128x64, 2");
  // Score terms were not measured.
  CHECK(square(16, 150, 128, capped) == "128x128, 2");
  // Packed sequences by their mean.
  const auto packed = [&](std::int64_t total, bool is_causal = false) {
    const Tensor rows(nullptr, bf16, {total, 8, 128}), begins(nullptr, i32, {41});
    const auto pack = [&](Attention& a) {
      a.q = a.k = a.v = rows;
      a.cu_seqlens_q = a.cu_seqlens_k = begins;
      a.max_seqlen_q = a.max_seqlen_k = 1000;
      if (is_causal) causal(a);
    };
    return tile({.dim = 128}, pack);
  };
  CHECK(packed(40 * 400) == "128x80, 3");
  CHECK(packed(40 * 400, true) == "128x64, 4");
  CHECK(packed(40 * 1000) == "128x128, 2");
}

TEST_CASE("mma: smaller tiles for few keys, and for packed sequences by their mean") {
  const auto tiling = [](const Shape& shape, Pass pass = Pass::forward) {
    const CudaPlan plan = planned(problem(attention(shape), pass), "sm_80");
    return plan.launches.at(pass == Pass::forward ? 0 : 1).config.tiling;
  };
  CHECK(tiling({.batch = 64, .len_q = 64, .len_k = 128, .dim = 128}).min_blocks == 3);
  CHECK(tiling({.batch = 64, .len_q = 64, .len_k = 129, .dim = 128}).min_blocks == 1);
  CHECK(tiling({.type = f32, .len_q = 128, .len_k = 999}, Pass::backward).keys == 32);
  CHECK(tiling({.type = f32, .len_q = 129, .len_k = 999}, Pass::backward).keys == 64);
  const auto packed_rows = [](std::int64_t total, std::int64_t longest = 100) {
    const Tensor rows(nullptr, bf16, {total, 64, 128}), begins(nullptr, i32, {11});
    return planned(problem({.q = rows,
                            .k = rows,
                            .v = rows,
                            .cu_seqlens_q = begins,
                            .cu_seqlens_k = begins,
                            .max_seqlen_q = longest,
                            .max_seqlen_k = longest}))
        .launches.front()
        .config;
  };
  CHECK(packed_rows(640).family == Family::mma);
  CHECK(packed_rows(640).tiling.rows == 32);
  CHECK(packed_rows(641).family == Family::wgmma);
  CHECK(packed_rows(640, 257).family == Family::wgmma);
  CHECK(packed_rows(4096, 1).tiling.rows == 16);  // rows that belong to no sequence
}

TEST_CASE("mma: two blocks of four warps for some head sizes, and short causal sequences") {
  const auto warps = [](Pass pass, std::int64_t dim, std::int64_t length, Causal causal,
                        const char* chip_name = "sm_90", float softcap = 0) {
    Attention a = attention({.len_q = length, .len_k = length, .dim = dim});
    a.causal = causal;
    a.softcap = softcap;
    const CudaPlan plan = planned(problem(a, pass), chip_name, "cuda:mma");
    return launch_of(plan, pass == Pass::forward ? Kernel::forward : Kernel::backward)
        ->config.tiling.warps;
  };
  constexpr auto kFull = Causal::none, kCausal = Causal::bottom_right;
  CHECK(warps(Pass::backward, 64, 2048, kFull) == 4);  // of 128 keys
  CHECK(warps(Pass::backward, 72, 2048, kFull) == 4);
  CHECK(warps(Pass::backward, 96, 2048, kFull) == 4);
  CHECK(warps(Pass::backward, 96, 2048, kFull, "sm_80") == 8);  // no room for two
  CHECK(warps(Pass::backward, 104, 2048, kCausal) == 8);
  CHECK(warps(Pass::backward, 128, 768, kCausal) == 4);
  CHECK(warps(Pass::backward, 128, 769, kCausal) == 8);
  CHECK(warps(Pass::backward, 128, 512, kFull) == 8);
  CHECK(warps(Pass::backward, 160, 2048, kFull) == 4);
  CHECK(warps(Pass::backward, 160, 2048, kFull, "sm_90", 30) == 8);
  CHECK(warps(Pass::backward, 168, 2048, kFull) == 8);
  CHECK(warps(Pass::forward, 160, 2048, kCausal) == 8);
  CHECK(warps(Pass::forward, 168, 2048, kCausal) == 4);
  CHECK(warps(Pass::forward, 256, 4096, kCausal) == 4);
  CHECK(warps(Pass::forward, 256, 4097, kCausal) == 8);
  CHECK(warps(Pass::forward, 256, 2048, kFull) == 8);
}

TEST_CASE("causal gradients of heads that share keys: the longest tiles of many heads first") {
  const auto heads = [](std::int64_t heads_kv, std::int64_t length, std::int64_t window) {
    Attention a = attention({.batch = 8,
                             .heads_q = 32,
                             .heads_kv = heads_kv,
                             .len_q = length,
                             .len_k = length,
                             .dim = 128});
    a.causal = Causal::bottom_right;
    a.window.left = window;
    return planned(problem(a, Pass::backward), "sm_90").launches.at(1).grid.heads_per_group;
  };
  CHECK(heads(8, 1024, -1) == 16);  // 1 MB of rows each, and a cache of 50 MB
  CHECK(heads(8, 256, -1) == 64);
  CHECK(heads(32, 1024, -1) == 1);
  CHECK(heads(8, 1024, 100) == 1);  // all tiles take as long
  CHECK(heads(8, 2048, -1) == 132 / 16);
}

TEST_CASE("gradients of narrow heads: tiles of 128 rows where many rows see the keys") {
  const auto rows = [](const Shape& shape, const std::string& name = "", auto... change) {
    Attention a = attention(shape);
    (change(a), ...);
    const CudaPlan plan = planned(problem(a, Pass::backward), "sm_90", name);
    return launch_of(plan, Kernel::backward)->config.tiling.rows;
  };
  const auto of_length = [](std::int64_t length) {
    return Shape{.heads_q = 32, .heads_kv = 32, .len_q = length, .len_k = length};
  };
  const auto causal = [](Attention& a) { a.causal = Causal::bottom_right; };
  const Shape longer = of_length(2048);
  CHECK(rows(longer) == 128);
  CHECK(rows(longer, "", causal) == 128);
  CHECK(rows(of_length(448)) == 64);
  CHECK(rows(of_length(449)) == 128);
  CHECK(rows(of_length(513)) == 64);  // ten small tiles would be nine
  CHECK(rows(of_length(640)) == 128);
  Shape few_keys = longer;
  few_keys.len_k = 256;  // 128 tiles of keys
  CHECK(rows(few_keys) == 64);
  few_keys.len_k = 257;
  CHECK(rows(few_keys) == 128);
  CHECK(rows(longer, "", [](Attention& a) { a.window = {.left = 512, .right = 511}; }) == 64);
  CHECK(rows(longer, "", [](Attention& a) { a.window = {.left = 512, .right = 512}; }) == 128);
  CHECK(rows(longer, "", [](Attention& a) { a.softcap = 20; }) == 64);
  CHECK(rows(longer, "cuda:wgmma@rows=64") == 64);
  CHECK(rows(of_length(100), "cuda:wgmma@rows=128") == 128);
  Shape wider = longer;
  wider.dim_v = 72;
  CHECK(rows(wider) == 64);
}

TEST_CASE("causal gradients of many heads that share keys: rows before heads") {
  const auto main_of = [](std::int64_t heads_kv, auto... change) {
    Attention a = attention({.batch = 5,
                             .heads_q = 48,
                             .heads_kv = heads_kv,
                             .len_q = 1366,
                             .len_k = 1366,
                             .dim = 128});
    a.causal = Causal::bottom_right;
    (change(a), ...);
    const Problem p = problem(a, Pass::backward);
    const CudaPlan plan = planned(p, "sm_90");
    check_sound(p, chip("sm_90"), plan);
    return *launch_of(plan, Kernel::backward);
  };
  const auto with_rows = [](std::int64_t batch, std::int64_t heads_kv, std::int64_t rows) {
    return [=](Attention& a) {
      a.q = Tensor(nullptr, bf16, {batch, 48, rows, 128});
      a.k = a.v = Tensor(nullptr, bf16, {batch, heads_kv, rows, 128});
    };
  };
  CHECK(main_of(8).config.rows_outer);
  CHECK(main_of(8).grid.heads_per_group == 8);
  CHECK(main_of(8, with_rows(2, 8, 1000)).grid.heads_per_group == 16);  // 16 heads of 8 tiles
  CHECK(main_of(8, with_rows(7, 6, 692)).grid.heads_per_group == 16);   // 42 heads: 2 were last
  CHECK(!main_of(8, with_rows(5, 8, 3073)).config.rows_outer);
  CHECK(!main_of(12).config.rows_outer);  // four query heads a key head
  CHECK(!main_of(8, [](Attention& a) { a.deterministic = true; }).config.rows_outer);
  CHECK(!main_of(8, [](Attention& a) { a.window.left = 100; }).config.rows_outer);
  CHECK(!main_of(8, [](Attention& a) { a.causal = Causal::none; }).config.rows_outer);
  CHECK(!main_of(8, [](Attention& a) {
           a.mask = Tensor(nullptr, boolean, {5, 1, 1366, 1366});
         }).config.rows_outer);
  CHECK(!main_of(8, [](Attention& a) {
           a.bias = Tensor(nullptr, bf16, {5, 48, 1366, 1366});
         }).config.rows_outer);
}

TEST_CASE("forward above head size 256 has the keys that there is room for, and slices of out") {
  const auto chosen = [](std::int64_t dim, std::int64_t dim_v, std::int64_t rows = 1024) {
    const Problem p = problem(attention({.len_q = rows, .dim = dim, .dim_v = dim_v}));
    const CudaPlan plan = planned(p, "sm_90");
    check_sound(p, chip("sm_90"), plan);
    const CudaLaunch& launch = *launch_of(plan, Kernel::forward);
    const Tiling& tiling = launch.config.tiling;
    if (plan.family != Family::wgmma) return std::tuple(0, 0, 0);
    CHECK(launch.grid.splits == tiling.slices);
    CHECK(!launch.config.out_by_tma);
    return std::tuple(tiling.keys, tiling.slices, launch.config.dim_v);
  };
  CHECK(chosen(257, 257) == std::tuple(64, 2, 288));
  CHECK(chosen(320, 320) == std::tuple(64, 2, 320));
  CHECK(chosen(384, 384) == std::tuple(48, 2, 384));
  CHECK(chosen(512, 512) == std::tuple(32, 2, 512));
  CHECK(chosen(512, 256) == std::tuple(32, 1, 256));
  CHECK(chosen(128, 300) == std::tuple(64, 2, 320));
  // Two slices of 16 heads occupy a quarter of 132 multiprocessors, and of two tiles each half.
  CHECK(chosen(512, 512, 128) == std::tuple(0, 0, 0));
  CHECK(chosen(512, 512, 129) == std::tuple(32, 2, 512));
}

TEST_SUITE_END();
