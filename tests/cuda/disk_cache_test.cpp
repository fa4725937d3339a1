// Kernels on disk: what is damaged or not to be trusted is not used, and who fails says why.
#include "cuda/disk_cache.hpp"

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "cuda/hash.hpp"
#include "cuda/kernel_lock.hpp"
#include "tests/cuda/cache_files.hpp"

using namespace regard::cuda_backend;
using namespace regard::tests;
namespace fs = std::filesystem;

namespace {

struct Stored {
  KernelKey key{.subject = "a config\nsm_90 options\ntexts 0123\n", .compiler = "nvrtc13.9"};
  KernelBinary binary{.image = std::string("an image\0with a zero", 20),
                      .resources = {.registers = 168, .spill_bytes = 4, .seconds = 1.5},
                      .not_kept = ""};
  std::string path;

  explicit Stored(const EmptyCache& cache) {
    REQUIRE(store_kernel(key, binary) == "");
    const auto files = files_of(cache);
    REQUIRE(files.size() == 1);
    path = files[0];
  }
  bool loads() const {
    KernelBinary loaded;
    return load_kernel(key, loaded) && loaded.image == binary.image;
  }
};

TEST_SUITE_BEGIN("cuda_disk");

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

TEST_CASE("a text hashes in pieces as it does at once, and as it always has") {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += char(i * 7);
  CHECK(hash_of(text).text() == "ea74f6bc0710db41deb7404013ed0d5d");
  CHECK(hash_of("").text() == "ff6fa63aa3081183ce28fd368bfa58bd");
  CHECK(hash_of(text.substr(0, 13)).text() == "bd40795d53d34d5b9247eff8e68cc36b");
  for (std::size_t size = 1; size < 40; ++size) {
    Hasher hasher;
    for (std::size_t at = 0; at < text.size(); at += size) hasher.add(text.substr(at, size));
    CHECK(hasher.end() == hash_of(text));
  }
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
  CHECK(cache_entries().at(0).fault == "contradicts itself");
  write(stored.path, good);
  CHECK(stored.loads());
}

TEST_CASE("a file that others could have written is not used") {
  const EmptyCache cache;
  const Stored stored(cache);
  for (const mode_t mode : {0602, 0606, 0666}) {
    chmod(stored.path.c_str(), mode);
    CHECK_FALSE(stored.loads());
  }
  chmod(stored.path.c_str(), 0600);
  CHECK(stored.loads());
  if (geteuid() == 0) {
    REQUIRE(chown(stored.path.c_str(), 12345, 12345) == 0);
    CHECK_FALSE(stored.loads());
    CHECK(cache_entries().at(0).fault == "belongs to another user (uid 12345)");
    REQUIRE(chown(stored.path.c_str(), 0, 12345) == 0);
    chmod(stored.path.c_str(), 0620);
    CHECK_FALSE(stored.loads());
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
  chmod(cache.folder().c_str(), 0707);
  CHECK_FALSE(stored.loads());
  fs::remove(stored.path);
  const std::string fault = cache.folder() + " can be written by others (mode 0707)";
  CHECK(store_kernel(stored.key, stored.binary) == fault);
  CHECK(cache_fault() == fault);
  CHECK(files_of(cache).empty());
  chmod(cache.folder().c_str(), 0700);
  CHECK(cache_fault() == "");
}

TEST_CASE("a folder of our own choice is narrowed, one that the user has named is not") {
  const EmptyCache cache;
  const std::string folder = cache.folder() + "/regard";
  fs::create_directory(folder);
  chmod(folder.c_str(), 0777);
  const int status = in_child([&] {
    setenv("REGARD_CACHE_DIR", folder.c_str(), 1);
    if (store_kernel({.subject = "s", .compiler = "c"}, {}).empty()) return 1;
    unsetenv("REGARD_CACHE_DIR");
    setenv("XDG_CACHE_HOME", cache.folder().c_str(), 1);
    if (!store_kernel({.subject = "s", .compiler = "c"}, {}).empty()) return 2;
    return cache_entries().size() == 1 ? 0 : 3;
  });
  CHECK(status == 0);
  CHECK((fs::status(folder).permissions() & fs::perms::mask) == fs::perms(0700));
}

TEST_CASE("a folder that cannot be written is read, and no place for kernels") {
  const EmptyCache cache;
  const Stored stored(cache);
  chmod(stored.path.c_str(), 0444);
  chmod(cache.folder().c_str(), 0555);
  const int status = in_child([&] {
    if (geteuid() == 0 && setuid(12345) != 0) return 1;  // root may write everywhere
    if (!stored.loads() || !cache_fault().empty()) return 2;
    const std::string fault = "in " + cache.folder() + " no file can be written: Permission denied";
    if (make_cache_folder() != fault) return 3;
    return store_kernel(stored.key, stored.binary) == fault ? 0 : 4;
  });
  chmod(cache.folder().c_str(), 0700);
  CHECK(status == 0);
}

TEST_CASE("why a kernel is not kept") {
  const EmptyCache cache;
  const auto reason_in = [&](const std::string& folder) {
    setenv("REGARD_CACHE_DIR", folder.c_str(), 1);
    return store_kernel({.subject = "s", .compiler = "c"}, {});
  };
  write(cache.folder() + "/file", "in the way");
  CHECK(reason_in(cache.folder() + "/file") == cache.folder() + "/file is no folder");
  const std::string below = cache.folder() + "/file/below";
  CHECK(reason_in(below) == below + " cannot be made: " + cache.folder() + "/file is no folder");
  CHECK(cache_fault() == reason_in(below));
  CHECK(reason_in("/proc/none").starts_with("/proc/none cannot be made: "));
  const int status = in_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit few{.rlim_cur = 10, .rlim_max = 10};  // bytes of a file, as on a full disk
    setrlimit(RLIMIT_FSIZE, &few);
    return reason_in(cache.folder()) ==
                   "in " + cache.folder() + " no file can be written: File too large"
               ? 0
               : 1;
  });
  CHECK(status == 0);
  const int nowhere = in_child([&] {
    const std::string gone = cache.folder() + "/gone";
    if (!fs::create_directory(gone) || chdir(gone.c_str()) != 0 || !fs::remove(gone)) return 1;
    const std::string fault = "relative cannot be made: there is no working directory";
    return reason_in("relative") == fault && cache_fault() == fault ? 0 : 2;
  });
  CHECK(nowhere == 0);
  CHECK(fs::is_empty(cache.folder()) == false);
  for (const auto& entry : fs::directory_iterator(cache.folder())) {
    CHECK(entry.path().filename() == "file");  // no half of a kernel is left
  }
}

TEST_CASE("the oldest files go where all of them take too much room") {
  const EmptyCache cache;
  const auto file = [&](int age, std::size_t bytes) {
    const std::string path = cache.folder() + "/" + std::to_string(age) + ".kernel";
    write(path, "");
    fs::resize_file(path, bytes);  // takes no room on the disk
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(24 * age));
  };
  for (int age = 1; age <= 8; ++age) file(age, 1000);
  const std::string partial = cache.folder() + "/.x.kernel.1.0.part";
  write(partial, "half");
  CHECK(shrink_cache(8000) == 0);
  CHECK(shrink_cache(7999) == 3);  // three quarters of it stay
  for (int age = 1; age <= 8; ++age) {
    CHECK(fs::exists(cache.folder() + "/" + std::to_string(age) + ".kernel") == (age <= 5));
  }
  CHECK(fs::exists(partial));
  fs::last_write_time(partial, fs::file_time_type::clock::now() - std::chrono::hours(2));
  CHECK(shrink_cache(7999) == 1);
  CHECK_FALSE(fs::exists(partial));
  // A kernel that is used becomes young again; storing another one makes room.
  const Stored stored = [&] {
    clear_cache();
    return Stored(cache);
  }();
  fs::last_write_time(stored.path, fs::file_time_type::clock::now() - std::chrono::hours(24 * 99));
  CHECK(stored.loads());
  for (int age = 1; age <= 17; ++age) file(age, 64 << 20);
  CHECK(store_kernel({.subject = "s", .compiler = "c"}, {}) == "");
  CHECK(stored.loads());
  CHECK_FALSE(fs::exists(cache.folder() + "/17.kernel"));
  CHECK(fs::exists(cache.folder() + "/1.kernel"));
}

TEST_CASE("kernels are listed without their images in memory") {
  const EmptyCache cache;
  constexpr int kFiles = 8;
  {
    KernelBinary large;
    large.image.assign(8 << 20, 'x');
    for (int n = 0; n < kFiles; ++n) {
      REQUIRE(store_kernel({.subject = std::to_string(n), .compiler = "c"}, large) == "");
    }
  }
  const int megabytes = in_child([] {
    const auto most = [] {
      rusage usage{};
      getrusage(RUSAGE_SELF, &usage);
      return usage.ru_maxrss;
    };
    const long before = most();
    if (cache_entries().size() != kFiles) return 255;
    return int((most() - before) >> 10);
  });
#if defined(__SANITIZE_ADDRESS__)
  constexpr int kMost = 8;  // the sanitizer's own tables take some
#else
  constexpr int kMost = 4;
#endif
  CHECK(megabytes < kMost);  // of 64
}

TEST_CASE("a folder that does not exist is made, for the user alone") {
  const EmptyCache cache;
  const std::string folder = cache.folder() + "/a/b";
  setenv("REGARD_CACHE_DIR", folder.c_str(), 1);
  store_kernel({.subject = "s", .compiler = "c"}, {.image = "i", .resources = {}, .not_kept = ""});
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
  CHECK(cache_entries().at(0).fault == "is of another kernel than its name says");
}

TEST_CASE("a lock that is never released does not stop others for ever") {
  const EmptyCache cache;
  const KernelKey key{.subject = "s", .compiler = "c"}, other{.subject = "t", .compiler = "c"};
  constexpr std::chrono::milliseconds kShort{50};
  const int status = in_child([&] {
    {
      const KernelLock held(key);
      if (!held.is_held() || !KernelLock(other).is_held()) return 1;
      if (KernelLock(key, kShort).is_held()) return 2;
      if (KernelLock(key).is_held()) return 3;  // at once: there is no second wait
    }
    return KernelLock(key, kShort).is_held() ? 0 : 4;
  });
  CHECK(status == 0);
  const std::string lock = cache.folder() + "/.lock";
  CHECK((fs::status(lock).permissions() & fs::perms::mask) == fs::perms(0600));
  chmod(lock.c_str(), 0666);  // others could hold it
  CHECK_FALSE(KernelLock(key, kShort).is_held());
  clear_cache();
  CHECK_FALSE(fs::exists(lock));
  setenv("REGARD_CACHE_DIR", "/proc/none", 1);
  CHECK_FALSE(KernelLock(key, kShort).is_held());
}

TEST_SUITE_END();

}  // namespace
