// Kernels in memory, on disk and from the compiler: each is compiled once.
#include "cuda/kernel_cache.hpp"

#include <pty.h>

#include <chrono>
#include <thread>

#include "cuda/compile_progress.hpp"
#include "cuda/disk_cache.hpp"
#include "plan/cuda/config_text.hpp"
#include "tests/cuda/cache_files.hpp"

using namespace regard;
using namespace regard::cuda_backend;
using namespace regard::tests;
namespace fs = std::filesystem;

namespace {

// A config that no other test has compiled.
KernelConfig fresh_config() {
  static int next = 1000;
  return {
      .kernel = Kernel::forward, .family = Family::simt, .level = 50, .type = f32, .dim = next++};
}

// Counts the fake compiler's work, also that of child processes.
class CompilationCount {
 public:
  CompilationCount() : path_(cache_.folder() + "/../regard-count-" + std::to_string(getpid())) {
    fs::remove(path_);
    setenv("REGARD_FAKE_COMPILATIONS", path_.c_str(), 1);
  }
  ~CompilationCount() {
    unsetenv("REGARD_FAKE_COMPILATIONS");
    fs::remove(path_);
  }
  std::size_t count() const { return fs::exists(path_) ? fs::file_size(path_) : 0; }
  const EmptyCache& cache() const { return cache_; }

 private:
  EmptyCache cache_;
  std::string path_;
};

TEST_SUITE_BEGIN("cuda");

TEST_CASE("compiled once, then from disk; compiled anew where the disk is damaged") {
  const FakeCuda fake;
  const CompilationCount compilations;
  const KernelConfig config = fresh_config();
  Origin origin = Origin::memory;
  CHECK(kernel_binary(config, 90, &origin).resources.registers == 168);
  CHECK(origin == Origin::compiler);
  kernel_binary(config, 90, &origin);
  CHECK(origin == Origin::memory);
  CHECK(compilations.count() == 1);
  CHECK(files_of(compilations.cache()).size() == 1);
  // As another process finds it: nothing in memory.
  const std::string path = files_of(compilations.cache())[0];
  const auto origin_elsewhere = [&] {
    return Origin(in_child([&] {
      Origin found = Origin::memory;
      // The parent's memory is the child's; a chip of the same cubin is not in it.
      kernel_binary(config, 91, &found);
      return int(found);
    }));
  };
  CHECK(origin_elsewhere() == Origin::disk);
  const std::string good = contents(path);
  write(path, good.substr(0, good.size() / 2));
  CHECK(origin_elsewhere() == Origin::compiler);
  CHECK(contents(path).size() == good.size());
  CHECK(origin_elsewhere() == Origin::disk);
}

TEST_CASE("threads that want the same kernel compile it once") {
  const FakeCuda fake;
  const CompilationCount compilations;
  const KernelConfig config = fresh_config();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) threads.emplace_back([&] { kernel_binary(config, 90); });
  for (std::thread& thread : threads) thread.join();
  CHECK(compilations.count() == 1);
}

TEST_CASE("processes that want the same kernels compile each once") {
  const FakeCuda fake;
  const CompilationCount compilations;
  std::vector<KernelConfig> configs;
  for (int i = 0; i < 4; ++i) configs.push_back(fresh_config());
  std::vector<pid_t> children;
  for (int n = 0; n < 16; ++n) {
    const pid_t child = fork();
    if (child == 0) {
      for (const KernelConfig& config : configs) {
        if (kernel_binary(config, 90).resources.registers != 168) _exit(1);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
  CHECK(files_of(compilations.cache()).size() == configs.size());
  for (const CacheEntry& entry : cache_entries()) CHECK(entry.fault == "");
  CHECK(compilations.count() == configs.size());
}

TEST_CASE("compiling may be forbidden") {
  const FakeCuda fake;
  const CompilationCount compilations;
  const KernelConfig config = fresh_config();
  allow_compilation(false);
  const Error error = error_of([&] { kernel_binary(config, 90); });
  allow_compilation(true);
  CHECK(error.code() == Code::unavailable);
  CHECK(error.argument() == "kernel");
  CHECK(error.value() == to_text(config));
  CHECK(std::string(error.what())
            .find("compiling is switched off; `regard prebuild --devices sm_90`") !=
        std::string::npos);
  CHECK(compilations.count() == 0);
  // What any compiler has left on disk may be used.
  kernel_binary(config, 86);
  allow_compilation(false);
  Origin origin = Origin::memory;
  CHECK_NOTHROW(kernel_binary(config, 86, &origin));
  allow_compilation(true);
}

TEST_CASE("a compiler that fails says why") {
  const FakeCuda fake;
  const CompilationCount compilations;
  const KernelConfig config = fresh_config();
  setenv("REGARD_FAKE_COMPILER_FAILS", "1", 1);
  const Error error = error_of([&] { kernel_binary(config, 90); });
  unsetenv("REGARD_FAKE_COMPILER_FAILS");
  CHECK(error.code() == Code::internal);
  CHECK(std::string(error.what()).find("the fake compiler was told to fail") != std::string::npos);
  CHECK(files_of(compilations.cache()).empty());
  CHECK_NOTHROW(kernel_binary(config, 90));
}

TEST_CASE("the compiler's target for a chip") {
  const FakeCuda fake;
  const Compiler* const compiler = Compiler::if_any();
  REQUIRE(compiler);
  CHECK(compiler->name() == "nvrtc13.9");
  CHECK(compiler->architecture(90) == "sm_90");
  CHECK(compiler->architecture(89) == "sm_86");
  CHECK(compiler->architecture(120) == "compute_90");
  CHECK(compiler->architecture(88) == "sm_86");  // not sm_87, a chip of Tegra
  CHECK(compiler->architecture(70) == "");
  const Error error = error_of([] { kernel_binary(fresh_config(), 70); });
  CHECK(error.argument() == "device");
}

TEST_CASE("what ptxas says of a kernel") {
  const KernelResources r = resources_in(
      "ptxas info    : Function properties for something\n"
      "    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Compiling entry function 'regard_kernel' for 'sm_80'\n"
      "ptxas         .     8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n"
      "ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 1472 bytes cmem[0]\n");
  CHECK(r.registers == 255);
  CHECK(r.stack_bytes == 8);
  CHECK(r.spill_bytes == 16);
  CHECK(r.shared_bytes == 1024);
  CHECK(r.serialized == 0);
  CHECK(resources_in("").registers == 0);
}

TEST_CASE("a note of ptxas on serialized products is kept, also on disk") {
  const CompilationCount compilations;
  const KernelConfig quiet = fresh_config(), noted = fresh_config();
  CHECK(kernel_binary(quiet, 90).resources.serialized == 0);
  setenv("REGARD_FAKE_COMPILER_NOTE",
         "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
         "serialized due to insufficient register resources\n",
         1);
  CHECK(kernel_binary(noted, 90).resources.serialized == 1);
  unsetenv("REGARD_FAKE_COMPILER_NOTE");
  int kept = 0;
  for (const CacheEntry& entry : cache_entries()) {
    CHECK(entry.resources.registers == 168);
    kept += entry.resources.serialized;
  }
  CHECK(kept == 1);
}

TEST_CASE("a long wait for the compiler shows a line, on a terminal") {
  using namespace std::chrono_literals;
  int terminal = -1, inside = -1;
  REQUIRE(openpty(&terminal, &inside, nullptr, nullptr, nullptr) == 0);
  const auto wait_for = [](std::size_t kernels, std::chrono::milliseconds patience) {
    CompileProgress progress(kernels, 90, patience);
    progress.add(Origin::compiler);
    progress.add(Origin::disk);
    std::this_thread::sleep_for(100ms);
  };
  const int status = in_child([&] {
    dup2(inside, STDERR_FILENO);
    wait_for(3, 10ms);
    wait_for(4, 10s);
    show_compiling(false);
    wait_for(5, 10ms);
    return 0;
  });
  REQUIRE(status == 0);
  char text[1000] = {};
  REQUIRE(read(terminal, text, sizeof text - 1) > 0);
  const std::string shown = text;
  CHECK(shown.find("\r\x1b[Kregard: compiling 3 kernels for sm_90, 0.") != shown.npos);
  CHECK(shown.find(" s, 2 ready") != shown.npos);
  CHECK(shown.find("regard: compiled 1 kernel for sm_90, 0.1 s") != shown.npos);
  CHECK(shown.find("4 kernels") == shown.npos);
  CHECK(shown.find("5 kernels") == shown.npos);
  close(terminal);
  close(inside);
}

TEST_SUITE_END();

}  // namespace
