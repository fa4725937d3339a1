// A call's workspace, aligned to cache lines, and its parts.
#pragma once

#include <cstddef>

#include "plan/cpu/plan.hpp"
#include "problem/host_workspace.hpp"
#include "regard/regard.hpp"

namespace regard::cpu_backend {

class Memory {
 public:
  Memory(const CpuWorkspace& layout, const Run& run)
      : layout_(layout), workspace_(static_cast<std::size_t>(layout.size), 64, run) {}

  char* at(int64 offset) const { return at<char>(offset); }
  template <class T>
  T* at(int64 offset) const {
    return reinterpret_cast<T*>(workspace_.begin() + offset);
  }
  char* scratch(int worker) const { return at(layout_.scratch + worker * layout_.scratch_size); }

 private:
  const CpuWorkspace& layout_;
  HostWorkspace workspace_;
};

}  // namespace regard::cpu_backend
