// Ahead: draws random problems in order. For a GPU, threads compile the kernels of the next
// problems while one runs.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "verify/random_problem.hpp"

namespace regard::cli {

class Ahead {
 public:
  struct Range {
    std::uint64_t seed = 1;
    std::int64_t first = 0, last = 0;
  };
  // threads 0: every core. On the CPU there is nothing to compile, and no thread is started.
  Ahead(const Range& range, const ProblemLimits& limits, const Run& run, int threads);
  ~Ahead();
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  RandomProblem next();  // first, first + 1, ...

 private:
  void work();

  const Range range_;
  const ProblemLimits& limits_;
  const Run& run_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::int64_t, RandomProblem> ready_;
  std::int64_t to_draw_, to_run_;
  std::int64_t window_ = 0;
  bool stopping_ = false;
};

}  // namespace regard::cli
