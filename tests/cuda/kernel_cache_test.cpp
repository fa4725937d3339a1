// Kernels on disk and in memory: what is damaged or not to be trusted is compiled anew.
#include "cuda/kernel_cache.hpp"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <thread>

#include "cuda/disk_cache.hpp"
#include "cuda/hash.hpp"
#include "plan/config_text.hpp"
#include "tests/cuda/fake.hpp"

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

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
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

std::vector<std::string> files_of(const EmptyCache& cache) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(cache.folder())) paths.push_back(entry.path());
  return paths;
}

struct Stored {
  KernelKey key{.subject = "a config\nsm_90 options\ntexts 0123\n", .compiler = "nvrtc13.9"};
  KernelBinary binary{.image = std::string("an image\0with a zero", 20),
                      .resources = {.registers = 168, .spill_bytes = 4, .seconds = 1.5}};
  std::string path;

  explicit Stored(const EmptyCache& cache) {
    store_kernel(key, binary);
    const auto files = files_of(cache);
    REQUIRE(files.size() == 1);
    path = files[0];
  }
  bool loads() const {
    KernelBinary loaded;
    return load_kernel(key, loaded) && loaded.image == binary.image;
  }
};

TEST_SUITE_BEGIN("cuda");

TEST_CASE("the hash is SipHash-2-4-128 with a key of ours, and sees every bit") {
  const std::string text(100, 'x');
  const Hash whole = hash_of(text);
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string other = text;
      other[i] ^= char(1 << bit);
      CHECK_FALSE(hash_of(other) == whole);
    }
    CHECK_FALSE(hash_of(text.substr(0, i)) == whole);
  }
  CHECK(whole.text().size() == 32);
}

TEST_CASE("a kernel comes back from disk as it was") {
  const EmptyCache cache;
  const Stored stored(cache);
  KernelBinary loaded;
  REQUIRE(load_kernel(stored.key, loaded));
  CHECK(loaded.image == stored.binary.image);
  CHECK(loaded.resources.registers == 168);
  CHECK(loaded.resources.seconds == 1.5);
  struct stat s {};
  REQUIRE(stat(stored.path.c_str(), &s) == 0);
  CHECK((s.st_mode & 0777) == 0600);
  const KernelKey any{.subject = stored.key.subject, .compiler = ""};
  CHECK(load_kernel(any, loaded));
  const KernelKey newer{.subject = stored.key.subject, .compiler = "nvrtc14.0"};
  CHECK_FALSE(load_kernel(newer, loaded));
  CHECK(cache_entries().size() == 1);
  CHECK(clear_cache() == 1);
  CHECK(files_of(cache).empty());
}

TEST_CASE("a file of which a byte is wrong or missing is not used") {
  const EmptyCache cache;
  const Stored stored(cache);
  const std::string good = contents(stored.path);
  REQUIRE(stored.loads());
  for (std::size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] ^= 0x10;
    write(stored.path, bad);
    CHECK_FALSE_MESSAGE(stored.loads(), at);
    write(stored.path, good.substr(0, at));
    CHECK_FALSE_MESSAGE(stored.loads(), at);
  }
  write(stored.path, good + "x");
  CHECK_FALSE(stored.loads());
  CHECK(cache_entries().at(0).fault == "is damaged");
  write(stored.path, good);
  CHECK(stored.loads());
}

TEST_CASE("a file that others could have written is not used") {
  const EmptyCache cache;
  const Stored stored(cache);
  for (const mode_t mode : {0620, 0602, 0666}) {
    chmod(stored.path.c_str(), mode);
    CHECK_FALSE(stored.loads());
  }
  chmod(stored.path.c_str(), 0600);
  CHECK(stored.loads());
  if (geteuid() == 0) {
    REQUIRE(chown(stored.path.c_str(), 12345, 12345) == 0);
    CHECK_FALSE(stored.loads());
    CHECK(cache_entries().at(0).fault == "belongs to another user");
    REQUIRE(chown(stored.path.c_str(), 0, 0) == 0);
  }
  const std::string elsewhere = stored.path + ".moved";
  fs::rename(stored.path, elsewhere);
  fs::create_symlink(elsewhere, stored.path);
  CHECK_FALSE(stored.loads());
  fs::remove(stored.path);
  REQUIRE(mkfifo(stored.path.c_str(), 0600) == 0);
  CHECK_FALSE(stored.loads());
  fs::remove(stored.path);
  fs::create_directory(stored.path);
  CHECK_FALSE(stored.loads());
}

TEST_CASE("a folder that others may write is not used") {
  const EmptyCache cache;
  const Stored stored(cache);
  chmod(cache.folder().c_str(), 0770);
  CHECK_FALSE(stored.loads());
  fs::remove(stored.path);
  store_kernel(stored.key, stored.binary);
  CHECK(files_of(cache).empty());
  chmod(cache.folder().c_str(), 0700);
}

TEST_CASE("a folder that does not exist is made, for the user alone") {
  const EmptyCache cache;
  const std::string folder = cache.folder() + "/a/b";
  setenv("REGARD_CACHE_DIR", folder.c_str(), 1);
  store_kernel({.subject = "s", .compiler = "c"}, {.image = "i", .resources = {}});
  CHECK(cache_entries().size() == 1);
  struct stat s {};
  REQUIRE(stat(folder.c_str(), &s) == 0);
  CHECK((s.st_mode & 0777) == 0700);
}

TEST_CASE("a name that lies about its contents") {
  const EmptyCache cache;
  const Stored stored(cache);
  const KernelKey other{.subject = "another config\n", .compiler = "nvrtc13.9"};
  fs::rename(stored.path, cache.folder() + "/" + hash_of(other.subject).text() + "-" +
                              other.compiler + ".kernel");
  KernelBinary loaded;
  CHECK_FALSE(load_kernel(other, loaded));
}

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
  const auto in_child = [&] {
    const pid_t child = fork();
    if (child == 0) {
      const KernelConfig unknown = config;
      Origin found = Origin::memory;
      KernelBinary binary;
      // The parent's memory is the child's; a chip of the same cubin is not in it.
      kernel_binary(unknown, 91, &found);
      _exit(int(found));
    }
    int status = 0;
    waitpid(child, &status, 0);
    return Origin(WEXITSTATUS(status));
  };
  CHECK(in_child() == Origin::disk);
  const std::string good = contents(path);
  write(path, good.substr(0, good.size() / 2));
  CHECK(in_child() == Origin::compiler);
  CHECK(contents(path).size() == good.size());
  CHECK(in_child() == Origin::disk);
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

TEST_CASE("processes that want the same kernels leave whole files") {
  const FakeCuda fake;
  const CompilationCount compilations;
  std::vector<KernelConfig> configs;
  for (int i = 0; i < 4; ++i) configs.push_back(fresh_config());
  std::vector<pid_t> children;
  for (int n = 0; n < 4; ++n) {
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
  CHECK(compilations.count() <= 4 * configs.size());
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
    CHECK(entry.binary.resources.registers == 168);
    kept += entry.binary.resources.serialized;
  }
  CHECK(kept == 1);
}

TEST_SUITE_END();

}  // namespace
