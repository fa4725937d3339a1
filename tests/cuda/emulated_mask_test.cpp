// A Mask on the emulated GPU: the library's own calls, whose kernels run on the CPU, compute the
// bits that they compute from the tensors, and read the maps that were made before.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cuda/fake.hpp"
#include "tests/cuda/layer_case.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

bool has_wgmma() { return cuda_setup().devices.at(0).chip == "sm_90"; }

// Of the chip's newest family, which the planner would leave to large problems.
struct NewestLayer : Layer {
  explicit NewestLayer(const LayerSizes& sizes = {}, unsigned seed = 1) : Layer(sizes, seed) {
    run.backend = has_wgmma() ? "cuda:wgmma" : "cuda:mma";
  }
};

// Two layers of equal data: one with the tensors, one with the Mask. Both passes of the second
// launch one kernel less, and write the same bytes.
void check_layer(const FakeCuda& fake, Layer& tensors, Layer& shared, const DeviceMask& mask) {
  shared.a = mask.in(shared.a);
  for (Layer* layer : {&tensors, &shared}) layer->clear_results();
  const std::string before = tensors.results();
  tensors.clear_results();
  fake.clear();
  const std::string wanted = tensors.results();
  const std::size_t launches = fake.machine->launches.size();
  CHECK(wanted == before);  // or equal bits prove nothing
  fake.clear();
  const std::string got = shared.results();
  CHECK(fake.machine->launches.size() == launches - 2);
  CHECK(got == wanted);
}

std::vector<float> lse_of(const Layer& layer) {
  std::vector<float> lse(std::size_t(layer.s.batch * layer.s.heads_q * layer.s.len_q));
  std::memcpy(lse.data(), layer.part(4), lse.size() * sizeof(float));
  return lse;
}

}  // namespace

TEST_SUITE_BEGIN("emulated_mask");

TEST_CASE("layers with a Mask compute what they compute with its tensors") {
  const FakeCuda fake;
  NewestLayer first;
  std::vector<std::uint8_t> bits;
  SUBCASE("spans of rows") {}
  SUBCASE("with a bool mask, and real lengths of sequences") {
    first.a.causal = Causal::bottom_right;
  }
  const bool has_more = first.a.causal != Causal::none;
  const auto complete = [&](Layer& layer) {
    if (!has_more) return;
    const LayerSizes& s = layer.s;
    auto* const shown = reinterpret_cast<std::uint8_t*>(first.part(11));
    for (std::int64_t n = 0; n < s.len_q * s.len_k; ++n) shown[n] = n % 5 != 0 || n % 3 == 0;
    auto* const lengths = reinterpret_cast<std::int32_t*>(first.part(10));
    const std::int32_t used[] = {270, 201, 300, 130};
    std::memcpy(lengths, used, sizeof used);
    layer.a.mask = Tensor(shown, boolean, {s.len_q, s.len_k});
    layer.a.seqused_q = Tensor(lengths, i32, {2});
    layer.a.seqused_k = Tensor(lengths + 2, i32, {2});
    layer.a.causal = Causal::bottom_right;
  };
  complete(first);
  const DeviceMask mask(first.a, first.run);
  const std::string made(static_cast<const char*>(mask.memory.data()), mask.bytes);
  for (const unsigned seed : {1u, 2u}) {
    NewestLayer tensors({}, seed), shared({}, seed);
    complete(tensors);
    complete(shared);
    check_layer(fake, tensors, shared, mask);
  }
  // Calls read the maps and leave them as they are.
  CHECK(std::string(static_cast<const char*>(mask.memory.data()), mask.bytes) == made);
}

TEST_CASE("the calls read the memory of the Mask") {
  const FakeCuda fake;
  NewestLayer layer;
  const DeviceMask mask(layer.a, layer.run);
  layer.a = mask.in(layer.a);
  layer.forward();
  for (const float x : lse_of(layer)) REQUIRE(std::isfinite(x));
  std::memset(mask.memory.data(), 0, mask.bytes);  // every tile is hidden
  layer.forward();
  // Kernels may visit the first tile of keys in any case, of which the last document sees none.
  const std::vector<float> lse = lse_of(layer);
  for (std::size_t row = 0; row < lse.size(); ++row) {
    if (std::int64_t(row) % layer.s.len_q >= 200) REQUIRE(lse[row] == -INFINITY);
  }
}

TEST_CASE("a layer of another head size makes maps of its own") {
  const FakeCuda fake;
  NewestLayer layer;
  const DeviceMask mask(layer.a, layer.run);
  std::memset(mask.memory.data(), 0, mask.bytes);  // would hide everything
  const LayerSizes wide{.dim = 192};
  NewestLayer other(wide);
  other.forward();
  const std::vector<float> wanted = lse_of(other);
  other.clear_results();
  other.a = mask.in(other.a);
  fake.clear();
  other.forward();
  CHECK(explain(other.a, Pass::forward, other.run).text.find("made by the call itself") !=
        std::string::npos);
  CHECK(lse_of(other) == wanted);
}

TEST_CASE("a recorded call has the tensors of its Mask") {
  const FakeCuda fake;
  const char* const file = std::getenv("REGARD_RECORD");
  REQUIRE(file);
  NewestLayer layer;
  const DeviceMask mask(layer.a, layer.run);
  layer.a = mask.in(layer.a);
  layer.a.softcap = 3;  // kernels that no other call of these tests has
  layer.run.gradients_follow = true;
  std::ofstream(file).close();
  layer.forward();
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  CHECK(text.str().find("\"row_spans\": {\"type\": \"i32\"") != std::string::npos);
  CHECK(text.str().find("\"softcap\": 3") != std::string::npos);
  CHECK(text.str().find("\"gradients_follow\": true") != std::string::npos);
}

TEST_CASE("an order of tiles that was made before") {
  const FakeCuda fake;
  if (!has_wgmma()) return;  // other kernels have no order
  const LayerSizes sizes{.batch = 1, .heads_q = 1, .len_q = 64 * 128 + 5, .len_k = 300};
  NewestLayer tensors(sizes), shared(sizes);
  const DeviceMask mask(tensors.a, tensors.run);
  shared.a = mask.in(shared.a);
  const std::string text = explain(shared.a, Pass::forward, shared.run).text;
  CHECK(text.find("tile map: that of the Mask") != std::string::npos);
  const std::size_t size = workspace(tensors.a, tensors.outputs, tensors.run);
  const DeviceBytes memory(0, size);
  tensors.run.workspace = {.data = memory.data(), .size = size};
  fake.clear();
  tensors.forward();
  const std::uint64_t* const own = fake.machine->launches[0].params.buffers.tile_map;
  shared.forward();
  CHECK(lse_of(shared) == lse_of(tensors));
  // The map has a word of each of 65 tiles; behind them are their counts and their order.
  const std::size_t tiles = 65, words = tiles + tiles;
  CHECK(std::memcmp(own, mask.memory.data(), words * 8) == 0);
  const auto* const order = static_cast<const std::int32_t*>(mask.memory.data()) + 3 * tiles;
  bool is_sorted = true;
  for (std::size_t rank = 0; rank < tiles; ++rank) {
    is_sorted = is_sorted && order[rank] == std::int32_t(rank);
  }
  CHECK(!is_sorted);  // the tiles that begin or end a document have fewer keys, or more
}

TEST_SUITE_END();
