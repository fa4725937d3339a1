// Threads draw and compile a window of problems ahead of the one that runs.
#include "verify/ahead.hpp"

#include <algorithm>

#include "regard/cuda.hpp"

namespace regard::cli {

Ahead::Ahead(const Range& range, const ProblemLimits& limits, const Run& run, int threads)
    : range_(range), limits_(limits), run_(run), to_draw_(range.first), to_run_(range.first) {
  if (run.device.kind == Device::Kind::cpu) return;
  if (threads == 0) threads = machine().threads;
  const std::int64_t most = std::min<std::int64_t>(threads, range.last - range.first);
  window_ = 3 * most;
  for (std::int64_t n = 0; n < most; ++n) threads_.emplace_back([this] { work(); });
}

Ahead::~Ahead() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

RandomProblem Ahead::next() {
  if (threads_.empty()) {
    return random_problem(range_.seed, static_cast<std::uint64_t>(to_run_++), limits_);
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ready_.contains(to_run_); });
  RandomProblem problem = std::move(ready_.extract(to_run_++).mapped());
  lock.unlock();
  changed_.notify_all();
  return problem;
}

void Ahead::work() {
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || to_draw_ < to_run_ + window_; });
    if (stopping_ || to_draw_ >= range_.last) return;
    const std::int64_t index = to_draw_++;
    lock.unlock();
    RandomProblem problem = random_problem(range_.seed, static_cast<std::uint64_t>(index), limits_);
    try {
      prepare(problem.attention, problem.forward_outputs(), run_);
      if (problem.dout) {
        prepare(problem.attention, problem.backward_inputs(), problem.gradients(), run_);
      }
    } catch (const Error&) {
      // The call of judge() will throw the same.
    }
    lock.lock();
    ready_.emplace(index, std::move(problem));
    lock.unlock();
    changed_.notify_all();
  }
}

}  // namespace regard::cli
