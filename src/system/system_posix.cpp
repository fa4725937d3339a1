// Linux and macOS.
#include "system/system_posix.hpp"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include "system/system.hpp"

namespace regard::system {

CancellationDisabled::CancellationDisabled() noexcept {
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &own_);
}
CancellationDisabled::~CancellationDisabled() { pthread_setcancelstate(own_, nullptr); }

void keep_loaded(const void* address) {
  Dl_info info{};
  if (!dladdr(address, &info) || !info.dli_fname) return;
  // Fails for the program itself, which is never unmapped.
  dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

void leave_signals() {
  sigset_t signals;
  sigfillset(&signals);
  // Faults of the thread's own, and the clocks of profilers.
  for (const int kept : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) {
    sigdelset(&signals, kept);
  }
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

void after_fork(void (*child)()) { pthread_atfork(nullptr, nullptr, child); }

}  // namespace regard::system
