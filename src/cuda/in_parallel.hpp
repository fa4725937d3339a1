// Tasks on as many threads as this process has cores: compilers run one kernel a thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "system/system.hpp"

namespace regard::cuda_backend {

// Calls task(i) for each i in [0, count), even after one has thrown; then throws the first
// exception.
template <class Task>
void in_parallel(std::size_t count, const Task& task) {
  const auto cores = std::size_t(system::usable_cores());
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        task(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  std::vector<std::thread> threads;
  try {
    for (std::size_t i = 1; i < std::min(cores, count); ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Fewer threads, then.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace regard::cuda_backend
