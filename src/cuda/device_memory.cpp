// Device memory and GPU time for programs without CUDA's headers.
#include "cuda/driver.hpp"
#include "cuda/workspace.hpp"
#include "problem/refuse.hpp"
#include "regard/cuda.hpp"

namespace regard {
namespace {

using namespace cuda_backend;

DevicePointer address(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

class OwnedEvent {
 public:
  explicit OwnedEvent(int device) : device_(device) {
    check(driver().create_event(&event_, 0), "cuEventCreate", device);
  }
  ~OwnedEvent() { driver().destroy_event(event_); }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;

  void record() { check(driver().record_event(event_, nullptr), "cuEventRecord", device_); }
  double seconds_since(const OwnedEvent& begin) const {
    float milliseconds = 0;
    check(driver().synchronize_event(event_), "cuEventSynchronize", device_);
    check(driver().elapsed(&milliseconds, begin.event_, event_), "cuEventElapsedTime", device_);
    return milliseconds * 1e-3;
  }

 private:
  int device_;
  Event event_ = nullptr;
};

}  // namespace

namespace cuda_memory {

void* allocate(int device, std::size_t bytes) {
  const CurrentContext context(device, nullptr);
  DevicePointer memory = 0;
  const Result result = driver().allocate(&memory, bytes > 0 ? bytes : 1);
  if (result == kOutOfMemory) {
    refuse("bytes", bytes, "so many could not be allocated on cuda:" + std::to_string(device),
           Code::out_of_memory);
  }
  check(result, "cuMemAlloc", device);
  return reinterpret_cast<void*>(memory);
}

void free(int device, void* memory) {
  if (!memory) return;
  const CurrentContext context(device, nullptr);
  check(driver().free(address(memory)), "cuMemFree", device);
}

void fill(int device, void* memory, unsigned char byte, std::size_t bytes) {
  if (bytes == 0) return;
  const CurrentContext context(device, nullptr);
  check(driver().fill_async(address(memory), byte, bytes, nullptr), "cuMemsetD8Async", device);
}

void to_device(int device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const CurrentContext context(device, nullptr);
  check(driver().copy_in(address(to), from, bytes), "cuMemcpyHtoD", device);
}

void to_host(int device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const CurrentContext context(device, nullptr);
  check(driver().copy_out(to, address(from), bytes), "cuMemcpyDtoH", device);
}

void synchronize(int device) {
  const CurrentContext context(device, nullptr);
  check(driver().synchronize(), "cuCtxSynchronize", device);
}

void trim(int device) {
  const CurrentContext context(device, nullptr);
  trim_workspace_pool(device, context.id());
}

}  // namespace cuda_memory

double cuda_seconds(int device, const std::function<void()>& enqueue) {
  const CurrentContext context(device, nullptr);
  OwnedEvent begin(device), end(device);
  begin.record();
  enqueue();
  end.record();
  return end.seconds_since(begin);
}

}  // namespace regard
