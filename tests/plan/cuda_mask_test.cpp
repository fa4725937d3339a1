// How kernels for a GPU read a dense mask.
#include <initializer_list>
#include <string>

#include "tests/plan/cuda_case.hpp"

using namespace regard;
using namespace regard::cuda_case;

TEST_SUITE_BEGIN("cuda_plan");

TEST_CASE("a mask is copied by as many bytes as its rows allow") {
  const auto config = [](const Attention& a) {
    return planned(problem(a), "sm_80").launches.front().config;
  };
  Attention a = attention({});
  a.mask = Tensor(nullptr, boolean, {1, 1, 1024, 1024});
  CHECK(config(a).mask.copy_bytes == 16);
  for (const int bytes : {8, 4, 2, 1}) {
    a.mask.strides[2] = 1024 + bytes;
    CHECK(config(a).mask.copy_bytes == (bytes >= 4 ? bytes : 1));
  }
  CHECK(says(planned(problem(a), "sm_80"), "slow path: the tile map is made of the mask's bytes"));
  a.mask.strides = {0, 0, -1040, 1};
  CHECK(config(a).mask.copy_bytes == 16);
  a.mask.strides = {0, 0, 1024, -1};
  CHECK(config(a).mask.copy_bytes == 1);
}

TEST_CASE("a mask is read as bits, except where they would take more memory than it does") {
  const auto why = [](Attention a, std::initializer_list<std::int64_t> sizes, const char* text) {
    a.mask = Tensor(nullptr, boolean, sizes);
    const CudaPlan plan = planned(problem(a));
    const KernelConfig& main = launch_of(plan, Kernel::forward)->config;
    CHECK(main.tile_map);
    CHECK(main.mask.as_bits == (std::string(text).find("a bit for each pair") == 0));
    CHECK(says(plan, text));
  };
  constexpr const char* kBits = "a bit for each pair, made with the tile map";
  why(attention({}), {1, 1, 1024, 1024}, kBits);
  why(attention({.batch = 3}), {3, 8, 1024, 1024}, kBits);
  why(attention({}), {1, 1, 1, 1024}, "all rows share it");
  why(attention({}), {1, 1, 1024, 1}, "all keys share it");
  constexpr std::int64_t kLong = 65536;
  why(attention({.batch = 1, .len_q = kLong, .len_k = kLong}), {1, 1, kLong, kLong},
      "more than 256 MB");
  Attention lengths = attention({.batch = 16});
  lengths.seqused_k = Tensor(nullptr, i32, {16});
  why(lengths, {1, 1, 1024, 1024}, "more memory than it does");
  why(lengths, {16, 1, 1024, 1024}, kBits);
}

TEST_SUITE_END();
