// The thread pool: persistent threads that help whichever call has workers left to start.
#include "threads/threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>

#include "problem/refuse.hpp"
#include "system/system.hpp"
#include "threads/executor_call.hpp"
#include "threads/float_state.hpp"
#include "threads/task_queue.hpp"

namespace regard {
namespace {

// Waking a thread takes 5 to 50 us, which is as long as a small call. So helpers look for the next
// call, and a caller for the end of its last workers, for a while before they sleep. A core that
// another thread could use is left to it. Returns whether `done` became true.
template <class Done>
bool spin_until(Done done) {
  constexpr std::chrono::microseconds kLongest(50);
  const auto begin = std::chrono::steady_clock::now();
  while (!done()) {
    if (std::chrono::steady_clock::now() - begin > kLongest) return false;
    std::this_thread::yield();
  }
  return true;
}

// One parallel() call. Free threads start its workers; the caller is one of them.
struct Job {
  const FunctionRef<void(int)> work;
  const int workers;
  std::atomic<int> finished{0};  // once all have, the job may be gone
  // Under the pool's mutex.
  int started = 0;
  Job* next = nullptr;  // of those that have workers left to start
};

class Pool {
 public:
  // Allocates nothing that the call would need: kernels may have written results before.
  void run(int workers, FunctionRef<void(int)> work) {
    const system::CancellationDisabled until_helpers_have_ended;
    Job job{work, workers};
    std::unique_lock lock(mutex_, std::defer_lock);
    lock_soon(lock);
    grow(workers - 1);
    insert(job);
    for (int others = workers - 1; others > 0; --others) wake_.notify_one();
    while (job.started < job.workers) start_one(job, lock);
    remove(job);
    lock.unlock();
    const auto finished = [&] { return job.finished.load(std::memory_order_acquire) == workers; };
    if (spin_until(finished)) return;
    lock.lock();
    done_.wait(lock, finished);
  }

 private:
  // A thread that sleeps until the mutex is free is late for the call.
  static void lock_soon(std::unique_lock<std::mutex>& lock) {
    if (!spin_until([&] { return lock.try_lock(); })) lock.lock();
  }

  void insert(Job& job) {  // behind the others
    jobs_begun_.fetch_add(1, std::memory_order_relaxed);
    Job** place = &jobs_;
    while (*place) place = &(*place)->next;
    *place = &job;
  }
  void remove(Job& job) {
    Job** place = &jobs_;
    while (*place != &job) place = &(*place)->next;
    *place = job.next;
  }

  // Starts one worker of the job on this thread.
  void start_one(Job& job, std::unique_lock<std::mutex>& lock) {
    const int worker = job.started++, workers = job.workers;
    lock.unlock();
    run_worker(job, worker);
    const bool is_last = job.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == workers;
    lock_soon(lock);
    if (is_last) done_.notify_all();
  }

  static void run_worker(Job& job, int worker) {
    const DefaultFloatState floats;
    job.work(worker);
  }

  Job* find_job() {
    Job* job = jobs_;
    while (job && job->started == job->workers) job = job->next;
    return job;
  }

  // If a thread cannot be created, the caller does the work itself.
  void grow(int threads) {
    while (threads_ < threads) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::exception&) {
        return;
      }
      ++threads_;
    }
  }

  [[noreturn]] void serve() {
    system::become_helper();
    std::unique_lock lock(mutex_);
    while (true) {
      Job* job = find_job();
      if (!job) {
        const std::uint64_t before = jobs_begun_.load(std::memory_order_relaxed);
        lock.unlock();
        spin_until([&] { return jobs_begun_.load(std::memory_order_relaxed) != before; });
        lock_soon(lock);
        wake_.wait(lock, [&] { return (job = find_job()) != nullptr; });
      }
      start_one(*job, lock);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* jobs_ = nullptr;
  std::atomic<std::uint64_t> jobs_begun_{0};
  int threads_ = 0;
};

// Threads do not survive a fork, so that the child starts with a new pool. Pools are never
// destroyed, because their threads may outlive every static object.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  static const bool prepared = [] {
    system::after_fork([] { current_pool.store(nullptr, std::memory_order_relaxed); });
    system::keep_loaded(reinterpret_cast<const void*>(&pool));
    return true;
  }();
  (void)prepared;
  Pool* existing = current_pool.load(std::memory_order_acquire);
  if (existing) return *existing;
  auto* made = new Pool;
  if (current_pool.compare_exchange_strong(existing, made)) return *made;
  delete made;
  return *existing;
}

}  // namespace

int worker_count(const Run& run) {
  require(run.threads >= 0 && run.threads <= 4096, "threads", run.threads,
          "must be between 0 (every usable core) and 4096");
  return run.threads > 0 ? run.threads : system::usable_cores();
}

void parallel(int workers, const Run& run, FunctionRef<void(int)> work) {
  if (workers <= 1) {
    if (workers == 1) work(0);
    return;
  }
  if (run.executor.run) {
    ExecutorCall::run(run.executor, workers, work);
  } else {
    pool().run(workers, work);
  }
}

void parallel_tasks(std::int64_t tasks, int workers, const Run& run,
                    FunctionRef<void(std::int64_t, int)> task) {
  TaskQueue queue(tasks);
  std::atomic<bool> out_of_memory{false};
  const auto count = static_cast<int>(std::min<std::int64_t>(workers, tasks));
  parallel(count, run, [&](int worker) {
    std::int64_t number = 0;
    try {
      while (queue.next(number)) task(number, worker);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
      queue.close();
    }
  });
  if (out_of_memory) {
    refuse("workspace", "a few rows", "could not be allocated; results are incomplete",
           Code::out_of_memory);
  }
}

}  // namespace regard
