// Opens libcuda.so.1, and asks it for devices and contexts.
#include "cuda/driver.hpp"

#include <atomic>
#include <memory>
#include <mutex>

#include "cuda/shared_library.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

constexpr const char* kHowToGetIt = "; it comes with NVIDIA's display driver";

struct Opened {
  Driver driver{};
  std::string why_not;
  int version = 0;
  int devices = 0;
};

template <class Find>
void find_streams_and_events(Driver& d, const Find& find) {
  find("cuStreamGetCtx", d.context_of_stream);
  find("cuStreamSynchronize", d.synchronize_stream);
  find("cuStreamIsCapturing", d.is_capturing);
  find("cuCtxGetStreamPriorityRange", d.priorities);
  find("cuStreamCreateWithPriority", d.create_stream);
  find("cuStreamDestroy_v2", d.destroy_stream);
  find("cuStreamWaitEvent", d.wait_for_event);
  find("cuStreamWriteValue32_v2", d.write_word);
  find("cuStreamWaitValue32_v2", d.wait_for_word);
  find("cuThreadExchangeStreamCaptureMode", d.exchange_capture_mode);
  find("cuEventCreate", d.create_event);
  find("cuEventRecord", d.record_event);
  find("cuEventSynchronize", d.synchronize_event);
  find("cuEventElapsedTime", d.elapsed);
  find("cuEventDestroy_v2", d.destroy_event);
}

std::string missing_function(const SharedLibrary& library, Driver& d) {
  std::string missing;
  const auto find = [&](const char* symbol, auto& function) {
    library.find(symbol, function, missing);
  };
  find_streams_and_events(d, find);
  find("cuInit", d.init);
  find("cuDriverGetVersion", d.version);
  find("cuDeviceGetCount", d.device_count);
  find("cuDeviceGet", d.device);
  find("cuDeviceGetName", d.device_name);
  find("cuDeviceGetAttribute", d.device_attribute);
  find("cuDeviceTotalMem_v2", d.device_memory);
  find("cuDeviceCanAccessPeer", d.reaches_peer);
  find("cuCtxGetCurrent", d.current_context);
  find("cuCtxPushCurrent_v2", d.push_context);
  find("cuCtxPopCurrent_v2", d.pop_context);
  find("cuCtxGetDevice", d.device_of_context);
  find("cuCtxGetId", d.context_id);
  find("cuDevicePrimaryCtxRetain", d.retain_primary);
  find("cuCtxSynchronize", d.synchronize);
  find("cuMemAlloc_v2", d.allocate);
  find("cuMemFree_v2", d.free);
  find("cuMemAllocAsync", d.allocate_async);
  find("cuMemFreeAsync", d.free_async);
  find("cuMemAllocFromPoolAsync", d.allocate_from_pool);
  find("cuMemPoolCreate", d.create_pool);
  find("cuMemPoolSetAttribute", d.set_pool_attribute);
  find("cuMemPoolTrimTo", d.trim_pool);
  find("cuMemsetD8Async", d.fill_async);
  find("cuMemcpyHtoD_v2", d.copy_in);
  find("cuMemcpyHtoDAsync_v2", d.copy_in_async);
  find("cuMemcpyDtoH_v2", d.copy_out);
  find("cuMemcpyAsync", d.copy_async);
  find("cuMemcpy2DAsync_v2", d.copy_2d_async);
  find("cuPointerGetAttributes", d.pointer_attributes);
  find("cuModuleLoadDataEx", d.load_module);
  find("cuModuleGetFunction", d.function);
  find("cuFuncSetAttribute", d.set_function_attribute);
  find("cuFuncGetAttribute", d.function_attribute);
  find("cuLaunchKernelEx", d.launch);
  find("cuTensorMapEncodeTiled", d.encode_tiled);
  find("cuTensorMapReplaceAddress", d.replace_address);
  find("cuGetErrorName", d.error_name);
  find("cuGetErrorString", d.error_text);
  return missing;
}

std::string text_of(const Driver& d, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (d.error_name(result, &name) != kSuccess || !name) {
    return "error " + std::to_string(result) + " of the driver";
  }
  d.error_text(result, &text);
  return std::string(name) + (text ? std::string(", ") + text : "");
}

Opened open_driver() {
  Opened o;
  SharedLibrary library;
  // The library is sought in the loader's own path alone, where the driver's installation puts it.
  if (!library.open("libcuda.so.1")) {
    o.why_not = std::string("libcuda.so.1 was not found") + kHowToGetIt;
    return o;
  }
  if (const std::string missing = missing_function(library, o.driver); !missing.empty()) {
    o.why_not = "libcuda.so.1 has no " + missing + ": a driver for CUDA 12.0 or newer is needed";
    return o;
  }
  if (const Result result = o.driver.init(0); result != kSuccess) {
    o.why_not = "cuInit: " + text_of(o.driver, result);
    return o;
  }
  o.driver.version(&o.version);
  if (o.driver.device_count(&o.devices) != kSuccess) o.devices = 0;
  if (o.devices == 0) o.why_not = "the driver sees no GPU";
  return o;
}

// Never destroyed: other threads may still launch while the process ends.
const Opened& opened() {
  static const Opened* const once = new Opened(open_driver());
  return *once;
}

std::string printed_device(int index) { return "cuda:" + std::to_string(index); }

enum DeviceAttribute : int {
  kMultiprocessors = 16,
  kL2Bytes = 38,
  kMajor = 75,
  kMinor = 76,
  kSharedPerMultiprocessor = 81,
  kRegistersPerMultiprocessor = 82,
  kSharedPerBlockOptIn = 97,
  kMemoryPools = 115,
};

Gpu read_device(int index) {
  const Driver& d = driver();
  Gpu device;
  check(d.device(&device.ordinal, index), "cuDeviceGet", index);
  const auto attribute = [&](int which) {
    int value = 0;
    check(d.device_attribute(&value, which, device.ordinal), "cuDeviceGetAttribute", index);
    return value;
  };
  char name[256] = "";
  check(d.device_name(name, sizeof name, device.ordinal), "cuDeviceGetName", index);
  check(d.device_memory(&device.memory, device.ordinal), "cuDeviceTotalMem", index);
  device.chip = {.major = attribute(kMajor),
                 .minor = attribute(kMinor),
                 .multiprocessors = attribute(kMultiprocessors),
                 .shared_per_block = attribute(kSharedPerBlockOptIn),
                 .shared_per_multiprocessor = attribute(kSharedPerMultiprocessor),
                 .registers_per_multiprocessor = attribute(kRegistersPerMultiprocessor),
                 .l2 = attribute(kL2Bytes),
                 .name = name};
  device.has_pools = attribute(kMemoryPools) != 0;
  return device;
}

constexpr int kMostDevices = 256;
std::atomic<const Gpu*> devices[kMostDevices];
std::atomic<Context> primaries[kMostDevices];

// Retained once and for good: releasing could destroy it under others.
Context primary_context(int index) {
  Context context = primaries[index].load(std::memory_order_acquire);
  if (context) return context;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  context = primaries[index].load(std::memory_order_acquire);
  if (context) return context;
  check(driver().retain_primary(&context, device_at(index).ordinal), "cuDevicePrimaryCtxRetain",
        index);
  primaries[index].store(context, std::memory_order_release);
  return context;
}

// Handles that stand for a default stream of whatever context is current.
bool is_default(Stream stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 2; }

}  // namespace

const Driver* driver_if_any() { return opened().devices > 0 ? &opened().driver : nullptr; }
const std::string& why_no_driver() { return opened().why_not; }
int driver_version() { return opened().version; }
int device_count() { return opened().devices; }

const Driver& driver() {
  const Driver* const d = driver_if_any();
  if (!d) refuse("device", "cuda", why_no_driver(), Code::unavailable);
  return *d;
}

const Gpu& device_at(int index) {
  if (!driver_if_any()) {
    refuse("device", printed_device(index), why_no_driver(), Code::unavailable);
  }
  if (index < 0 || index >= device_count() || index >= kMostDevices) {
    refuse("device", printed_device(index),
           "this machine has " + std::to_string(device_count()) +
               (device_count() == 1 ? " GPU" : " GPUs"),
           Code::unavailable);
  }
  const Gpu* known = devices[index].load(std::memory_order_acquire);
  if (known) return *known;
  auto read = std::make_unique<const Gpu>(read_device(index));
  if (devices[index].compare_exchange_strong(known, read.get(), std::memory_order_acq_rel)) {
    return *read.release();
  }
  return *known;
}

std::string text_of(Result result) { return text_of(opened().driver, result); }

void check(Result result, const char* during, int device) {
  if (result == kSuccess) return;
  refuse("device", printed_device(device), std::string(during) + ": " + text_of(result),
         result == kOutOfMemory ? Code::out_of_memory : Code::device_failure);
}

CurrentContext::CurrentContext(int index, Stream stream) {
  const Driver& d = driver();
  const int ordinal = device_at(index).ordinal;
  Context current = nullptr;
  check(d.current_context(&current), "cuCtxGetCurrent", index);
  Context wanted = current;
  if (!is_default(stream)) {
    check(d.context_of_stream(stream, &wanted), "cuStreamGetCtx", index);
  }
  int owner = -1;
  if (wanted && wanted == current) {
    check(d.device_of_context(&owner), "cuCtxGetDevice", index);
  }
  if (is_default(stream) && owner != ordinal) wanted = primary_context(index);
  if (wanted != current) {
    check(d.push_context(wanted), "cuCtxPushCurrent", index);
    pushed_ = true;
    owner = -1;
    d.device_of_context(&owner);
  }
  unsigned long long id = 0;
  const Result result = d.context_id(wanted, &id);
  if (owner != ordinal || result != kSuccess) {
    if (pushed_) d.pop_context(&current);
    check(result, "cuCtxGetId", index);
    refuse("stream", static_cast<const void*>(stream),
           "belongs to another device than " + printed_device(index));
  }
  id_ = id;
}

CurrentContext::~CurrentContext() {
  Context popped = nullptr;
  if (pushed_) driver().pop_context(&popped);
}

}  // namespace regard::cuda_backend
