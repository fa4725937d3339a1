#include "cuda/side_stream.hpp"

#include "regard/error.hpp"

namespace regard::cuda_backend {

SideStream::SideStream(Stream callers, int device)
    : d_(driver()), callers_(callers), device_(device), stream_(callers) {
  int captures = 0, least = 0, greatest = 0;
  check(d_.is_capturing(callers, &captures), "cuStreamIsCapturing", device);
  if (captures != 0) return;
  check(d_.priorities(&least, &greatest), "cuCtxGetStreamPriorityRange", device);
  check(d_.create_stream(&stream_, kNonBlocking, greatest), "cuStreamCreateWithPriority", device);
}

SideStream::~SideStream() {
  if (stream_ == callers_) return;
  try {
    let_callers_wait();
  } catch (const Error&) {  // of a device that has failed: its work is over
  }
  d_.destroy_stream(stream_);
}

void SideStream::order(Stream first, Stream second) const {
  if (first == second) return;
  Event event = nullptr;
  check(d_.create_event(&event, kWithoutTime), "cuEventCreate", device_);
  const Result recorded = d_.record_event(event, first);
  const Result waited = recorded == kSuccess ? d_.wait_for_event(second, event, 0) : kSuccess;
  d_.destroy_event(event);  // once it is reached
  check(recorded, "cuEventRecord", device_);
  check(waited, "cuStreamWaitEvent", device_);
}

}  // namespace regard::cuda_backend
