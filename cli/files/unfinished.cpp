// A signal handler that deletes one file. The handler always runs on the thread that writes the
// file, so that the path cannot change while the handler reads it, and nothing is written after it.
#include "files/unfinished.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace regard::cli {

namespace {

constexpr int kSignals[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU, SIGXFSZ};

std::atomic<const char*> unfinished{nullptr};
static_assert(std::atomic<const char*>::is_always_lock_free);
pthread_t writer;

extern "C" void remove_unfinished(int number) {
  if (!pthread_equal(pthread_self(), writer)) {
    pthread_kill(writer, number);
    return;
  }
  if (const char* const path = unfinished) unlink(path);
  signal(number, SIG_DFL);
  raise(number);  // the signal is blocked here, and delivered when this handler returns
}

// Installs the handler once. Signals that the caller ignores (nohup) stay ignored.
void catch_signals() {
  static const bool caught = [] {
    writer = pthread_self();
    struct sigaction action {};
    action.sa_handler = remove_unfinished;
    action.sa_flags = SA_RESTART;
    sigfillset(&action.sa_mask);
    for (int number : kSignals) {
      struct sigaction before {};
      if (sigaction(number, nullptr, &before) == 0 && before.sa_handler == SIG_DFL) {
        sigaction(number, &action, nullptr);
      }
    }
    return true;
  }();
  static_cast<void>(caught);
}

}  // namespace

Unfinished::Unfinished(const char* path) {
  unfinished = path;
  catch_signals();
}

Unfinished::~Unfinished() { unfinished = nullptr; }

}  // namespace regard::cli
