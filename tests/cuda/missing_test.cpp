// Machines without a driver, or without a compiler: what is missing is named, and how to get it.
#include <cstdlib>

#include "cuda/driver.hpp"
#include "cuda/nvrtc.hpp"
#include "tests/cuda/fake.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

[[noreturn]] void skip(const char* why) {
  std::printf("skipped: %s\n", why);
  std::fflush(stdout);
  std::_Exit(77);
}

TEST_SUITE_BEGIN("cuda_missing");

TEST_CASE("without a driver") {
  if (cuda_backend::driver_if_any()) skip("there is a driver");
  const Tensor shape(nullptr, f16, {1, 2, 64, 64});
  const Attention a{.q = shape, .k = shape, .v = shape};
  Run run;
  run.device = cuda(0);
  const Error error = error_of([&] { (void)workspace(a, Pass::forward, run); });
  CHECK(error.code() == Code::unavailable);
  CHECK(error.argument() == "device");
  CHECK_MESSAGE(!cuda_backend::why_no_driver().empty(), error.what());
  CHECK(error_of([] { cuda_memory::allocate(0, 1); }).code() == Code::unavailable);
  run.device = chip("sm_90");
  CHECK(explain(a, Pass::forward, run).supported);
  bool any = false;
  for (const BackendInfo& backend : backends()) {
    if (!backend.name.starts_with("cuda")) continue;
    any = true;
    CHECK_FALSE(backend.available);
    CHECK(backend.note.find(cuda_backend::why_no_driver()) != std::string::npos);
  }
  CHECK(any);
  const CudaSetup setup = cuda_setup();
  CHECK_FALSE(setup.has_driver);
  CHECK(setup.devices.empty());
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("cuda_broken");

TEST_CASE("a driver that does not initialise") {  // REGARD_FAKE_INIT says how
  const Error error = error_of([] { cuda_memory::allocate(0, 1); });
  CHECK(std::string(error.what()).find("cuInit: CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("cuda_uncompiled");

TEST_CASE("without a compiler") {
  const FakeCuda fake;
  const EmptyCache cache;
  if (cuda_backend::Compiler::if_any()) skip("there is an NVRTC");
  const DeviceCase c;
  const Error error = error_of([&] { c.forward(); });
  CHECK(error.code() == Code::unavailable);
  CHECK(error.argument() == "kernel");
  const std::string what = error.what();
  CHECK(what.find("there is no compiler") != std::string::npos);
  CHECK(what.find("pip install") != std::string::npos);
  CHECK(what.find("regard prebuild --devices sm_90") != std::string::npos);
  CHECK(fake.machine->launches.empty());
}

TEST_SUITE_END();

}  // namespace
