// Whole calls: from many threads, nested in a pool's work, on an Executor, after a fork, at the
// process's end and after dlclose.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/cpu/case.hpp"
#include "threads/threads.hpp"

using namespace regard;
using namespace regard::tests;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitizer = true;
#elif defined(__has_feature)
constexpr bool kSanitizer = __has_feature(thread_sanitizer) || __has_feature(address_sanitizer);
#else
constexpr bool kSanitizer = false;
#endif

// Several chunks of keys, so that workers of the backward pass wait for each other's sums of dq.
Settings settings() {
  return {.batch = 2,
          .heads_q = 4,
          .heads_kv = 2,
          .len_q = 100,
          .len_k = 600,
          .dim = 8,
          .dim_v = 8,
          .causal = Causal::bottom_right,
          .bias = f32,
          .bias_broadcast = {true, true, false, false},
          .sink = true};
}

std::string bits_with(const Run& run) {
  const Case c(settings());
  c.both(run);
  return c.result_bytes();
}

void serial_backwards(void*, int tasks, void (*task)(void*, int), void* context) {
  for (int index = tasks - 1; index >= 0; --index) task(context, index);
}

void own_threads(void*, int tasks, void (*task)(void*, int), void* context) {
  std::vector<std::thread> threads;
  for (int index = 0; index < tasks; ++index) threads.emplace_back(task, context, index);
  for (std::thread& thread : threads) thread.join();
}

// What a call says while static objects are destroyed; made before the library's own.
struct LateCall {
  std::string want;
  ~LateCall() {
    if (want.empty()) return;
    const Tensor shape(nullptr, f32, {1, 1, 4, 4});
    const Attention attention{.q = shape, .k = shape, .v = shape};
    _exit(explain(attention, Pass::forward).backend == want ? 0 : 1);
  }
};
LateCall late_call;

// What `succeeds` says in a child process; 0 for true.
template <class Work>
int status_of_child(Work succeeds) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a deadlock ends the child, not the test
    _exit(succeeds() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

}  // namespace

TEST_SUITE_BEGIN("threads");

TEST_CASE("an Executor that runs the workers one by one, the last first, does not deadlock") {
  const std::string want = bits_with({.threads = 1});
  for (int threads : {1, 2, 3, 8}) {
    CHECK(bits_with({.threads = threads, .executor = {.run = serial_backwards}}) == want);
    CHECK(bits_with({.threads = threads, .executor = {.run = own_threads}}) == want);
  }
}

TEST_CASE("many threads call forward and backward at once") {
  const std::string want = bits_with({.threads = 1});
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&, caller] {
      for (int again = 0; again < 3; ++again) wrong += bits_with({.threads = caller % 4}) != want;
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

// A frame of its own: where pthread_testcancel leaves a frame with variables, AddressSanitizer goes
// on guarding them while the C library reuses the stack.
[[gnu::noinline]] void call_and_count(std::atomic<int>& calls, std::atomic<int>& ended) {
  ++calls;
  bits_with({.threads = 3});
  ++ended;
}

TEST_CASE("a thread that is cancelled ends after its call") {
  static std::atomic<int> calls, ended;
  calls = ended = 0;
  for (int again = 0; again < 20; ++again) {
    const int before = calls;
    pthread_t caller{};
    const auto call = [](void*) -> void* {
      while (true) {
        call_and_count(calls, ended);
        pthread_testcancel();
      }
    };
    REQUIRE(pthread_create(&caller, nullptr, call, nullptr) == 0);
    while (calls == before) std::this_thread::yield();
    pthread_cancel(caller);
    void* result = nullptr;
    pthread_join(caller, &result);
    CHECK(result == PTHREAD_CANCELED);
  }
  CHECK(ended >= 20);
}

TEST_CASE("an allocator that throws is an Error") {
  const auto closed = [](void*, std::size_t) -> void* { throw std::runtime_error("is closed"); };
  CHECK_THROWS_WITH_AS(bits_with({.allocator = {.allocate = closed}}),
                       "allocator = is closed: it threw this exception", Error);
}

TEST_CASE("a call within the pool's own work") {
  const std::string want = bits_with({.threads = 1});
  std::atomic<int> wrong{0};
  parallel(3, {}, [&](int) { wrong += bits_with({.threads = 3}) != want; });
  CHECK(wrong == 0);
}

TEST_CASE("after a fork the child has a pool of its own") {
  const std::string want = bits_with({.threads = 4});  // the parent's pool has threads
  const auto same = [&] { return bits_with({.threads = 4}) == want; };
  for (int again = 0; again < 3; ++again) CHECK(status_of_child(same) == 0);
  CHECK(bits_with({.threads = 4}) == want);
}

#if defined(__linux__)
TEST_CASE("the pool's threads use the process's cores, whichever thread first called") {
  const auto cores_of_helpers = [] {
    std::atomic<int> most{0}, started{0};
    parallel(2, {}, [&](int) {
      ++started;
      for (int n = 0; n < 2000 && started < 2; ++n) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      cpu_set_t set;
      CPU_ZERO(&set);
      sched_getaffinity(0, sizeof set, &set);
      most = std::max(int(most), CPU_COUNT(&set));
    });
    return int(most);
  };
  const int all = machine().threads;
  CHECK(status_of_child([&] {
          bool same = false;
          std::thread([&] {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(sched_getcpu(), &one);
            sched_setaffinity(0, sizeof one, &one);
            same = cores_of_helpers() == all;
          }).join();
          return same;
        }) == 0);
}
#endif

// The sanitizers' own locks and thread tables do not survive such a fork.
TEST_CASE("a fork while other threads call" * doctest::skip(kSanitizer)) {
  const std::string want = bits_with({.threads = 2});
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) bits_with({.threads = 3});
  });
  int failed = 0;
  const auto same = [&] { return bits_with({.threads = 4}) == want; };
  for (int again = 0; again < 5; ++again) failed += status_of_child(same) != 0;
  stop = true;
  busy.join();
  CHECK(failed == 0);
}

TEST_CASE("calls while the process ends choose the kernels that they always do") {
  const Case c(settings());
  const std::string backend = explain(c.attention(), Pass::forward).backend;
  const pid_t child = fork();
  if (child == 0) {
    late_call.want = backend;
    std::exit(2);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

#ifdef REGARD_TEST_PLUGIN
// A plug-in that contains the static library, unloaded while the pool's threads wait in its code.
TEST_CASE("dlclose leaves the code in place that the pool's threads run") {
  void* const plugin = dlopen(REGARD_TEST_PLUGIN, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(plugin != nullptr);
  const auto call = reinterpret_cast<int (*)()>(dlsym(plugin, "plugin_call"));
  REQUIRE(bool(call));
  CHECK(call() == 0);
  CHECK(dlclose(plugin) == 0);
  void* const still = dlopen(REGARD_TEST_PLUGIN, RTLD_NOW | RTLD_NOLOAD);
  CHECK(still != nullptr);
  if (still) dlclose(still);
}
#endif

TEST_SUITE_END();
