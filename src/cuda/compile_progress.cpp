// A thread writes the line, because the calling thread compiles.
#include "cuda/compile_progress.hpp"

#include <atomic>
#include <system_error>

#include "cuda/disk_cache.hpp"
#include "cuda/environment.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

std::atomic<bool> may_show{true};

}  // namespace

void set_progress(bool shown) { may_show.store(shown, std::memory_order_relaxed); }

CompileProgress::CompileProgress(std::size_t kernels, int capability,
                                 std::chrono::milliseconds patience)
    : kernels_(kernels), capability_(capability), patience_(patience) {
  const bool shows = may_show.load(std::memory_order_relaxed) && stderr_is_terminal();
  if (kernels == 0 || (!shows && !is_logging())) return;
  try {
    thread_ = std::thread([this] { watch(); });
  } catch (const std::system_error&) {
    // No line, then.
  }
}

CompileProgress::~CompileProgress() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  wake_.notify_all();
  thread_.join();
  if (!shown_) return;
  const std::string cache = cache_fault().empty() ? cache_folder() : "";
  show(text("compiled", compiled_) + (cache.empty() ? "" : ", kept in " + cache), "\n");
}

void CompileProgress::add(Origin origin) {
  const std::lock_guard lock(mutex_);
  ++ready_;
  compiled_ += origin == Origin::compiler;
}

void CompileProgress::watch() {
  std::unique_lock lock(mutex_);
  auto pause = patience_;
  while (!wake_.wait_for(lock, pause, [this] { return ended_; })) {
    show(text("compiling", kernels_) + ", " + std::to_string(ready_) + " ready", "");
    shown_ = true;
    pause = std::chrono::milliseconds(500);
  }
}

// "compiling 3 kernels for sm_90, 2.5 s"
std::string CompileProgress::text(const char* verb, std::size_t count) const {
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
  return std::string(verb) + " " + std::to_string(count) + (count == 1 ? " kernel" : " kernels") +
         " for sm_" + std::to_string(capability_) + ", " + decimal(passed.count(), 1) + " s";
}

void CompileProgress::show(const std::string& line, const char* end) {
  if (!shown_ || *end) log_line(line);
  if (may_show.load(std::memory_order_relaxed) && stderr_is_terminal()) {
    write_to_stderr("\r\x1b[Kregard: " + line + end);
  }
}

}  // namespace regard::cuda_backend
