// Pins the library's code in memory.
#include "threads/resident.hpp"

#include <dlfcn.h>

namespace regard {

void keep_code_resident() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&keep_code_resident), &info) || !info.dli_fname) return;
  // Fails for the program itself, which is never unmapped.
  dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

}  // namespace regard
