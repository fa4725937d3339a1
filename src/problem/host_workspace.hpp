// A call's workspace in the host's memory: the caller's, one from the caller's allocator, or one of
// the library's own for as long as this lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "problem/given_memory.hpp"
#include "problem/refuse.hpp"
#include "regard/regard.hpp"

namespace regard {

class HostWorkspace {
 public:
  // bytes: with room for the alignment, a power of 2. Errors: a given workspace that is smaller, or
  // memory that cannot be had.
  HostWorkspace(std::size_t bytes, std::size_t alignment, const Run& run) {
    void* const data = bytes > 0 && is_given(run.workspace)  ? given(bytes, run.workspace)
                       : bytes > 0 && run.allocator.allocate ? allocated_by(run.allocator, bytes)
                                                             : from_heap(bytes);
    begin_ = static_cast<std::byte*>(data) + (-reinterpret_cast<std::uintptr_t>(data) % alignment);
  }

  std::byte* begin() const { return begin_; }

 private:
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory); }
  };

  static void* given(std::size_t bytes, const Workspace& workspace) {
    check_given(workspace, std::int64_t(bytes));
    return workspace.data;
  }
  void* from_heap(std::size_t bytes) {
    own_.reset(::operator new(bytes, std::nothrow));
    if (own_) return own_.get();
    refuse("workspace", bytes, "so many bytes could not be allocated", Code::out_of_memory);
  }

  std::unique_ptr<void, Free> own_;
  std::byte* begin_ = nullptr;
};

}  // namespace regard
