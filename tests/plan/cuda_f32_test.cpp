// Families and tiles of short f32 problems on an H100: what was fastest there, or within 10 %.
#include <string>

#include "plan/cuda/config_text.hpp"
#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

namespace {

constexpr const char* kLowest = "mma 16x16, 4 warps, slices 4";  // 132 of them at most
constexpr const char* kTwoWarps = "mma 32x16, 2 warps";
constexpr const char* kFourWarps = "mma 32x16, 4 warps, slices 2";

struct Sizes {
  std::int64_t batch, heads_q, heads_kv, rows, keys, dim;
};

std::string chosen(const Sizes& s, Pass pass, void (*change)(Attention&) = nullptr,
                   const char* backend = "") {
  Attention a = attention({.type = f32,
                           .batch = s.batch,
                           .heads_q = s.heads_q,
                           .heads_kv = s.heads_kv,
                           .len_q = s.rows,
                           .len_k = s.keys,
                           .dim = s.dim});
  if (change) change(a);
  const Problem p = problem(a, pass);
  const CudaPlan plan = planned(p, "sm_90", backend);
  check_sound(p, chip("sm_90"), plan);
  const CudaLaunch* const launch =
      launch_of(plan, pass == Pass::forward ? Kernel::forward : Kernel::backward);
  REQUIRE(launch);
  const Tiling& t = launch->config.tiling;
  return std::string(name_of(launch->config.family)) + " " + std::to_string(t.rows) + "x" +
         std::to_string(t.keys) + ", " + std::to_string(t.warps) + " warps" +
         (t.slices > 1 ? ", slices " + std::to_string(t.slices) : "");
}

std::string forward(const Sizes& s, void (*change)(Attention&) = nullptr) {
  return chosen(s, Pass::forward, change);
}
std::string backward(const Sizes& s, void (*change)(Attention&) = nullptr) {
  return chosen(s, Pass::backward, change);
}

void make_causal(Attention& a) { a.causal = Causal::bottom_right; }

// `all` rows of a batch of `sequences`.
template <std::int64_t all, std::int32_t sequences>
void pack(Attention& a) {
  const std::int64_t longest = a.q.sizes[2];
  for (Tensor* x : {&a.q, &a.k, &a.v}) *x = Tensor(nullptr, f32, {all, x->sizes[1], x->sizes[3]});
  for (Tensor* begins : {&a.cu_seqlens_q, &a.cu_seqlens_k}) {
    *begins = Tensor(nullptr, i32, {sequences + 1});
  }
  a.max_seqlen_q = a.max_seqlen_k = longest;
}

}  // namespace

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("f32 forward: higher tiles where they are many, and warps that share rows where few") {
  CHECK(forward({25, 4, 4, 144, 144, 64}) == "mma 32x32, 2 warps");
  CHECK(forward({4, 12, 12, 67, 214, 64}) == "mma 32x32, 2 warps");
  CHECK(forward({44, 8, 8, 82, 82, 88}) == "mma 32x32, 2 warps");
  CHECK(forward({4, 3, 3, 214, 214, 96}, make_causal) == kFourWarps);
  CHECK(forward({3, 16, 16, 48, 82, 96}) == kFourWarps);
  CHECK(forward({16, 23, 23, 77, 77, 192}, make_causal) == kTwoWarps);
  CHECK(forward({17, 3, 3, 292, 125, 152}) == "mma 64x16, 4 warps");
  CHECK(forward({8, 5, 5, 53, 53, 176}) == kFourWarps);
  CHECK(forward({8, 8, 8, 64, 64, 256}) == kFourWarps);
  CHECK(forward({11, 1, 1, 110, 110, 128}) == kLowest);
  CHECK(forward({20, 9, 9, 115, 115, 232}, make_causal) == "mma 64x16, 4 warps");
  CHECK(forward({56, 9, 9, 115, 115, 232}) == "mma 64x16, 4 warps");
}

TEST_CASE("f32 forward: wgmma, where the split into parts repays") {
  CHECK(forward({31, 54, 2, 211, 211, 104}) == "wgmma 128x48, 12 warps");
  CHECK(forward({11, 60, 5, 81, 81, 200}) == "wgmma 128x48, 12 warps");
  CHECK(forward({6, 128, 32, 315, 315, 224}) == "wgmma 128x48, 12 warps");
  CHECK(forward({4, 78, 13, 363, 363, 64}) == "wgmma 128x128, 12 warps");
  CHECK(forward({4, 4, 4, 3000, 120, 256}) == "wgmma 128x32, 12 warps");
  // 2048 rows are the most that the model is asked about.
  CHECK(forward({4, 1, 1, 675, 88, 200}) == kFourWarps);
  CHECK(forward({8, 2, 2, 1200, 60, 128}) == "mma 32x32, 2 warps");
  CHECK(forward({8, 32, 4, 2048, 144, 128}) == "wgmma 128x48, 12 warps");
  CHECK(forward({8, 32, 4, 2049, 144, 128}) == "wgmma 128x64, 12 warps");
  CHECK(forward({8, 16, 16, 65, 513, 256}) == "wgmma 128x32, 12 warps");
  CHECK(forward({8, 16, 16, 64, 513, 256}).substr(0, 3) == "mma");
}

TEST_CASE("f32 forward: packed sequences by their mean") {
  CHECK(forward({1, 10, 10, 67, 67, 160}, [](Attention& a) {
          make_causal(a);
          pack<30 * 38, 30>(a);
        }) == kTwoWarps);
  CHECK(forward({1, 28, 28, 277, 277, 128}, [](Attention& a) {
          make_causal(a);
          pack<13 * 129, 13>(a);
        }) == "mma 32x32, 2 warps");
  CHECK(forward({1, 14, 2, 303, 303, 200}, pack<13 * 200, 13>) == "wgmma 128x48, 12 warps");
}

TEST_CASE("f32 forward: the lowest tiles where all of them run at once") {
  CHECK(forward({1, 16, 16, 128, 128, 256}) == kLowest);
  CHECK(forward({1, 17, 17, 128, 128, 256}) != kLowest);
  CHECK(forward({1, 13, 13, 160, 160, 72}) == kLowest);
  CHECK(forward({1, 13, 13, 160, 161, 72}) != kLowest);
  CHECK(forward({1, 13, 13, 160, 160, 64}) != kLowest);
}

TEST_CASE("f32 forward: the model is of three products of tf32, and knows no positions") {
  const auto tf32 = [](Attention& a) { a.precision = Precision::tf32; };
  CHECK(chosen({8, 28, 28, 160, 160, 128}, Pass::forward, tf32) != kTwoWarps);
  const auto positions = [](Attention& a) {
    a.q_positions = Tensor(nullptr, i32, {2});
    a.causal = Causal::top_left;
  };
  CHECK(forward({8, 28, 28, 160, 160, 128}, positions).substr(0, 5) == "wgmma");
}

TEST_CASE("f32 backward above 128 columns: by the waves of blocks, and their steps") {
  CHECK(backward({11, 60, 5, 81, 81, 200}) == "mma 32x64, 8 warps, slices 2");
  CHECK(backward({10, 31, 31, 108, 108, 224}, make_causal) == "mma 32x64, 8 warps, slices 2");
  CHECK(backward({16, 23, 23, 77, 77, 192}, make_causal) == "mma 32x32, 4 warps, slices 2");
  CHECK(backward({9, 15, 15, 154, 154, 168}) == "mma 32x32, 4 warps, slices 2");
  CHECK(backward({4, 8, 8, 64, 64, 232}, make_causal) == "mma 64x32, 8 warps, slices 4");
  CHECK(backward({2, 5, 5, 429, 429, 144}, make_causal) == "mma 64x32, 8 warps, slices 4");
  CHECK(backward({4, 48, 16, 59, 258, 184}) == "mma 64x32, 8 warps, slices 4");
}

TEST_SUITE_END();
