// A thread of the pool, and what a call offers to it while it looks for work.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "threads/function_ref.hpp"

namespace regard {

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

// One parallel() call. Each of its workers is begun once: by the caller, by a helper that took an
// offer, or by a thread that found it in the pool's list.
struct Job {
  const FunctionRef<void(int)> work;
  const int workers;
  std::atomic<int> begun{0};
  std::atomic<int> finished{0};  // once all have, the job may be gone
  // Under the pool's mutex.
  int in_list = 0;  // workers that whoever finds the job may begin
  Job* next = nullptr;
};

// On a cache line of its own, so that an offer disturbs no other helper.
class alignas(64) Helper {
 public:
  explicit Helper(Helper* others) : next(others) {}
  Helper* const next;

  // Whether the helper looks for work and has no offer yet. Then it has this one.
  bool offer(Job& job) {
    Job* none = nullptr;
    return job_.load(std::memory_order_relaxed) == none &&
           job_.compare_exchange_strong(none, &job, std::memory_order_acq_rel);
  }
  // Whether the helper had the offer and has not taken it; it has it no longer.
  bool take_back(Job& job) {
    Job* own = &job;
    return job_.load(std::memory_order_relaxed) == own &&
           job_.compare_exchange_strong(own, nullptr, std::memory_order_acq_rel);
  }

  struct Found {
    Job* job;        // taken; null: none
    bool timed_out;  // nothing came for a while
  };
  // Looks for offers, and for other work.
  template <class HasOther>
  Found look(HasOther has_other) {
    job_.store(nullptr, std::memory_order_release);
    const bool found =
        spin_until([&] { return job_.load(std::memory_order_relaxed) != nullptr || has_other(); });
    return {job_.exchange(busy(), std::memory_order_acq_rel), !found};
  }

 private:
  // In place of an offer, while there can be none.
  static Job* busy() { return reinterpret_cast<Job*>(alignof(Job)); }

  std::atomic<Job*> job_{busy()};
};

}  // namespace regard
