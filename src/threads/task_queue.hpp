// Hands out task numbers in ascending order to whichever worker asks, so that the tasks before a
// task have always begun.
#pragma once

#include <atomic>
#include <cstdint>

namespace regard {

class TaskQueue {
 public:
  explicit TaskQueue(std::int64_t tasks) : tasks_(tasks) {}

  // False when none is left.
  bool next(std::int64_t& task) noexcept {
    task = next_.fetch_add(1, std::memory_order_relaxed);
    return task < tasks_;
  }

  // Hands out no more tasks.
  void close() noexcept { next_.store(tasks_, std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> next_{0};
  const std::int64_t tasks_;
};

}  // namespace regard
