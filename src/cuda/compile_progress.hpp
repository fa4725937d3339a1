// Tells a person who waits for a call's kernels what the wait is for.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>

#include "cuda/kernel_cache.hpp"

namespace regard::cuda_backend {

// Lives while `kernels` of them are made or found. After two seconds it shows a line on stderr if
// that is a terminal, and says in its end how long compiling took; REGARD_LOG gets both lines too.
class CompileProgress {
 public:
  CompileProgress(std::size_t kernels, int capability,
                  std::chrono::milliseconds patience = std::chrono::seconds(2));
  ~CompileProgress();
  CompileProgress(const CompileProgress&) = delete;
  CompileProgress& operator=(const CompileProgress&) = delete;

  void add(Origin);  // of a kernel that is there; from any thread

 private:
  void watch();
  void show(const std::string& line, const char* end);
  std::string text(const char* verb, std::size_t count) const;

  const std::size_t kernels_;
  const int capability_;
  const std::chrono::milliseconds patience_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::size_t ready_ = 0, compiled_ = 0;
  bool ended_ = false, shown_ = false;
  std::thread thread_;  // last: it reads the others
};

// Whether the line may appear on the terminal; true by default.
void set_progress(bool shown);

}  // namespace regard::cuda_backend
