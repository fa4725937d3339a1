// A thread prints the progress, because the library's calls block.
#include "output/progress.hpp"

#include <unistd.h>

#include "output/output.hpp"

namespace regard::cli {

Progress::Progress(std::string text) : text_(std::move(text)), thread_([this] { watch(); }) {}

Progress::~Progress() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Progress::set(std::string text) {
  const std::lock_guard lock(mutex_);
  text_ = std::move(text);
}

double Progress::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
}

void Progress::watch() {
  using namespace std::chrono_literals;
  if (output::is_quiet()) return;
  const bool terminal = isatty(STDERR_FILENO) != 0;
  bool shown = false;
  std::unique_lock lock(mutex_);
  auto pause = terminal ? 2000ms : 10000ms;
  while (!wake_.wait_for(lock, pause, [this] { return done_; })) {
    if (terminal) {
      output::put_progress(fmt::format("\r\x1b[K{} ... {:.0f} s", text_, seconds()));
      pause = 300ms;
    } else {
      output::put_progress(fmt::format("{} ... {:.0f} s\n", text_, seconds()));
    }
    shown = true;
  }
  if (shown && terminal) output::put_progress("\r\x1b[K");
}

}  // namespace regard::cli
