// The parts of a GPU workspace, one behind the other.
#pragma once

#include "plan/count.h"

namespace regard {

class WorkspaceRoom {
 public:
  void take(int64& offset, Count bytes) {
    offset = size();
    size_ = size_ + bytes.rounded_up(256);
  }
  template <class... Offsets>
  void take_none(Offsets&... offsets) {
    ((offsets = size()), ...);
  }
  int64 size() const { return size_.value(); }  // so far
  bool fits() const { return size_.fits(); }

 private:
  Count size_ = 0;
};

}  // namespace regard
