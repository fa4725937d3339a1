// Lets one process compile a kernel while others that want the same one wait for it.
//
// The lock only saves work. It belongs to an open file, so that it ends with its process at the
// latest; nobody waits longer than a limit; and without the lock the kernel is compiled anyway. The
// file lies in the cache's folder and is private (0600), so that no other user can hold the lock.
#pragma once

#include <chrono>

#include "cuda/disk_cache.hpp"

namespace regard::cuda_backend {

class KernelLock {
 public:
  static constexpr std::chrono::milliseconds kLongestWait{60'000};

  // Waits until no other process has it. After one timeout, this process waits for no kernel any
  // more.
  explicit KernelLock(const KernelKey&, std::chrono::milliseconds longest = kLongestWait);
  ~KernelLock();
  KernelLock(const KernelLock&) = delete;
  KernelLock& operator=(const KernelLock&) = delete;

  bool is_held() const { return is_held_; }

 private:
  KernelLock() =
      default;  // another one delegates to it, so that what it opened is closed if it throws
  bool change(short type) const;

  int file_ = -1;
  long at_ = 0;  // each kernel has its own byte in one file
  bool is_held_ = false;
};

}  // namespace regard::cuda_backend
