// A stream of the library's own next to a caller's stream.
#pragma once

#include "cuda/driver.hpp"

namespace regard::cuda_backend {

// Lives as long as a call, in the current context. It has the highest priority, so that what it
// sends begins before the multiprocessors are full. While the caller's stream is captured it is
// that stream itself. In the end the caller's stream waits for what is still on this one.
class SideStream {
 public:
  SideStream(Stream callers, int device);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  Stream get() const { return stream_; }
  // What is put on the second stream from now on waits for what is on the first one by now.
  void let_callers_wait() { order(stream_, callers_); }
  void let_side_wait() { order(callers_, stream_); }

 private:
  void order(Stream first, Stream second) const;

  const Driver& d_;
  const Stream callers_;
  const int device_;
  Stream stream_;
};

}  // namespace regard::cuda_backend
