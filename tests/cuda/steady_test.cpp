// What a call costs that is like the one before it: driver calls and allocations, to the last one,
// on a GPU and on the CPU.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "regard/regard.h"
#include "tests/cuda/allocations.hpp"
#include "tests/cuda/fake.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

template <class Call>
int allocations_of(const Call& call) {
  const int before = allocations;
  call();
  return allocations - before;
}

// "cuCtxGetId 1, cuLaunchKernelEx 2"
template <class Call>
std::string driver_calls(const FakeCuda& fake, const Call& call) {
  fake.clear();
  call();
  std::string text;
  for (const auto& [name, count] : fake.machine->calls) {
    if (count > 0) text += (text.empty() ? "" : ", ") + name + " " + std::to_string(count);
  }
  return text;
}

template <class Call>
int steady_allocations(const FakeCuda& fake, const Call& call) {
  fake.machine->is_recording = false;
  const int count = allocations_of(call);
  fake.machine->is_recording = true;
  return count;
}

template <class Call>
double microseconds(const Call& call) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < 200; ++i) call();
    best = std::min(best, std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  return best / 200;
}

const std::string kContext = "cuCtxGetCurrent 1, cuCtxGetDevice 1, cuCtxGetId 1, ";
const std::string kStream = ", cuStreamGetCtx 1";

// On a stream of the context that is current, as frameworks call.
struct OnStream {
  explicit OnStream(const FakeCuda& fake) : fake_(fake), context(fake.context(0)) {
    fake.push(context);
  }
  ~OnStream() {
    fake::Context* popped = nullptr;
    fake_.pop(&popped);
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

  const FakeCuda& fake_;
  fake::Context* const context;
};

}  // namespace

TEST_SUITE_BEGIN("steady");

TEST_CASE("a steady call on a GPU") {
  const FakeCuda fake;
  const EmptyCache cache;
  const OnStream place(fake);
  DeviceCase c;
  c.run.stream = fake.stream(place.context);
  std::string forward, backward;
  SUBCASE("dense: mma forward, wgmma backward") {
    forward = "cuLaunchKernelEx 1, cuPointerGetAttributes 1";
    backward =
        "cuLaunchKernelEx 3, cuMemAllocFromPoolAsync 1, cuMemFreeAsync 1, cuPointerGetAttributes 1";
  }
  SUBCASE("causal") {
    c.a.causal = Causal::bottom_right;
    forward = "cuLaunchKernelEx 1, cuPointerGetAttributes 1";
    backward =
        "cuLaunchKernelEx 3, cuMemAllocFromPoolAsync 1, cuMemFreeAsync 1, cuPointerGetAttributes 1";
  }
  SUBCASE("dropout, with another seed in each call") {
    c.a.dropout = {.p = 0.5, .seed = 1};
    forward = "cuLaunchKernelEx 1, cuPointerGetAttributes 1";
    backward =
        "cuLaunchKernelEx 3, cuMemAllocFromPoolAsync 1, cuMemFreeAsync 1, cuPointerGetAttributes 1";
  }
  const DeviceBytes seeds(0, 16);
  SUBCASE("dropout, with another seed in memory in each call") {
    c.a.dropout = {.p = 0.5, .seed_words = reinterpret_cast<const std::uint32_t*>(seeds.data())};
    forward = "cuLaunchKernelEx 1, cuPointerGetAttributes 2";
    backward =
        "cuLaunchKernelEx 3, cuMemAllocFromPoolAsync 1, cuMemFreeAsync 1, cuPointerGetAttributes 2";
  }
  for (int i = 0; i < 2; ++i) c.forward(), c.backward();
  ++c.a.dropout.seed;
  if (c.a.dropout.seed_words) ++c.a.dropout.seed_words, ++c.a.dropout.offset;
  CHECK(driver_calls(fake, [&] { c.forward(); }) == kContext + forward + kStream);
  CHECK(driver_calls(fake, [&] { c.backward(); }) == kContext + backward + kStream);
  // The tests' own driver allocates where it makes a workspace.
  const DeviceBytes memory(0, c.backward_workspace());
  c.run.workspace = {.data = memory.data(), .size = c.backward_workspace()};
  CHECK(steady_allocations(fake, [&] { c.forward(); }) == 0);  // sanitizers: always
  CHECK(steady_allocations(fake, [&] { c.backward(); }) == 0);
}

TEST_CASE("tensors that moved: maps are patched, and each allocation is asked about") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  c.backward();
  c.backward();
  const DeviceBytes q(0, DeviceCase::kBytes), dv(0, DeviceCase::kBytes);
  c.a.q.data = q.data();
  c.gradients.dv.data = dv.data();
  fake.clear();
  c.backward();
  CHECK(fake.machine->calls["cuTensorMapEncodeTiled"] == 0);
  CHECK(fake.machine->calls["cuTensorMapReplaceAddress"] == 2);
  CHECK(fake.machine->calls["cuPointerGetAttributes"] == 3);
  const auto main = std::find_if(fake.machine->launches.begin(), fake.machine->launches.end(),
                                 [](const fake::Launch& l) { return !l.mapped.empty(); });
  REQUIRE(main != fake.machine->launches.end());
  CHECK(main->params.problem.q.data == q.data());
  const std::vector<const void*> mapped{q.data(),           c.a.k.data,          c.a.v.data,
                                        c.inputs.dout.data, c.gradients.dk.data, dv.data()};
  CHECK(main->mapped == mapped);
}

TEST_CASE("tensors of another alignment are another problem") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const auto families = [&] {
    fake.clear();
    c.backward();
    std::string text;
    for (const fake::Launch& l : fake.machine->launches) text += l.mapped.empty() ? "-" : "m";
    return text;
  };
  const std::string aligned = families();
  CHECK(aligned.find('m') != std::string::npos);
  const DeviceBytes moved(0, DeviceCase::kBytes + 16);
  void* const before = c.a.k.data;
  c.a.k.data = static_cast<char*>(moved.data()) + 8;
  CHECK(families().find('m') == std::string::npos);  // what TMA cannot load
  c.a.k.data = before;
  CHECK(families() == aligned);
}

TEST_CASE("memory that was freed after a call is refused by the next") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  {
    const DeviceBytes k(0, DeviceCase::kBytes);
    c.a.k.data = k.data();
    for (int i = 0; i < 3; ++i) c.forward();
  }
  CHECK(error_of([&] { c.forward(); }).argument() == "k");
}

TEST_CASE("a driver that knows no mappings is asked about each address alone") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  c.forward();
  fake.clear();
  fake.machine->knows_mappings = false;
  c.forward();
  CHECK(fake.machine->calls["cuPointerGetAttributes"] == 2 * 5);
  static char host[DeviceCase::kBytes];
  c.a.v.data = host;
  CHECK(error_of([&] { c.forward(); }).argument() == "v");
}

TEST_CASE("what the environment forces counts in the next call") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const auto family = [&] {
    fake.clear();
    c.forward();
    const std::string& image = fake.machine->launches.back().image;
    const std::size_t at = image.find("Family::");
    return image.substr(at, image.find_first_of(",)", at) - at);
  };
  CHECK(family() == "Family::mma");
  setenv("REGARD_BACKEND", "cuda:simt", 1);
  CHECK(family() == "Family::simt");
  CHECK(family() == "Family::simt");
  unsetenv("REGARD_BACKEND");
  CHECK(family() == "Family::mma");
}

TEST_CASE("more problems in turn than a thread keeps") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  for (int round = 0; round < 2; ++round) {
    for (std::int64_t left = 0; left < 40; ++left) {
      c.a.window.left = left;
      fake.clear();
      c.forward();
      CHECK(fake.machine->launches.front().params.problem.mask_params.left == left);
      CHECK(fake.machine->calls["cuModuleLoadDataEx"] <= (round == 0 ? 2 : 0));
    }
  }
}

TEST_CASE("workspaces come from a pool that keeps its memory until it is trimmed") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const std::size_t pools = fake.machine->pools.size();
  c.run.stream = fake.stream(fake.context(0));  // a pool for each context
  c.backward();
  REQUIRE(fake.machine->pools.size() == pools + 1);
  const fake::Pool& pool = fake.machine->pools.back();
  CHECK(pool.device == 0);
  CHECK(pool.kept == c.backward_workspace());
  cuda_memory::synchronize(0);
  CHECK(pool.kept == c.backward_workspace());
  c.backward();
  CHECK(fake.machine->pools.size() == pools + 1);
  CHECK(pool.kept == c.backward_workspace());
  fake.push(static_cast<fake::Stream*>(c.run.stream)->context);
  cuda_memory::trim(0);
  fake::Context* popped = nullptr;
  fake.pop(&popped);
  CHECK(pool.kept == 0);
  CHECK(error_of([] { cuda_memory::trim(2); }).argument() == "device");
  c.backward();
  CHECK(pool.kept == c.backward_workspace());
  fake.push(static_cast<fake::Stream*>(c.run.stream)->context);
  CHECK(regard_trim_memory(0) == REGARD_OK);
  fake.pop(&popped);
  CHECK(pool.kept == 0);
  CHECK(regard_trim_memory(2) == REGARD_UNAVAILABLE);
}

TEST_CASE("a driver that makes no pool") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  c.run.stream = fake.stream(fake.context(0));
  fake.machine->failures["cuMemPoolCreate"] = fake::kInvalid;
  c.backward();
  CHECK(fake.machine->calls["cuMemAllocAsync"] == 1);
  CHECK(fake.machine->calls["cuMemFreeAsync"] == 1);
}

TEST_CASE("a steady call on the CPU") {
  std::vector<float> memory(1 << 16);
  const auto rows = [&](std::size_t at) { return Tensor(&memory[at << 12], f32, {1, 2, 1, 64}); };
  Attention a{.q = rows(0), .k = rows(1), .v = rows(2)};
  const Tensor lse(&memory[3 << 12], f32, {1, 2, 1});
  const Run run{.threads = 1};
  const auto forward = [&] { regard::forward(a, {.out = rows(4), .lse = lse}, run); };
  const auto backward = [&] {
    regard::backward(a, {.out = rows(4), .lse = lse, .dout = rows(5), .dlse = {}},
                     {.dq = rows(6), .dk = rows(7), .dv = rows(8), .dbias = {}, .dsink = {}}, run);
  };
  forward();
  backward();
  // The workspace, the batch, the tasks; backward also where runs of tasks begin, and a run.
  CHECK(allocations_of(forward) == (kCountsAllocations ? 3 : 0));
  CHECK(allocations_of(backward) == (kCountsAllocations ? 5 : 0));
  MESSAGE("forward ", microseconds(forward), " us, backward ", microseconds(backward), " us");
}

TEST_CASE("what a call costs the host") {
  const FakeCuda fake;
  const EmptyCache cache;
  const OnStream place(fake);
  DeviceCase c;
  c.run.stream = fake.stream(place.context);
  const DeviceBytes memory(0, workspace(c.a, Pass::backward, c.run));
  c.run.workspace = {.data = memory.data(), .size = workspace(c.a, Pass::backward, c.run)};
  c.forward();
  c.backward();
  fake.machine->is_recording = false;
  const double forward = microseconds([&] { c.forward(); });
  const double backward = microseconds([&] { c.backward(); });
  fake.machine->is_recording = true;
  MESSAGE("forward ", forward, " us, backward ", backward, " us");
  CHECK(forward < 500);  // far above what it is, for slow machines and sanitizers
  CHECK(backward < 500);
}

TEST_SUITE_END();
