// The parts of a GPU workspace, one behind the other.
#pragma once

#include "semantics/portable.h"

namespace regard {

struct WorkspaceRoom {
  int64 size = 0;  // so far

  void take(int64& offset, int64 bytes) {
    offset = size;
    size += round_up(bytes, 256);
  }
  template <class... Offsets>
  void take_none(Offsets&... offsets) {
    ((offsets = size), ...);
  }
};

}  // namespace regard
