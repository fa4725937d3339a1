// The tiles of mma for short sequences, by how many heads there are (sm_90: 132 multiprocessors).
#include <string>

#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

namespace {

// "rows x keys, warps, stages", with key warps or min_blocks where there are more than one.
std::string tile(std::int64_t heads, std::int64_t rows, std::int64_t keys, std::int64_t dim,
                 Pass pass = Pass::forward, void (*change)(Attention&) = nullptr) {
  Attention a = attention(
      {.batch = 1, .heads_q = heads, .heads_kv = heads, .len_q = rows, .len_k = keys, .dim = dim});
  if (change) change(a);
  const CudaPlan plan = planned(problem(a, pass), "sm_90", "cuda:mma");
  const Kernel kernel = pass == Pass::forward ? Kernel::forward : Kernel::backward;
  const CudaLaunch* const launch = launch_of(plan, kernel);
  REQUIRE(launch);
  const Tiling& t = launch->config.tiling;
  const auto more = [](const char* name, int n) { return n > 1 ? name + std::to_string(n) : ""; };
  return std::to_string(t.rows) + "x" + std::to_string(t.keys) + ", " + std::to_string(t.warps) +
         ", " + std::to_string(t.stages) + more(", key warps ", t.key_warps) +
         more(", blocks ", t.min_blocks) + more(", slices ", t.slices);
}

void hide(Attention& a) { a.causal = Causal::bottom_right; }
void cap(Attention& a) { a.softcap = 2; }
void mask(Attention& a) { a.mask = Tensor(nullptr, boolean, {1, 1, a.q.sizes[2], a.k.sizes[2]}); }

}  // namespace

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("up to 16 rows: a warp a block, where blocks are many or keys few") {
  CHECK(tile(1024, 12, 12, 64) == "16x16, 1, 2");
  CHECK(tile(528, 16, 128, 64) == "16x16, 1, 2");
  CHECK(tile(527, 16, 128, 64) == "16x32, 1, 1");
  CHECK(tile(1024, 12, 128, 128) == "16x32, 1, 1");
  CHECK(tile(1024, 12, 128, 200) == "16x16, 1, 1");
  CHECK(tile(264, 12, 128, 200) == "16x32, 1, 1");
  CHECK(tile(263, 12, 64, 200) == "16x16, 4, 3, key warps 4");
  CHECK(tile(263, 12, 65, 64) == "16x32, 4, 3, key warps 4, blocks 2");
  CHECK(tile(132, 12, 64, 64) == "16x32, 1, 1");
  CHECK(tile(131, 12, 64, 64) == "16x32, 4, 3, key warps 4, blocks 2");
  CHECK(tile(131, 12, 64, 64, Pass::forward, hide) == "16x32, 1, 1");
  CHECK(tile(8, 12, 16, 128) == "16x16, 1, 1");
  CHECK(tile(8, 12, 16, 256) == "16x16, 4, 3, key warps 4");
  CHECK(tile(8, 12, 16, 256, Pass::forward, hide) == "16x16, 1, 1");
  CHECK(tile(500, 4, 320, 64) == "16x64, 1, 1");
  CHECK(tile(500, 4, 321, 64) == "16x32, 4, 3, key warps 4, blocks 2");
  CHECK(tile(800, 4, 320, 64) == "16x32, 4, 3, key warps 4, blocks 2");
}

TEST_CASE("17 to 32 rows: two warps, or one of many blocks") {
  CHECK(tile(8, 24, 24, 64) == "32x32, 2, 1");
  CHECK(tile(8, 24, 128, 64) == "32x64, 2, 1");
  CHECK(tile(8, 24, 129, 64) == "16x16, 8, 2, key warps 8");
  CHECK(tile(8, 24, 8192, 64) == "16x16, 8, 2, key warps 8");
  CHECK(tile(8, 24, 8193, 64) == "32x32, 4, 3, key warps 4, blocks 2");
  CHECK(tile(8, 24, 129, 200) == "16x16, 4, 3, key warps 4");
  CHECK(tile(66, 24, 512, 64) == "32x64, 2, 1");
  CHECK(tile(66, 24, 513, 64) == "16x16, 8, 2, key warps 8");
  CHECK(tile(528, 24, 64, 64) == "32x32, 1, 1");
  CHECK(tile(528, 24, 64, 64, Pass::forward, cap) == "32x64, 2, 1");
  CHECK(tile(528, 24, 32, 128) == "32x32, 1, 1");
  CHECK(tile(528, 24, 64, 128) == "32x64, 2, 1");
  CHECK(tile(528, 24, 64, 256) == "32x32, 2, 1");
  // Four tiles and more have a tile map, and the tile that they had.
  CHECK(tile(528, 24, 192, 128, Pass::forward, mask) == "32x64, 2, 1");
  CHECK(tile(528, 24, 193, 128, Pass::forward, mask) != "32x64, 2, 1");
}

TEST_CASE(
    "33 and more rows above 192 columns: two warps where heads or rows are few, or pairs hidden") {
  CHECK(tile(65, 50, 512, 208) == "32x16, 2, 1");
  CHECK(tile(66, 50, 512, 208) == "64x64, 4, 1");
  CHECK(tile(133, 64, 64, 256) == "64x64, 4, 1");
  CHECK(tile(923, 48, 48, 256) == "32x16, 2, 1");
  CHECK(tile(924, 48, 48, 256) == "64x64, 4, 1");
  CHECK(tile(330, 64, 64, 240) == "64x64, 4, 1");
  CHECK(tile(330, 64, 64, 240, Pass::forward, hide) == "32x16, 2, 1");
  CHECK(tile(593, 60, 65, 224) == "64x64, 4, 1");
  CHECK(tile(594, 60, 65, 224) != "64x64, 4, 1");
}

TEST_CASE("33 to 64 rows: one stage, for more blocks a multiprocessor") {
  CHECK(tile(1583, 64, 512, 64) == "64x64, 4, 1, blocks 4");
  CHECK(tile(1584, 64, 512, 64) == "64x64, 4, 2, blocks 3");
  CHECK(tile(100, 64, 513, 64) == "64x64, 4, 2, blocks 3");
  CHECK(tile(100, 64, 100, 32) == "64x64, 4, 1, blocks 3");
  CHECK(tile(593, 64, 100, 128) == "64x64, 4, 1");
  CHECK(tile(594, 64, 100, 128) != "64x64, 4, 1");
  CHECK(tile(168, 66, 69, 64, Pass::forward, hide) == "32x32, 2, 1");
  CHECK(tile(300, 66, 69, 64) != "32x32, 2, 1");
}

TEST_CASE("33 to 96 rows: two warps, where heads are few or pairs hidden") {
  CHECK(tile(8, 40, 40, 128) == "32x32, 2, 1");
  CHECK(tile(8, 40, 97, 128) == "64x64, 4, 1");
  CHECK(tile(66, 40, 40, 128) == "64x64, 4, 1");
  CHECK(tile(160, 48, 40, 128, Pass::forward, hide) == "32x16, 2, 1");
  CHECK(tile(160, 49, 40, 128, Pass::forward, hide) == "32x32, 2, 1");
  CHECK(tile(264, 40, 40, 128, Pass::forward, hide) == "64x64, 4, 1");
  CHECK(tile(52, 90, 90, 128) == "32x32, 2, 1");
  CHECK(tile(53, 90, 90, 128) != "32x32, 2, 1");
  CHECK(tile(160, 90, 90, 96) == "32x32, 2, 1");
  CHECK(tile(160, 90, 90, 128) != "32x32, 2, 1");
  CHECK(tile(160, 90, 90, 128, Pass::forward, hide) == "32x32, 2, 1");
}

TEST_CASE("33 to 96 rows above 128 columns: four warps share the columns of few tiles") {
  CHECK(tile(22, 95, 95, 248) == "16x32, 4, 1, slices 4");
  CHECK(tile(23, 95, 95, 248) == "32x32, 4, 1, slices 2");
  CHECK(tile(88, 95, 95, 248) == "32x32, 4, 1, slices 2");
  CHECK(tile(89, 95, 95, 248) != "32x32, 4, 1, slices 2");
  CHECK(tile(12, 33, 128, 136) == "16x32, 4, 1, slices 4");
  CHECK(tile(12, 33, 129, 136) != "16x32, 4, 1, slices 4");
  CHECK(tile(12, 33, 33, 128) == "32x32, 2, 1");
}

TEST_CASE("more than 64 rows of few heads: four warps share out the keys of low tiles") {
  const auto shared = [](std::int64_t heads, std::int64_t length, std::int64_t dim,
                         Causal causal = Causal::none) {
    Attention a = attention({.batch = 1,
                             .heads_q = heads,
                             .heads_kv = heads,
                             .len_q = length,
                             .len_k = length,
                             .dim = dim});
    a.causal = causal;
    const CudaPlan plan = planned(problem(a), "sm_90");
    const CudaLaunch* const forward = launch_of(plan, Kernel::forward);
    return plan.splits == 1 && forward->config.tiling.rows == 16 &&
           forward->config.tiling.key_warps == 4;
  };
  CHECK(shared(16, 256, 64));
  CHECK_FALSE(shared(17, 256, 64));
  CHECK(shared(12, 512, 64));
  CHECK_FALSE(shared(13, 512, 64));
  CHECK(shared(4, 1200, 64));
  CHECK_FALSE(shared(4, 1216, 64));
  CHECK_FALSE(shared(4, 1200, 32));
  CHECK(shared(8, 800, 64, Causal::top_left));
  CHECK_FALSE(shared(8, 160, 64, Causal::top_left));
  CHECK(shared(4, 512, 128));
  CHECK_FALSE(shared(5, 512, 128));
  CHECK(shared(8, 256, 192));
  CHECK_FALSE(shared(8, 256, 192, Causal::top_left));
  CHECK(shared(2, 800, 256));
  CHECK_FALSE(shared(3, 800, 256));
  CHECK(tile(4, 400, 400, 80) == "16x16, 4, 3, key warps 4");
  CHECK(tile(4, 400, 400, 80, Pass::forward, mask) != "16x16, 4, 3, key warps 4");
}

TEST_CASE("narrow windows: low tiles up to 64 columns, except of many heads") {
  const auto window = [](std::int64_t heads, std::int64_t rows, std::int64_t left,
                         std::int64_t dim = 64) {
    Attention a = attention({.batch = 1,
                             .heads_q = heads,
                             .heads_kv = heads,
                             .len_q = rows,
                             .len_k = rows,
                             .dim = dim});
    a.window = {.left = left, .right = 0};
    const CudaPlan plan = planned(problem(a), "sm_90");
    const Tiling& t = launch_of(plan, Kernel::forward)->config.tiling;
    return plan.name() + " " + std::to_string(t.rows) + "x" + std::to_string(t.keys);
  };
  CHECK(window(41, 512, 159) == "cuda:mma 32x32");
  CHECK(window(42, 512, 159).substr(0, 10) == "cuda:wgmma");
  CHECK(window(41, 512, 160).substr(0, 10) == "cuda:wgmma");
  CHECK(window(41, 513, 159).substr(0, 10) == "cuda:wgmma");
  CHECK(window(41, 512, 159, 72).substr(0, 10) == "cuda:wgmma");
}

TEST_CASE("backward: tiles as small as the sequences") {
  CHECK(tile(8, 16, 16, 128, Pass::backward) == "16x16, 1, 1");
  CHECK(tile(8, 17, 16, 128, Pass::backward) == "32x32, 2, 1");
  CHECK(tile(528, 32, 32, 64, Pass::backward) == "32x32, 1, 1");
  CHECK(tile(527, 32, 32, 64, Pass::backward) == "32x32, 2, 1");
  CHECK(tile(528, 32, 32, 128, Pass::backward) == "32x32, 2, 1");
  CHECK(tile(8, 64, 64, 128, Pass::backward) == "64x64, 4, 1, slices 2");
  CHECK(tile(8, 65, 64, 128, Pass::backward) == "32x64, 4, 2");
}

TEST_CASE("packed sequences: low tiles, by their mean") {
  const auto tile_of = [](std::int64_t mean, std::int64_t longest, std::int64_t dim,
                          Causal causal = Causal::none, std::int32_t sequences = 200) {
    Attention a = attention({});
    a.q = a.k = a.v = Tensor(nullptr, bf16, {sequences * mean, 1, dim});
    for (Tensor* begins : {&a.cu_seqlens_q, &a.cu_seqlens_k}) {
      *begins = Tensor(nullptr, i32, {sequences + 1});
    }
    a.max_seqlen_q = a.max_seqlen_k = longest;
    a.causal = causal;
    const Tiling t = planned(problem(a), "sm_90").launches.front().config.tiling;
    return std::to_string(t.rows) + "x" + std::to_string(t.keys);
  };
  CHECK(tile_of(64, 128, 64) == "32x32");
  CHECK(tile_of(64, 129, 64) != "32x32");
  // Longer ones, where heads are few, and above 64 columns pairs are hidden.
  CHECK(tile_of(96, 128, 64) == "32x32");
  CHECK(tile_of(97, 128, 64) != "32x32");
  CHECK(tile_of(96, 128, 64, Causal::none, 396) != "32x32");
  CHECK(tile_of(96, 128, 128) != "32x32");
  CHECK(tile_of(96, 128, 128, Causal::top_left) == "32x32");
  CHECK(tile_of(140, 192, 64, Causal::top_left) == "64x64");
  CHECK(tile_of(97, 97, 64) != "32x32");  // all as long
  CHECK(tile_of(128, 128, 64, Causal::top_left) != "64x64");
  CHECK(tile_of(140, 192, 64) != "64x64");
  CHECK(tile_of(140, 193, 64, Causal::top_left) != "64x64");
  CHECK(tile_of(140, 192, 64, Causal::top_left, 264) != "64x64");
  CHECK(tile_of(40, 63, 192) == "32x32");
  CHECK(tile_of(32, 63, 192) == "16x16");
  CHECK(tile_of(32, 63, 192, Causal::none, 132) == "16x32");
  CHECK(tile_of(32, 63, 192, Causal::none, 133) == "16x16");
  CHECK(tile_of(32, 63, 128) == "32x32");
  // Above 192 columns where pairs are hidden, or heads many.
  CHECK(tile_of(32, 63, 200) == "64x64");
  CHECK(tile_of(32, 63, 200, Causal::top_left) == "32x32");
  CHECK(tile_of(32, 63, 200, Causal::none, 528) == "32x32");
}

TEST_CASE("backward: where a bias begins changes no choice") {
  const auto launches = [](const char* chip, Attention a, std::uintptr_t begin) {
    a.bias.data = reinterpret_cast<void*>(begin);
    Problem p = problem(a, Pass::backward);
    p.gradients_named = true;
    p.dbias = {};
    return planned(p, chip, "cuda:mma").launches.size();
  };
  for (const char* chip : {"sm_75", "sm_80", "sm_86"}) {
    for (std::int64_t dim = 16; dim <= 256; dim += 16) {
      for (const std::int64_t dim_v : {16, 64, 128, 256}) {
        for (const std::int64_t keys : {30, 60, 100, 128}) {
          for (const Type type : {f16, f32}) {
            const Shape shape{.type = f16, .len_q = 70, .len_k = keys, .dim = dim, .dim_v = dim_v};
            Attention a = attention(shape);
            a.bias = Tensor(nullptr, type, {2, 8, 70, keys});
            CAPTURE(dim);
            CAPTURE(dim_v);
            CAPTURE(keys);
            CHECK(launches(chip, a, 1 << 20) == launches(chip, a, (1 << 20) + 4));
          }
        }
      }
    }
  }
}

TEST_CASE("Hopper: mma for few heads of up to 64 rows") {
  const auto name = [](std::int64_t heads, std::int64_t rows, std::int64_t keys, std::int64_t dim,
                       Causal causal = Causal::none) {
    Attention a = attention({.batch = 1,
                             .heads_q = heads,
                             .heads_kv = heads,
                             .len_q = rows,
                             .len_k = keys,
                             .dim = dim});
    a.causal = causal;
    return planned(problem(a), "sm_90").name();
  };
  CHECK(name(395, 64, 512, 128) == "cuda:mma");
  CHECK(name(396, 64, 512, 128) == "cuda:wgmma");
  CHECK(name(593, 64, 512, 128, Causal::top_left) == "cuda:mma");
  CHECK(name(594, 64, 512, 128, Causal::top_left) == "cuda:wgmma");
  CHECK(name(263, 64, 512, 256) == "cuda:mma");
  CHECK(name(264, 64, 512, 256) == "cuda:wgmma");
  CHECK(name(146, 96, 128, 64, Causal::top_left) == "cuda:mma");
  CHECK(name(145, 96, 128, 64, Causal::top_left) == "cuda:wgmma");
  CHECK(name(528, 96, 128, 64, Causal::top_left) == "cuda:wgmma");
  CHECK(name(200, 97, 128, 64, Causal::top_left) == "cuda:wgmma");
}

TEST_SUITE_END();
