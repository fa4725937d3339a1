// A call's workspace: the caller's, one from the caller's allocator, or one of our own, aligned to
// cache lines.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "plan/cpu/plan.hpp"
#include "problem/given_memory.hpp"
#include "problem/refuse.hpp"
#include "regard/regard.hpp"

namespace regard::cpu_backend {

class Memory {
 public:
  Memory(const CpuWorkspace& layout, const Run& run) : layout_(layout) {
    const auto size = static_cast<std::size_t>(layout.size);
    void* data = run.workspace.data;
    if (is_given(run.workspace) && size > 0) {
      check_given(run.workspace, layout.size);
    } else if (run.allocator.allocate && size > 0) {
      data = run.allocator.allocate(run.allocator.self, size);
      if (!data)
        refuse("allocator", size, "returned no memory for so many bytes", Code::out_of_memory);
    } else {
      own_.reset(::operator new(size, std::nothrow));
      if (!own_) refuse("workspace", size, "bytes could not be allocated", Code::out_of_memory);
      data = own_.get();
    }
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    base_ = static_cast<char*>(data) + (round_up(int64(address), 64) - int64(address));
  }

  char* at(int64 offset) const { return base_ + offset; }
  template <class T>
  T* at(int64 offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  char* scratch(int worker) const {
    return base_ + layout_.scratch + worker * layout_.scratch_size;
  }

 private:
  struct Free {
    void operator()(void* p) const { ::operator delete(p); }
  };
  const CpuWorkspace& layout_;
  std::unique_ptr<void, Free> own_;
  char* base_ = nullptr;
};

}  // namespace regard::cpu_backend
