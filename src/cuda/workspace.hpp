// A call's workspace on a device, and the pools that it comes from.
#pragma once

#include <cstdint>

#include "cuda/driver.hpp"
#include "cuda/reachable.hpp"
#include "problem/given_memory.hpp"
#include "regard/regard.hpp"

namespace regard::cuda_backend {

// The library's own pool for workspaces in a context. It keeps its memory from call to call, unlike
// a device's default pool, which gives it back whenever the device is synchronised. Null where the
// device has no pools. Takes a lock.
MemoryPool workspace_pool(int device, std::uint64_t context);

// Gives back what the context's pool keeps and no call uses.
void trim_workspace_pool(int device, std::uint64_t context);

// Error unless the memory is on the device, aligned, and has so many bytes.
void check_on_device(const Workspace&, std::int64_t bytes, const MemoryNames&, ReachableMemory&);

// The caller's workspace, or memory of the caller's allocator, or memory that exists in the
// stream's order from here to the end of this.
class DeviceWorkspace {
 public:
  DeviceWorkspace(const Driver&, std::int64_t size, const Run&, MemoryPool, ReachableMemory&);
  ~DeviceWorkspace();
  DeviceWorkspace(const DeviceWorkspace&) = delete;
  DeviceWorkspace& operator=(const DeviceWorkspace&) = delete;

  DevicePointer begin() const { return begin_; }
  template <class T>
  T* at(std::int64_t offset) const {
    return begin_ ? reinterpret_cast<T*>(begin_ + std::size_t(offset)) : nullptr;
  }

 private:
  const Driver& d_;
  const Stream stream_;
  DevicePointer begin_ = 0;
  bool owned_ = false;
};

}  // namespace regard::cuda_backend
