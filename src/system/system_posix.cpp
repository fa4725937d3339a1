// Linux and macOS.
#include <dlfcn.h>
#include <pthread.h>

#include "system/system.hpp"

namespace regard::system {

void keep_loaded(const void* address) {
  Dl_info info{};
  if (!dladdr(address, &info) || !info.dli_fname) return;
  // Fails for the program itself, which is never unmapped.
  dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

void after_fork(void (*child)()) { pthread_atfork(nullptr, nullptr, child); }

}  // namespace regard::system
