// Whether a device reaches the memory that a call names.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "cuda/driver.hpp"

namespace regard::cuda_backend {

// Says for one call which memory the current context's kernels may access: the device's own, a
// peer's, managed memory, and what the host has registered.
//
// Nothing is remembered from call to call, because memory may be freed and become something else.
// Within a call, an address in an allocation that was found reachable needs no question of its own:
// tensors from one pool share a few allocations.
class ReachableMemory {
 public:
  ReachableMemory(const Driver& d, int device) : d_(d), device_(device) {}

  // An Error that names the argument, unless the pointer is null or reachable.
  void check(const char* name, const void* pointer);

 private:
  struct Range {
    DevicePointer begin = 0, end = 0;
  };

  bool is_known(DevicePointer) const;
  bool is_reachable(DevicePointer);
  [[noreturn]] void refuse_unreachable(const char* name, const void* pointer) const;

  const Driver& d_;
  const int device_;
  std::array<Range, 4> known_;
  std::size_t count_ = 0;
};

}  // namespace regard::cuda_backend
