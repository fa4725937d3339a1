// The CUDA backend over a driver that only writes down what it is asked: contexts, streams, memory,
// parameters, failures, captures.
#include "cuda/backend.hpp"

#include <atomic>
#include <cstring>
#include <thread>

#include "cuda/driver.hpp"
#include "plan/cuda/config_text.hpp"
#include "plan/cuda/planner.hpp"
#include "problem/describe.hpp"
#include "tests/cuda/fake.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

CudaPlan plan_of(const DeviceCase& c, Pass pass) {
  const Problem problem = pass == Pass::forward ? describe_forward(c.a, c.outputs)
                                                : describe_backward(c.a, c.inputs, c.gradients);
  return plan_cuda(problem, cuda_backend::this_chip(c.device), {}, Reasons::left_out);
}

void check_launches(const FakeCuda& fake, const CudaPlan& plan) {
  const auto& launches = fake.machine->launches;
  REQUIRE(launches.size() == plan.launches.size());
  for (std::size_t i = 0; i < launches.size(); ++i) {
    CHECK(launches[i].blocks == plan.launches[i].grid.blocks());
    CHECK(launches[i].params.grid == plan.launches[i].grid);
    CHECK(launches[i].params.by == plan.launches[i].by);
    CHECK(launches[i].threads == unsigned(plan.launches[i].threads));
    CHECK(launches[i].shared_bytes == plan.launches[i].shared_bytes);
    CHECK(launches[i].image.find(to_text(plan.launches[i].config)) != std::string::npos);
    CHECK(launches[i].image.find("--gpu-architecture=sm_90") != std::string::npos);
  }
}

TEST_SUITE_BEGIN("cuda");

TEST_CASE("a device as it says it is") {
  const FakeCuda fake;
  const Chip& chip = cuda_backend::this_chip(1);
  CHECK(chip.capability() == 90);
  CHECK(chip.multiprocessors == 132);
  CHECK(chip.shared_per_block == 227 << 10);
  CHECK(chip.name == "Fake GPU");
  const Error error = error_of([] { cuda_backend::this_chip(2); });
  CHECK(std::string(error.what()) == "device = cuda:2: this machine has 2 GPUs");
  CHECK(error.code() == Code::unavailable);
}

TEST_CASE("the kernels of gradients that follow are compiled with those of the forward call") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  c.a.softcap = 7;
  c.a.deterministic = true;
  for (const bool follow : {true, false}) {
    c.a.alibi_slopes = follow ? Tensor(c.at(9), f32, {DeviceCase::kHeads}) : Tensor();
    c.run.gradients_follow = follow;
    c.forward();
    allow_compilation(false);
    if (follow) {
      c.backward();
    } else {
      CHECK(error_of([&] { c.backward(); }).code() == Code::unavailable);
    }
    allow_compilation(true);
  }
}

TEST_CASE("both passes launch what the plan says, on the stream, and wait for nothing") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  fake::Stream* const stream = fake.stream(fake.context(0));
  c.run.stream = stream;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    fake.clear();
    pass == Pass::forward ? c.forward() : c.backward();
    check_launches(fake, plan_of(c, pass));
    for (const fake::Launch& launch : fake.machine->launches) {
      CHECK(launch.stream == stream);
      CHECK(launch.params.problem.q.data == c.a.q.data);
      CHECK(launch.params.problem.out.data == c.outputs.out.data);
    }
    for (const char* waits : {"cuCtxSynchronize", "cuStreamSynchronize", "cuMemAlloc", "cuMemFree",
                              "cuMemcpyHtoD", "cuMemcpyDtoH"}) {
      CHECK_MESSAGE(fake.machine->calls[waits] == 0, waits);
    }
    CHECK(fake.machine->stream_ordered() == 0);
  }
}

TEST_CASE("a forward call is its kernels and nothing else") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const DeviceBytes memory(0, c.backward_workspace() + (1 << 20));
  c.run.workspace = {.data = memory.data(), .size = c.backward_workspace() + (1 << 20)};
  c.a.causal = Causal::bottom_right;
  for (const char* backend : {"cuda:wgmma", "cuda:mma"}) {
    CAPTURE(backend);
    c.run.backend = backend;
    c.forward();
    fake.clear();
    c.forward();
    REQUIRE(fake.machine->launches.size() == 1);
    CHECK(fake.machine->calls["cuMemsetD8Async"] == 0);
    const std::uint64_t nonce = fake.machine->launches[0].params.nonce;
    CHECK(nonce != 0);
    c.forward();
    CHECK(fake.machine->launches[1].params.nonce != nonce);
  }
}

// The wait is the kernel's own, which the driver tells by what it was compiled for.
TEST_CASE("launches overlap where the kernel waits by itself") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  c.run.stream = fake.stream(fake.context(0));  // where nothing is loaded yet
  bool overlaps = true;
  SUBCASE("for compute capability 9.0") {}
  SUBCASE("not where the driver does not say so") {
    fake.machine->failures["cuFuncGetAttribute"] = 1;
    overlaps = false;
  }
  c.forward();
  c.backward();
  REQUIRE(fake.machine->launches.size() >= 3);
  for (const fake::Launch& launch : fake.machine->launches) {
    CHECK(launch.may_overlap == overlaps);
  }
}

TEST_CASE("kernels are compiled once and loaded once a context") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  fake::Context* const context = fake.context(0);
  c.run.stream = fake.stream(context);
  c.forward();
  fake.clear();
  c.forward();
  CHECK(fake.machine->calls["cuModuleLoadDataEx"] == 0);
  c.run.stream = fake.stream(fake.context(0));
  c.forward();
  CHECK(fake.machine->calls["cuModuleLoadDataEx"] == 1);
}

TEST_CASE("the context that is current is left current") {
  const FakeCuda fake;
  const EmptyCache cache;
  const DeviceCase c;
  fake.clear();
  SUBCASE("none: the primary one is used") {
    c.forward();
    CHECK(fake.current_context() == nullptr);
    CHECK(fake.machine->calls["cuCtxPushCurrent"] > 0);
  }
  SUBCASE("one of the device: it is used as it is") {
    fake::Context* const mine = fake.context(0);
    fake.push(mine);
    c.forward();
    CHECK(fake.current_context() == mine);
    CHECK(fake.machine->calls["cuCtxPushCurrent"] == 1);  // the test's own
    CHECK(fake.machine->calls["cuModuleLoadDataEx"] == 1);
    fake::Context* popped = nullptr;
    fake.pop(&popped);
  }
  SUBCASE("one of another device: the primary one of the right device is used") {
    fake::Context* const other = fake.context(1);
    fake.push(other);
    c.forward();
    CHECK(fake.current_context() == other);
    fake::Context* popped = nullptr;
    fake.pop(&popped);
  }
  SUBCASE("also after a failure") {
    fake.machine->failures["cuLaunchKernelEx"] = 719;
    (void)error_of([&] { c.forward(); });
    CHECK(fake.current_context() == nullptr);
  }
}

TEST_CASE("a stream of another device is refused") {
  const FakeCuda fake;
  DeviceCase c;
  c.run.stream = fake.stream(fake.context(1));
  const Error error = error_of([&] { c.forward(); });
  CHECK(error.argument() == "stream");
  CHECK(std::string(error.what()).find("belongs to another device than cuda:0") !=
        std::string::npos);
  CHECK(fake.machine->launches.empty());
  CHECK(fake.current_context() == nullptr);
}

TEST_CASE("memory that the device cannot reach is refused by name") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const DeviceBytes elsewhere(1, DeviceCase::kBytes);
  alignas(16) static char host[DeviceCase::kBytes];
  const std::pair<const char*, Tensor*> tensors[] = {
      {"q", &c.a.q},           {"k", &c.a.k},           {"v", &c.a.v},
      {"out", &c.inputs.out},  {"lse", &c.inputs.lse},  {"dout", &c.inputs.dout},
      {"dq", &c.gradients.dq}, {"dk", &c.gradients.dk}, {"dv", &c.gradients.dv}};
  for (const auto& [name, tensor] : tensors) {
    CAPTURE(name);
    void* const before = tensor->data;
    tensor->data = host;
    Error error = error_of([&] { c.backward(); });
    CHECK(error.argument() == name);
    CHECK(error.code() == Code::invalid_argument);
    CHECK(std::string(error.what()).find("is memory of the host that cuda:0 does not know") !=
          std::string::npos);
    tensor->data = elsewhere.data();
    error = error_of([&] { c.backward(); });
    CHECK(error.argument() == name);
    CHECK(std::string(error.what()).find("is memory of cuda:1 that cuda:0 cannot reach") !=
          std::string::npos);
    tensor->data = before;
  }
  c.a.dropout = {.p = 0.5, .seed_words = reinterpret_cast<const std::uint32_t*>(host)};
  CHECK(error_of([&] { c.backward(); }).argument() == "dropout.seed_words");
  CHECK(fake.machine->launches.empty());
}

TEST_CASE("a seed in memory is not read by the host") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const DeviceBytes words(0, 8);
  c.a.dropout = {.p = 0.5,
                 .seed = 1,
                 .offset = 0xffffffff,
                 .seed_words = reinterpret_cast<const std::uint32_t*>(words.data())};
  c.forward();
  const Problem& launched = fake.machine->launches.back().params.problem;
  CHECK(launched.seed_in_memory);
  CHECK(seed_address(launched.dropout) == reinterpret_cast<std::uintptr_t>(words.data()));
  CHECK(launched.dropout.offset == 0xffffffff);
  ++c.a.dropout.offset;
  const Error error = error_of([&] { c.forward(); });
  CHECK(error.argument() == "dropout.offset");
  CHECK(error.value() == "4294967296");
}

TEST_CASE("sequence tables are never read by the host") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const DeviceBytes tables(0, 64);
  std::memset(tables.data(), 0xee, 64);  // would be refused if it were read
  for (Tensor* t : {&c.a.q, &c.a.k, &c.a.v, &c.outputs.out}) {
    *t = Tensor(t->data, f16, {DeviceCase::kLength, DeviceCase::kHeads, DeviceCase::kDim});
  }
  c.outputs.lse = {};
  c.a.cu_seqlens_q = c.a.cu_seqlens_k = Tensor(tables.data(), i32, {3});
  c.a.max_seqlen_q = c.a.max_seqlen_k = 60;
  c.forward();
  REQUIRE(!fake.machine->launches.empty());
  CHECK(fake.machine->launches[0].params.problem.sequences.begins_q == tables.data());
  alignas(16) static std::int32_t host[3] = {0, 50, 100};
  c.a.cu_seqlens_k.data = host;
  CHECK(error_of([&] { c.forward(); }).argument() == "cu_seqlens_k");
  CHECK(explain(c.a, Pass::forward, c.run).supported);
}

TEST_CASE("a workspace that is given is checked and used") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const std::size_t size = workspace(c.a, Pass::backward, c.run);
  REQUIRE(size > 0);
  const DeviceBytes memory(0, size + 256);
  c.run.workspace = {.data = memory.data(), .size = size};
  fake.clear();
  c.backward();
  CHECK(fake.machine->calls["cuMemAllocFromPoolAsync"] == 0);
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const auto& buffers = fake.machine->launches.back().params.buffers;
  CHECK(reinterpret_cast<std::uintptr_t>(buffers.row_states) - begin < size);

  c.run.workspace.size = c.backward_workspace() - 1;
  Error error = error_of([&] { c.backward(); });
  CHECK(error.argument() == "workspace.size");
  c.run.workspace = {.data = static_cast<char*>(memory.data()) + 16, .size = size};
  error = error_of([&] { c.backward(); });
  CHECK(error.argument() == "workspace.data");
  alignas(256) static char host[1];
  c.run.workspace = {.data = host, .size = size};
  error = error_of([&] { c.backward(); });
  CHECK(error.argument() == "workspace.data");
}

TEST_CASE("an allocator is asked once, where no workspace is given") {
  struct Asked {
    void* answer = nullptr;
    std::vector<std::size_t> sizes;
    static void* allocate(void* self, std::size_t size) {
      auto& asked = *static_cast<Asked*>(self);
      asked.sizes.push_back(size);
      return asked.answer;
    }
  };
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const std::size_t size = c.backward_workspace();
  const DeviceBytes memory(0, size + 256);
  Asked asked{.answer = memory.data(), .sizes = {}};
  c.run.allocator = {.allocate = Asked::allocate, .self = &asked};
  fake.clear();
  c.backward();
  CHECK(asked.sizes == std::vector{size});
  CHECK(fake.machine->calls["cuMemAllocFromPoolAsync"] == 0);
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const auto& buffers = fake.machine->launches.back().params.buffers;
  CHECK(reinterpret_cast<std::uintptr_t>(buffers.row_states) - begin < size);

  fake.clear();
  for (void* answer :
       {static_cast<void*>(nullptr), static_cast<void*>(static_cast<char*>(memory.data()) + 16)}) {
    asked.answer = answer;
    const Error error = error_of([&] { c.backward(); });
    CHECK(error.argument() == "allocator");
    CHECK((error.code() == Code::out_of_memory) == (answer == nullptr));
  }
  CHECK(fake.machine->launches.empty());
  c.run.workspace = {.data = memory.data(), .size = size};
  asked.sizes.clear();
  c.backward();
  CHECK(asked.sizes.empty());
}

TEST_CASE("an allocator may make calls of its own, of more problems than a thread remembers") {
  struct Nested {
    static void* allocate(void* self, std::size_t) {
      for (int n = 1; n <= 40; ++n) {
        DeviceCase other;
        other.a.softcap = n;
        other.forward();
      }
      return self;
    }
  };
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  const DeviceBytes memory(0, c.backward_workspace() + 256);
  const CudaPlan plan = plan_of(c, Pass::backward);
  c.run.allocator = {.allocate = Nested::allocate, .self = memory.data()};
  c.backward();
  const auto& launches = fake.machine->launches;
  REQUIRE(launches.size() > plan.launches.size());
  for (std::size_t i = 0; i < plan.launches.size(); ++i) {
    CHECK(launches[launches.size() - plan.launches.size() + i].params.grid ==
          plan.launches[i].grid);
  }
}

TEST_CASE("failures of the driver, in its own words") {
  const FakeCuda fake;
  const EmptyCache cache;
  const DeviceCase c;
  c.backward();
  fake.clear();
  SUBCASE("no memory for the workspace") {
    fake.machine->failures["cuMemAllocFromPoolAsync"] = 2;
    const Error error = error_of([&] { c.backward(); });
    CHECK(error.code() == Code::out_of_memory);
    CHECK(error.argument() == "workspace");
    CHECK(fake.machine->launches.empty());
  }
  SUBCASE("a launch") {
    fake.machine->failures["cuLaunchKernelEx"] = 719;
    const Error error = error_of([&] { c.backward(); });
    CHECK(error.code() == Code::device_failure);
    CHECK(std::string(error.what()).find("CUDA_ERROR_LAUNCH_FAILED, as the test wants it") !=
          std::string::npos);
    CHECK(std::string(error.what()).find("regard::Kernel::delta") != std::string::npos);
  }
  SUBCASE("an error without a name") {
    fake.machine->failures["cuLaunchKernelEx"] = 12345;
    const Error error = error_of([&] { c.backward(); });
    CHECK(std::string(error.what()).find("error 12345 of the driver") != std::string::npos);
  }
  CHECK(fake.machine->stream_ordered() == 0);
}

TEST_CASE("a driver that does not load a kernel") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  c.run.stream = fake.stream(fake.context(0));  // where nothing is loaded yet
  fake.machine->failures["cuModuleLoadDataEx"] = 209;
  const Error error = error_of([&] { c.forward(); });
  CHECK(error.argument() == "kernel");
  CHECK(std::string(error.what()).find("is the driver (CUDA 13.0) older than the compiler") !=
        std::string::npos);
  fake.clear();
  c.forward();
  CHECK(fake.machine->launches.size() == 1);
}

TEST_CASE("a call may be captured, even the first of its kind") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  fake::Stream* const stream = fake.stream(fake.context(0));
  c.run.stream = stream;
  c.a.causal = Causal::bottom_right;
  fake.capture(stream, true);
  c.forward();
  c.backward();
  fake.capture(stream, false);
  CHECK_FALSE(fake.machine->broken_capture);
  CHECK(fake.machine->launches.size() >= 3);
}

TEST_CASE("threads with streams of their own") {
  const FakeCuda fake;
  const EmptyCache cache;
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  fake::Context* const contexts[] = {fake.context(0), fake.context(1)};
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&, n] {
      try {
        DeviceCase c(n % 2);
        c.run.stream = fake.stream(contexts[n % 2]);
        for (int i = 0; i < 50; ++i) c.forward(), c.backward();
      } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  CHECK(fake.machine->stream_ordered() == 0);
}

TEST_CASE("chips are planned for, and run nothing") {
  DeviceCase c;
  c.run.device = chip("sm_80");
  const Explanation e = explain(c.a, Pass::forward, c.run);
  CHECK(e.supported);
  CHECK(e.backend == "cuda:mma");
  CHECK(workspace(c.a, Pass::backward, c.run) > 0);
  CHECK(std::string(error_of([&] { c.forward(); }).what()) ==
        "device = sm_80: is a chip to plan for; kernels run on cuda(0)");
  CHECK(chips().front() == "sm_50");
  for (const std::string& name : chips()) {
    c.run.device = chip(name);
    CHECK(explain(c.a, Pass::forward, c.run).supported);
  }
  c.run.device = chip("sm_1");
  CHECK(error_of([&] { (void)explain(c.a, Pass::forward, c.run); }).argument() == "device");
}

TEST_CASE("backends that are forced") {
  const FakeCuda fake;
  const EmptyCache cache;
  DeviceCase c;
  c.run.backend = "cuda:simt";
  c.forward();
  CHECK(fake.machine->launches.back().image.find("Family::simt") != std::string::npos);
  CHECK(explain(c.a, Pass::forward, c.run).backend == "cuda:simt");
  c.run.backend = "cpu:avx2";
  CHECK(std::string(error_of([&] { c.forward(); }).what()) ==
        "backend = cpu:avx2: is for the CPU, and the device is cuda:0");
  c.run.backend = "cuda:wmma";
  CHECK(error_of([&] { c.forward(); }).argument() == "backend");
  for (const BackendInfo& backend : backends()) {
    if (backend.name.starts_with("cuda")) CHECK_MESSAGE(backend.available, backend.note);
  }
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("cuda_older");

TEST_CASE("launches do not overlap under a driver whose graphs do not know it") {
  const FakeCuda fake;
  const EmptyCache cache;
  REQUIRE(cuda_backend::driver_version() == 12020);
  const DeviceCase c;
  c.forward();
  REQUIRE(!fake.machine->launches.empty());
  for (const fake::Launch& launch : fake.machine->launches) CHECK_FALSE(launch.may_overlap);
}

TEST_SUITE_END();

}  // namespace
