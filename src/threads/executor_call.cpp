// One parallel() call on a caller's Executor.
#include "threads/executor_call.hpp"

#include <exception>
#include <string>
#include <thread>

#include "problem/refuse.hpp"
#include "system/system.hpp"
#include "threads/float_state.hpp"

namespace regard {

void ExecutorCall::run(const Executor& executor, int workers, FunctionRef<void(int)> work) {
  const system::CancellationDisabled until_tasks_have_ended;
  std::unique_ptr<ExecutorCall> call(new ExecutorCall(workers, work));
  const auto end = [&] {  // tasks that began may still run on other threads
    const int left_out = call->withhold_others();
    call->wait_for(workers - left_out);
    return left_out;
  };
  try {
    executor.run(executor.self, workers, call_task, call.get());
  } catch (const std::exception& error) {
    end();
    abandon(call.release());
    refuse("executor", error.what(), "it threw this exception; results are incomplete");
  } catch (...) {
    end();
    abandon(call.release());
    refuse("executor", "an exception of unknown type", "it threw this; results are incomplete");
  }
  const int left_out = end();
  const std::int64_t wrong_index = call->wrong_index_;
  if (left_out == 0 && wrong_index == kNone) return;
  abandon(call.release());
  require(wrong_index == kNone, "executor", wrong_index,
          "a task was called with this index twice, or out of range; results are incomplete");
  refuse("executor", left_out,
         "of " + std::to_string(workers) + " tasks were not called; results are incomplete");
}

void ExecutorCall::call_task(void* context, int index) {
  static_cast<ExecutorCall*>(context)->start(index);
}

void ExecutorCall::start(int index) {
  if (index < 0 || index >= workers_ || claimed_[std::size_t(index)].test_and_set()) {
    wrong_index_ = index;
    return;
  }
  const DefaultFloatState floats;
  work_(index);
  ended_.fetch_add(1, std::memory_order_release);
}

int ExecutorCall::withhold_others() {
  int withheld = 0;
  for (int index = 0; index < workers_; ++index)
    withheld += !claimed_[std::size_t(index)].test_and_set();
  return withheld;
}

void ExecutorCall::wait_for(int tasks) const {
  while (ended_.load(std::memory_order_acquire) < tasks) std::this_thread::yield();
}

// An Executor that broke the contract may still hold the context, which is therefore never freed.
void ExecutorCall::abandon(ExecutorCall* call) {
  static std::atomic<ExecutorCall*> newest{nullptr};
  call->older_ = newest.exchange(call);
}

}  // namespace regard
