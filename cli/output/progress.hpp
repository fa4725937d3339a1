// Progress on stderr for work of over two seconds: one live line on a terminal, else a line
// every ten seconds.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace regard::cli {

class Progress {
 public:
  explicit Progress(std::string text);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void set(std::string text);
  double seconds() const;

 private:
  void watch();

  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::string text_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace regard::cli
