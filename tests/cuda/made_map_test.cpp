// A Mask on a GPU: its maps are made once, calls read them, and what they do not serve makes its
// own. The driver writes down what is launched and runs nothing.
#include <algorithm>
#include <string>
#include <thread>

#include "tests/cuda/fake.hpp"
#include "tests/cuda/layer_case.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

bool makes_map(const fake::Launch& launch) {
  return launch.image.find("Kernel::row_map") != std::string::npos ||
         launch.image.find("Kernel::key_map") != std::string::npos;
}

// Of the launches since the last clear().
int maps_made(const FakeCuda& fake) {
  const auto& launches = fake.machine->launches;
  return int(std::count_if(launches.begin(), launches.end(), makes_map));
}

// Where the kernels of the last call find the map.
const void* map_read(const FakeCuda& fake) {
  return fake.machine->launches.back().params.buffers.tile_map;
}

bool is_in(const void* pointer, const DeviceMask& mask) {
  const auto* const at = static_cast<const char*>(pointer);
  const auto* const begin = static_cast<const char*>(mask.memory.data());
  return at >= begin && at < begin + mask.bytes;
}

// Of the passes of a layer, how many made a map of their own.
int own_maps(const FakeCuda& fake, const Layer& layer) {
  fake.clear();
  layer.forward();
  layer.backward();
  return maps_made(fake);
}

bool says_shared(const Layer& layer, Pass pass) {
  const std::string text = explain(layer.a, pass, layer.run).text;
  const bool shared = text.find("tile map: that of the Mask") != std::string::npos;
  const bool own = text.find("tile map: made by the call itself") != std::string::npos;
  CHECK(shared != own);
  CHECK(shared == (text.find("_map") == std::string::npos));  // the launch
  return shared;
}

}  // namespace

TEST_SUITE_BEGIN("cuda");

TEST_CASE("the maps of a Mask are made once for the calls of many layers") {
  const FakeCuda fake;
  const EmptyCache cache;
  fake::Stream* const stream = fake.stream(fake.context(0));
  for (const char* backend : {"cuda:wgmma", "cuda:mma"}) {
    CAPTURE(backend);
    Layer layer;
    layer.run.backend = backend;
    layer.run.stream = stream;
    CHECK(own_maps(fake, layer) == 2);
    const std::size_t plain = fake.machine->launches.size();
    fake.clear();
    const DeviceMask mask(layer.a, layer.run);
    CHECK(maps_made(fake) == 2);
    CHECK(fake.machine->launches.size() == 2);
    for (const fake::Launch& launch : fake.machine->launches) {
      CHECK(launch.stream == stream);
      CHECK(is_in(launch.params.buffers.tile_map, mask));
      CHECK(launch.params.nonce != 0);
    }
    const void* const forward_map = fake.machine->launches[0].params.buffers.tile_map;
    const void* const backward_map = fake.machine->launches[1].params.buffers.tile_map;
    CHECK(forward_map != backward_map);
    fake.clear();
    for (unsigned n = 0; n < 4; ++n) {
      Layer other({}, n);
      other.run = layer.run;
      other.a = mask.in(other.a);
      other.forward();
      CHECK(map_read(fake) == forward_map);
      other.backward();
      CHECK(map_read(fake) == backward_map);
      CHECK(says_shared(other, Pass::forward));
      CHECK(says_shared(other, Pass::backward));
    }
    CHECK(maps_made(fake) == 0);
    CHECK(fake.machine->launches.size() == 4 * (plain - 2));
    // The plan that both kinds of calls share.
    CHECK(own_maps(fake, layer) == 2);
    CHECK(!is_in(map_read(fake), mask));
  }
}

TEST_CASE("a call whose tiles, order or tables differ makes its own map") {
  const FakeCuda fake;
  const EmptyCache cache;
  const LayerSizes sizes;
  Layer layer;
  const DeviceMask mask(layer.a, layer.run);
  const auto layer_with = [&](auto change) {
    Layer other;
    other.a = mask.in(other.a);
    change(other);
    return own_maps(fake, other);
  };
  CHECK(layer_with([](Layer&) {}) == 0);
  CHECK(layer_with([](Layer& l) { l.a.softcap = 3; }) == 0);
  CHECK(layer_with([](Layer& l) { l.a.dropout.p = 0.5; }) == 0);
  CHECK(layer_with([](Layer& l) { l.a.sink = Tensor(l.part(10), f32, {2}); }) == 0);
  // Not ordered, so that the map has no intervals.
  CHECK(layer_with([](Layer& l) { l.a.causal = Causal::top_left; }) == 0);
  CHECK(layer_with([](Layer& l) { l.run.backend = "cuda:mma"; }) > 0);
  LayerSizes wide = sizes;
  wide.dim = 256;
  Layer other(wide);
  other.a = mask.in(other.a);
  CHECK(own_maps(fake, other) == 2);
  CHECK(!is_in(map_read(fake), mask));
  CHECK(!says_shared(other, Pass::forward));
  CHECK(!says_shared(other, Pass::backward));
  // Kernels that read no map.
  CHECK(layer_with([](Layer& l) { l.run.backend = "cuda:simt"; }) == 0);
  CHECK(!is_in(map_read(fake), mask));
}

TEST_CASE("a map with an order of tiles serves calls with the same intervals") {
  const FakeCuda fake;
  const EmptyCache cache;
  Layer layer({.batch = 1, .len_q = 64 * 256, .len_k = 64 * 256, .dim = 64});
  layer.a.deterministic = false;
  layer.a.causal = Causal::top_left;
  fake.clear();
  const DeviceMask mask(layer.a, layer.run);
  const auto& launches = fake.machine->launches;
  REQUIRE(launches.size() == 2);
  for (const fake::Launch& launch : launches) {
    CHECK(launch.image.find(".tile_order = true") != std::string::npos);
  }
  layer.a = mask.in(layer.a);
  CHECK(own_maps(fake, layer) == 0);
  layer.a.window.left = 5000;
  CHECK(own_maps(fake, layer) == 2);
  CHECK(!says_shared(layer, Pass::forward));
  layer.a.window.left = -1;
  layer.a.causal = Causal::none;
  CHECK(own_maps(fake, layer) == 2);
  layer.a.causal = Causal::top_left;
  CHECK(own_maps(fake, layer) == 0);
  layer.a.deterministic = true;  // the backward pass has another order
  CHECK(own_maps(fake, layer) == 1);
}

TEST_CASE("a map of sequences serves calls with the same tables") {
  const FakeCuda fake;
  const EmptyCache cache;
  Layer layer;
  auto* const lengths = reinterpret_cast<std::int32_t*>(layer.part(10));
  layer.a.seqused_k = Tensor(lengths, i32, {2});
  const DeviceMask mask(layer.a, layer.run);
  layer.a = mask.in(layer.a);
  CHECK(own_maps(fake, layer) == 0);
  CHECK(says_shared(layer, Pass::forward));
  layer.a.seqused_k.data = lengths + 16;
  CHECK(own_maps(fake, layer) == 2);
  layer.a.seqused_k = {};
  CHECK(own_maps(fake, layer) == 2);
  CHECK(!says_shared(layer, Pass::forward));
  Attention a = layer.a;
  a.visible = {};
  a.row_spans = Tensor(layer.part(9), i32, {layer.s.len_q, 2});
  a.seqused_k = Tensor(nullptr, i32, {2});
  CHECK(mask_memory(a, layer.run) > 0);
  CHECK(error_of([&] { (void)make_mask(a, {}, layer.run); }).argument() == "seqused_k");
}

TEST_CASE("the memory of a Mask is checked") {
  const FakeCuda fake;
  const EmptyCache cache;
  Layer layer;
  const std::size_t bytes = mask_memory(layer.a, layer.run);
  REQUIRE(bytes > 0);
  const DeviceBytes memory(0, bytes + 256), elsewhere(1, bytes);
  alignas(256) static char host[256];
  fake.clear();
  const auto refused = [&](void* data, std::size_t size) {
    return error_of([&] { (void)make_mask(layer.a, {.data = data, .size = size}, layer.run); });
  };
  CHECK(std::string(refused(nullptr, 0).what()) ==
        "memory.size = 0: must be at least " + std::to_string(bytes) + " bytes");
  CHECK(refused(memory.data(), bytes - 1).argument() == "memory.size");
  CHECK(refused(nullptr, bytes).argument() == "memory.data");
  CHECK(refused(static_cast<char*>(memory.data()) + 16, bytes).argument() == "memory.data");
  CHECK(refused(host, bytes).argument() == "memory.data");
  CHECK(refused(elsewhere.data(), bytes).argument() == "memory.data");
  void* const spans = layer.a.row_spans.data;
  layer.a.row_spans.data = host;
  CHECK(refused(memory.data(), bytes).argument() == "row_spans");
  layer.a.row_spans.data = spans;
  CHECK(fake.machine->launches.empty());
  fake.machine->failures["cuLaunchKernelEx"] = fake::kLaunchFailed;
  const Error failure = refused(memory.data(), bytes);
  CHECK(failure.code() == Code::device_failure);
  CHECK(std::string(failure.what()).find("row_map") != std::string::npos);
}

TEST_CASE("a Mask whose memory was freed is refused") {
  const FakeCuda fake;
  const EmptyCache cache;
  Layer layer;
  Attention shared;
  {
    const DeviceMask mask(layer.a, layer.run);
    shared = mask.in(layer.a);
  }
  layer.a = shared;
  CHECK(error_of([&] { layer.forward(); }).argument() == "visible");
}

TEST_CASE("a Mask is for one device") {
  const FakeCuda fake;
  const EmptyCache cache;
  Layer layer;
  const DeviceMask mask(layer.a, layer.run);
  layer.a = mask.in(layer.a);
  layer.run.device = cuda(1);
  const Error error = error_of([&] { layer.forward(); });
  CHECK(std::string(error.what()) == "visible = a Mask on cuda:0: the call is on cuda:1");
  CHECK(error_of([&] { layer.backward(); }).argument() == "visible");
  CHECK(error_of([&] { (void)explain(layer.a, Pass::forward, layer.run); }).argument() ==
        "visible");
  CHECK(error_of([&] { (void)workspace(layer.a, Pass::forward, layer.run); }).argument() ==
        "visible");
  CHECK(error_of([&] { prepare(layer.a, Pass::forward, layer.run); }).argument() == "visible");
}

TEST_CASE("a Mask for a chip is for explanations") {
  const Tensor q(nullptr, bf16, {1, 8, 4096, 128});
  const std::int32_t spans[2] = {0, 100};
  Attention a{.q = q, .k = q, .v = q, .row_spans = Tensor(spans, i32, {2})};
  const Run run{.device = chip("sm_90")};
  CHECK(mask_memory(a, run) > 0);
  a.visible = make_mask(a, {}, run);
  a.row_spans = {};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    CHECK(explain(a, pass, run).text.find("tile map: that of the Mask") != std::string::npos);
  }
  a.q.type = a.k.type = a.v.type = f64;
  const std::string text = explain(a, Pass::forward, run).text;
  CHECK(text.find("cuda:simt") != std::string::npos);
  CHECK(text.find("that of the Mask") == std::string::npos);
}

TEST_CASE("making a Mask waits for nothing, also while a stream is captured") {
  const FakeCuda fake;
  const EmptyCache cache;
  Layer layer;
  auto* const stream = fake.stream(fake.context(0));
  layer.run.stream = stream;
  const DeviceBytes memory(0, mask_memory(layer.a, layer.run));
  const Workspace given{.data = memory.data(), .size = mask_memory(layer.a, layer.run)};
  fake.clear();
  fake.capture(stream, true);
  const Mask mask = make_mask(layer.a, given, layer.run);
  fake.capture(stream, false);
  CHECK(mask.given());
  CHECK(!fake.machine->broken_capture);
  CHECK(fake.machine->launches.size() == 2);
  for (const char* waits : {"cuCtxSynchronize", "cuStreamSynchronize", "cuMemAlloc", "cuMemFree",
                            "cuMemAllocAsync", "cuMemcpyHtoD", "cuMemcpyDtoH"}) {
    CHECK_MESSAGE(fake.machine->calls[waits] == 0, waits);
  }
}

TEST_CASE("threads share a Mask") {
  const FakeCuda fake;
  const EmptyCache cache;
  Layer layer;
  const DeviceMask mask(layer.a, layer.run);
  fake.clear();
  std::vector<std::thread> threads;
  for (unsigned n = 0; n < 4; ++n) {
    threads.emplace_back([&, n] {
      Layer own({}, n);
      own.a = mask.in(own.a);
      for (int i = 0; i < 10; ++i) own.forward(), own.backward();
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(maps_made(fake) == 0);
}

TEST_SUITE_END();
