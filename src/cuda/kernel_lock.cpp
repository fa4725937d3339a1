// Locks on single bytes of one file, of the kind that belongs to the open file (OFD).
#include "cuda/kernel_lock.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "cuda/environment.hpp"
#include "cuda/hash.hpp"
#include "cuda/trust.hpp"

namespace regard::cuda_backend {
namespace {

constexpr std::chrono::milliseconds kPause{10};
std::atomic_flag waits_in_vain;

}  // namespace

KernelLock::KernelLock(const KernelKey& key, std::chrono::milliseconds longest) : KernelLock() {
  if (!make_cache_folder().empty()) return;  // what is not kept cannot be shared
  constexpr int kFlags = O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  file_ = open((cache_folder() + "/" + kLockName).c_str(), kFlags, 0600);
  if (file_ < 0 || !trust_fault(file_).empty()) return;
  at_ = long(hash_of(file_name(key)).low >> 2);
  const auto end = std::chrono::steady_clock::now() + longest;
  while (!(is_held_ = change(F_WRLCK))) {
    if (errno != EAGAIN && errno != EACCES) return;  // not every file system has locks
    if (std::chrono::steady_clock::now() >= end && !waits_in_vain.test_and_set()) {
      log_line("cache: another process has held the lock of a kernel for too long");
    }
    if (waits_in_vain.test(std::memory_order_relaxed)) return;
    std::this_thread::sleep_for(kPause);
  }
}

KernelLock::~KernelLock() {
  if (file_ < 0) return;
  if (is_held_) change(F_UNLCK);  // a child process may have the open file too
  close(file_);
}

bool KernelLock::change(short type) const {
#ifdef F_OFD_SETLK
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = at_;
  lock.l_len = 1;
  return fcntl(file_, F_OFD_SETLK, &lock) == 0;
#else
  static_cast<void>(type);
  errno = ENOTSUP;
  return false;
#endif
}

}  // namespace regard::cuda_backend
