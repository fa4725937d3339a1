// Signals that a kernel's own mistakes raise: an address that is nobody's, a division by zero.
#pragma once

#include <string>

namespace regard::emulated {

// While it lives, such a signal calls `trapped`, on a stack of its own; `trapped` must not return.
class Traps {
 public:
  explicit Traps(void (*trapped)(const char* what, const void* instruction));
  ~Traps();
  Traps(const Traps&) = delete;
  Traps& operator=(const Traps&) = delete;
};

// The lines of source that an instruction belongs to, innermost first, as far as they are known.
std::string lines_of(const void* instruction);

}  // namespace regard::emulated
