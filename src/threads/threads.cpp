// The thread pool: persistent threads that help whichever call has workers left to start.
#include "threads/threads.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "problem/refuse.hpp"
#include "system/system.hpp"
#include "threads/executor_call.hpp"
#include "threads/float_state.hpp"
#include "threads/helper.hpp"
#include "threads/task_queue.hpp"

namespace regard {
namespace {

// Of `count` threads that sleep, how many repay their waking by a call that would take one thread
// so long. The caller wakes one after another: n take n kWaking, and leave the (n + 1)-th part of
// the time, which together is least where (n + 1)^2 is the time over kWaking.
int threads_to_wake(int count, std::int64_t nanoseconds) {
  constexpr std::int64_t kWaking = 3000;
  std::int64_t n = 0;
  while (n < count && (n + 2) * (n + 2) <= nanoseconds / kWaking) ++n;
  return static_cast<int>(n);
}

// A call offers its workers to the helpers that look for work, and lists the rest for those that it
// wakes. In the end it begins whatever nobody has begun.
class Pool {
 public:
  // Allocates nothing that the call would need: kernels may have written results before.
  void run(Workers asked, FunctionRef<void(int)> work) {
    const system::CancellationDisabled until_helpers_have_ended;
    const int workers = asked.count;
    Job job{work, workers};
    std::unique_lock lock(mutex_, std::defer_lock);
    lock_soon(lock);
    grow(workers - 1);
    const int left = workers - 1 - offer(job, workers - 1);
    if (left > 0) insert(job, left);
    lock.unlock();
    for (int n = threads_to_wake(left, asked.nanoseconds); n > 0; --n) wake_.notify_one();
    run_worker(job);
    for (Helper* helper = helpers_; helper; helper = helper->next) {
      if (helper->take_back(job)) run_worker(job);
    }
    if (left > 0) {
      lock_soon(lock);
      while (job.in_list > 0) {
        run_listed(job, lock);
        lock_soon(lock);
      }
      remove(job);
      lock.unlock();
    }
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

  // Offers a worker to each of the helpers that look for work, up to so many; returns how many.
  int offer(Job& job, int most) {
    int offered = 0;
    for (Helper* helper = helpers_; helper && offered < most; helper = helper->next) {
      offered += helper->offer(job);
    }
    return offered;
  }

  void insert(Job& job, int workers) {  // behind the others
    job.in_list = workers;
    listed_.fetch_add(workers, std::memory_order_relaxed);
    Job** place = &jobs_;
    while (*place) place = &(*place)->next;
    *place = &job;
  }
  void remove(Job& job) {
    Job** place = &jobs_;
    while (*place != &job) place = &(*place)->next;
    *place = job.next;
  }
  Job* find_listed() {
    Job* job = jobs_;
    while (job && job->in_list == 0) job = job->next;
    return job;
  }
  // Runs a worker of the job, and unlocks the mutex before.
  bool run_listed(Job& job, std::unique_lock<std::mutex>& lock) {
    --job.in_list;
    listed_.fetch_sub(1, std::memory_order_relaxed);
    lock.unlock();
    return run_worker(job);
  }

  // Returns whether all have finished. After that the job may be gone.
  static bool run_worker(Job& job) {
    const int worker = job.begun.fetch_add(1, std::memory_order_relaxed), workers = job.workers;
    {
      const DefaultFloatState floats;
      job.work(worker);
    }
    return job.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == workers;
  }

  // If a thread cannot be created, the caller does the work itself.
  void grow(int threads) {
    while (threads_ < threads) {
      try {
        auto helper = std::make_unique<Helper>(helpers_.load());
        std::thread([this, self = helper.get()] { serve(*self); }).detach();
        helpers_ = helper.release();
      } catch (const std::exception&) {
        return;
      }
      ++threads_;
    }
  }

  [[noreturn]] void serve(Helper& self) {
    system::become_helper();
    while (true) {
      const auto [offered, timed_out] =
          self.look([&] { return listed_.load(std::memory_order_relaxed) > 0; });
      bool is_last = false;
      if (offered) {
        is_last = run_worker(*offered);
      } else {
        std::unique_lock lock(mutex_, std::defer_lock);
        lock_soon(lock);
        Job* job = find_listed();
        if (!job && !timed_out) continue;
        wake_.wait(lock, [&] { return job || (job = find_listed()); });
        is_last = run_listed(*job, lock);
      }
      if (!is_last) continue;
      const std::lock_guard lock(mutex_);
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* jobs_ = nullptr;             // more workers than helpers that took offers
  std::atomic<int> listed_{0};      // workers that they have left to begin
  std::atomic<Helper*> helpers_{};  // the latest; grows under the mutex
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

void parallel(Workers workers, const Run& run, FunctionRef<void(int)> work) {
  if (workers.count <= 1) {
    if (workers.count == 1) work(0);
    return;
  }
  if (run.executor.run) {
    ExecutorCall::run(run.executor, workers.count, work);
  } else {
    pool().run(workers, work);
  }
}

void parallel_tasks(std::int64_t tasks, Workers workers, const Run& run,
                    FunctionRef<void(std::int64_t, int)> task) {
  TaskQueue queue(tasks);
  std::atomic<bool> out_of_memory{false};
  workers.count = static_cast<int>(std::min<std::int64_t>(workers.count, tasks));
  parallel(workers, run, [&](int worker) {
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
