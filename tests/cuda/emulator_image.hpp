// What stands in for a cubin: these words, then a shared library for the emulated machine.
#pragma once

#include <cstdint>

namespace regard::emulated {

struct ImageHead {
  char name[16] = "regard emulated";
  std::uint64_t size = 0;  // bytes that follow
};

}  // namespace regard::emulated
