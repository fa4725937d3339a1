// parallel(): every worker exactly once - nested, from many threads at once, on any Executor.
#include "threads/threads.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "threads/task_queue.hpp"

using namespace regard;

namespace {

// True if parallel(workers) calls each worker once.
bool each_once(int workers, const Run& run = {}) {
  std::vector<std::atomic<int>> calls(workers);
  parallel(workers, run, [&](int worker) { ++calls[worker]; });
  for (const auto& count : calls) {
    if (count != 1) return false;
  }
  return true;
}

void serial_backwards(void*, int tasks, void (*task)(void*, int), void* context) {
  for (int index = tasks - 1; index >= 0; --index) task(context, index);
}

void own_threads(void* self, int tasks, void (*task)(void*, int), void* context) {
  ++*static_cast<std::atomic<int>*>(self);
  std::vector<std::thread> threads;
  for (int index = 0; index < tasks; ++index) threads.emplace_back(task, context, index);
  for (std::thread& thread : threads) thread.join();
}

// How often the process's threads have gone to sleep.
std::int64_t times_asleep() {
  std::int64_t sum = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(thread.path() / "status");
    for (std::string word; status >> word;) {
      std::int64_t count = 0;
      if (word == "voluntary_ctxt_switches:" && status >> count) sum += count;
    }
  }
  return sum;
}

}  // namespace

TEST_SUITE_BEGIN("threads");

TEST_CASE("every worker once, for any number of them") {
  for (int workers : {0, 1, 2, 3, 5, 8, 33}) {
    for (int again = 0; again < 50; ++again) CHECK(each_once(workers));
  }
}

TEST_CASE("every task once, and handed out in ascending order") {
  for (std::int64_t tasks : {0, 1, 2, 7, 1000}) {
    for (int workers : {1, 2, 5}) {
      std::vector<std::atomic<int>> calls(tasks);
      std::vector<std::int64_t> last(workers, -1);
      std::atomic<int> wrong{0};
      parallel_tasks(tasks, workers, {}, [&](std::int64_t task, int worker) {
        ++calls[task];
        wrong += worker < 0 || worker >= workers || task <= last[worker];
        last[worker] = task;
      });
      for (const auto& count : calls) wrong += count != 1;
      CHECK(wrong == 0);
    }
  }
  TaskQueue queue(3);
  std::int64_t task = -1;
  for (std::int64_t want = 0; want < 3; ++want) {
    CHECK(queue.next(task));
    CHECK(task == want);
  }
  CHECK(!queue.next(task));
  CHECK(!queue.next(task));
}

TEST_CASE("nested calls finish, to the third level") {
  std::atomic<int> calls{0};
  parallel(4, {},
           [&](int) { parallel(3, {}, [&](int) { parallel(2, {}, [&](int) { ++calls; }); }); });
  CHECK(calls == 24);
}

TEST_CASE("many threads call at once") {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&, caller] {
      for (int again = 0; again < 100; ++again) wrong += !each_once(1 + (caller + again) % 6);
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

TEST_CASE("the pool's threads take part") {
  // Two workers that wait for each other can only finish on two threads; the pool has one besides
  // the caller. (No kernel may do this: an Executor may run workers one after another.)
  std::atomic<int> arrived{0};
  std::set<std::thread::id> ids;
  std::mutex mutex;
  parallel(2, {}, [&](int) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
    const std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  CHECK(ids.size() == 2);
}

TEST_CASE("a call wakes as many of the pool's threads as it has workers for") {
  if (!std::filesystem::exists("/proc/self/task")) return;  // Linux counts how often threads slept
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
  constexpr int kThreads = 24, kCalls = 40;
  parallel(kThreads + 1, {}, [&](int) { pause(); });
  pause();
  const std::int64_t before = times_asleep();
  for (int call = 0; call < kCalls; ++call) {
    parallel(2, {}, [](int) {});
    pause();
  }
  CHECK(times_asleep() - before < kCalls * kThreads / 2);
}

TEST_CASE("a call that is over before threads would be awake wakes none") {
  if (!std::filesystem::exists("/proc/self/task")) return;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
  constexpr int kThreads = 8, kCalls = 40;
  parallel(kThreads, {}, [&](int) { pause(); });
  pause();
  const std::int64_t before = times_asleep();
  for (int call = 0; call < kCalls; ++call) {
    std::atomic<int> calls{0};
    parallel({.count = kThreads, .nanoseconds = 1000}, {}, [&](int) { ++calls; });
    CHECK(calls == kThreads);
    pause();  // this thread sleeps, too
  }
  CHECK(times_asleep() - before < 2 * kCalls);
}

TEST_CASE("threads that find no work sleep") {
  parallel(8, {}, [](int) {});
  const std::clock_t before = std::clock();  // of all threads of the process
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(double(std::clock() - before) / CLOCKS_PER_SEC < 0.05);
}

TEST_CASE("a caller's Executor runs the workers") {
  const Run backwards{.executor = {.run = serial_backwards}};
  std::vector<int> order;
  parallel(4, backwards, [&](int worker) { order.push_back(worker); });
  CHECK(order == std::vector<int>{3, 2, 1, 0});
  std::atomic<int> used{0};
  const Run own{.executor = {.run = own_threads, .self = &used}};
  CHECK(each_once(5, own));
  CHECK(used == 1);
}

TEST_CASE("an Executor that breaks its contract is an Error, and runs no worker twice") {
  using Task = void (*)(void*, int);
  const auto nothing = [](void*, int, Task, void*) {};
  const auto all_but_last = [](void*, int tasks, Task task, void* context) {
    for (int index = 0; index + 1 < tasks; ++index) task(context, index);
  };
  const auto first_twice = [](void*, int tasks, Task task, void* context) {
    task(context, 0);
    for (int index = 0; index < tasks; ++index) task(context, index);
  };
  const auto one_too_many = [](void*, int tasks, Task task, void* context) {
    for (int index = 0; index <= tasks; ++index) task(context, index);
  };
  const auto below_zero = [](void*, int tasks, Task task, void* context) {
    for (int index = -1; index < tasks; ++index) task(context, index);
  };
  const std::pair<decltype(Executor::run), const char*> broken[] = {
      {nothing, "executor = 3: of 3 tasks were not called; results are incomplete"},
      {all_but_last, "executor = 1: of 3 tasks were not called; results are incomplete"},
      {first_twice,
       "executor = 0: a task was called with this index twice, or out of range; results are "
       "incomplete"},
      {one_too_many,
       "executor = 3: a task was called with this index twice, or out of range; results are "
       "incomplete"},
      {below_zero,
       "executor = -1: a task was called with this index twice, or out of range; results are "
       "incomplete"}};
  for (const auto& [executor, message] : broken) {
    std::atomic<int> calls[3]{};
    CHECK_THROWS_WITH_AS(
        parallel(3, {.executor = {.run = executor}}, [&](int worker) { ++calls[worker]; }), message,
        Error);
    for (const auto& count : calls) CHECK(count <= 1);
  }
}

TEST_CASE("an Executor that throws is an Error, once the tasks that it began have ended") {
  struct Late {
    std::thread thread;
    std::atomic<bool> began{false};
  };
  const auto throws_early = [](void* self, int, void (*task)(void*, int), void* context) {
    auto& late = *static_cast<Late*>(self);
    late.thread = std::thread([&late, task, context] {
      task(context, 0);
      task(context, 1);  // perhaps after the call has ended: it does nothing then
    });
    while (!late.began) std::this_thread::yield();
    throw std::runtime_error("no thread could be started");
  };
  Late late;
  std::atomic<int> ended{0};
  CHECK_THROWS_WITH_AS(parallel(3, {.executor = {.run = throws_early, .self = &late}},
                                [&](int) {
                                  late.began = true;
                                  std::this_thread::sleep_for(std::chrono::milliseconds(20));
                                  ++ended;
                                }),
                       "executor = no thread could be started: it threw this exception; results "
                       "are incomplete",
                       Error);
  CHECK(ended >= 1);
  late.thread.join();
  CHECK(ended <= 2);
  struct Cancelled {};
  const auto throws_another = [](void*, int, void (*)(void*, int), void*) { throw Cancelled{}; };
  CHECK_THROWS_WITH_AS(parallel(2, {.executor = {.run = throws_another}}, [](int) {}),
                       "executor = an exception of unknown type: it threw this; results are "
                       "incomplete",
                       Error);
}

namespace {

struct Deferred {
  void (*task)(void*, int) = nullptr;
  void* context = nullptr;
};

}  // namespace

TEST_CASE("a task that an Executor calls after it has returned does nothing") {
  Deferred later;
  const auto defer = [](void* self, int, void (*task)(void*, int), void* context) {
    *static_cast<Deferred*>(self) = {task, context};
  };
  std::atomic<int> calls{0};
  CHECK_THROWS_AS(parallel(2, {.executor = {.run = defer, .self = &later}}, [&](int) { ++calls; }),
                  Error);
  later.task(later.context, 1);
  CHECK(calls == 0);
}

TEST_CASE("worker_count") {
  CHECK(worker_count({.threads = 3}) == 3);
  CHECK(worker_count({}) >= 1);
  CHECK(worker_count({}) == machine().threads);
  CHECK_THROWS_AS(worker_count({.threads = -1}), Error);
}

TEST_SUITE_END();
