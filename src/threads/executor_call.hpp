// One parallel() call on a caller's Executor.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

#include "regard/regard.hpp"
#include "threads/function_ref.hpp"

namespace regard {

// Watches that the Executor calls each task exactly once before it returns.
class ExecutorCall {
 public:
  // Runs work(worker) for each worker in [0, workers). Throws Error if the Executor leaves a worker
  // out, calls it twice, or calls one that does not exist.
  static void run(const Executor&, int workers, FunctionRef<void(int)> work);

 private:
  ExecutorCall(int workers, FunctionRef<void(int)> work)
      : work_(work), workers_(workers), claimed_(new std::atomic_flag[std::size_t(workers)]()) {}

  static void call_task(void* context, int index);
  void start(int index);
  int withhold_others();           // tasks that were not called, and cannot be called any more
  void wait_for(int tasks) const;  // until so many have ended
  static void abandon(ExecutorCall*);

  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();

  const FunctionRef<void(int)> work_;
  const int workers_;
  const std::unique_ptr<std::atomic_flag[]> claimed_;
  std::atomic<int> ended_{0};
  std::atomic<std::int64_t> wrong_index_{kNone};
  ExecutorCall* older_ = nullptr;  // in the list of abandoned calls
};

}  // namespace regard
