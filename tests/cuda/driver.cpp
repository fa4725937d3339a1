// The libcuda.so.1 of the tests: the calls of src/cuda/driver.cpp and of tests/gpu. Device memory
// is the host's.
#include "tests/cuda/driver.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>

#include "cuda/kernels/tensor_maps.h"
#include "tests/cuda/machine/machine.hpp"

using namespace regard::fake;
using regard::Chip;

namespace {

struct LaunchAttribute {
  int id, padding, value, rest[15];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
struct PoolProperties {
  int allocation, handles, location, ordinal;
  unsigned char unused[72];
};
struct Function {
  Kernel* kernel;
  int most_shared = 48 << 10;
};
constexpr int kGreatestPriority = -5;
struct Event {
  Stream* stream = nullptr;
  std::chrono::steady_clock::time_point time;
};

Machine& machine() {
  static Machine* const made = new Machine;
  return *made;
}

thread_local std::vector<Context*> contexts;
thread_local int capture_mode = 0;  // 2 = relaxed
int captures = 0;                   // streams that capture

Context* current() { return contexts.empty() ? nullptr : contexts.back(); }

struct Call {
  Machine& m = machine();
  std::lock_guard<std::mutex> lock{m.mutex};
  int failure = kOk;

  explicit Call(const char* name) {
    if (!m.is_recording) return;
    ++m.calls[name];
    const auto found = m.failures.find(name);
    if (found != m.failures.end()) failure = found->second;
  }
  // Calls that a capture of any thread forbids, unless this thread relaxed its mode.
  bool forbidden() {
    if (captures == 0 || capture_mode == 2) return false;
    m.broken_capture = true;
    return true;
  }
};

const std::pair<const std::uintptr_t, Allocation>* allocation_at(std::uint64_t address) {
  Machine& m = machine();
  auto next = m.memory.upper_bound(address);
  if (next == m.memory.begin()) return nullptr;
  --next;
  return address < next->first + next->second.bytes ? &*next : nullptr;
}

int allocate(std::uint64_t* memory, std::size_t bytes, bool in_stream_order) {
  if (!current()) return kNoContext;
  if (bytes == 0) return kInvalid;
  void* const made = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  if (!made) return kOutOfMemory;
  std::memset(made, 0xff, bytes);
  *memory = reinterpret_cast<std::uint64_t>(made);
  machine().memory[*memory] = {
      .bytes = bytes, .device = current()->device, .in_stream_order = in_stream_order};
  return kOk;
}

int release(std::uint64_t memory) {
  const auto found = machine().memory.find(memory);
  if (found == machine().memory.end()) return kInvalid;
  if (Pool* const pool = found->second.pool) pool->kept += found->second.bytes;
  machine().memory.erase(found);
  std::free(reinterpret_cast<void*>(memory));
  return kOk;
}

void release_kept() {
  for (Pool& pool : machine().pools) pool.kept = std::min(pool.kept, pool.threshold);
}

Context* primary_of(int device) {
  static Context primaries[8];
  primaries[device] = {device, std::uint64_t(100 + device)};
  return &primaries[device];
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))
#define BEGIN(name)                 \
  [[maybe_unused]] Call call(name); \
  if (call.failure) return call.failure

FAKE Machine* regard_fake_machine() { return &machine(); }

// --------------------------------------------------------------------------- for tests to act with

namespace {

// Contexts and streams live as long as the process.
template <class T>
T* kept(T value) {
  static std::mutex mutex;
  static std::deque<T> all;
  const std::lock_guard lock(mutex);
  return &all.emplace_back(value);
}

}  // namespace

FAKE Context* regard_fake_context(int device) {
  static std::atomic<std::uint64_t> next = 1;
  return kept(Context{device, next++});
}
FAKE Stream* regard_fake_stream(Context* context) { return kept(Stream{context, false}); }
// How often a function was called since the first question.
FAKE int regard_fake_calls(const char* name) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  m.is_recording = true;
  return m.calls[name];
}
FAKE void regard_fake_capture(Stream* stream, bool on) {
  captures += int(on) - int(stream->captures);
  stream->captures = on;
}

// ---------------------------------------------------------------------------- devices and contexts

FAKE int cuInit(unsigned) {
  if (!device_chip()) return 100;  // no device
  const char* const result = std::getenv("REGARD_FAKE_INIT");
  return result ? std::atoi(result) : kOk;
}
FAKE int cuDriverGetVersion(int* version) {
  const char* const forced = std::getenv("REGARD_FAKE_DRIVER_VERSION");
  return *version = forced ? std::atoi(forced) : 13000, kOk;
}
FAKE int cuDeviceGetCount(int* count) { return *count = kDevices, kOk; }
FAKE int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  return *device = ordinal, kOk;
}
FAKE int cuDeviceGetName(char* name, int size, int) {
  return std::strncpy(name, device_name().c_str(), std::size_t(size)), kOk;
}
FAKE int cuDeviceTotalMem_v2(std::size_t* bytes, int) { return *bytes = std::size_t(1) << 34, kOk; }
FAKE int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  return *free = *total = std::size_t(1) << 34, kOk;
}
FAKE int cuDeviceCanAccessPeer(int* can, int, int) { return *can = 0, kOk; }
FAKE int cuDeviceGetAttribute(int* value, int attribute, int) {
  BEGIN("cuDeviceGetAttribute");
  const Chip& chip = *device_chip();
  const std::map<int, int> values{{16, chip.multiprocessors},
                                  {38, int(chip.l2)},
                                  {75, chip.major},
                                  {76, chip.minor},
                                  {81, int(chip.shared_per_multiprocessor)},
                                  {82, chip.registers_per_multiprocessor},
                                  {97, int(chip.shared_per_block)},
                                  {115, 1}};  // memory pools
  const auto found = values.find(attribute);
  if (found == values.end()) return kInvalid;
  return *value = found->second, kOk;
}

FAKE int cuCtxCreate_v2(Context** context, unsigned, int device) {
  return contexts.push_back(*context = regard_fake_context(device)), kOk;
}
FAKE int cuCtxDestroy_v2(Context* context) {
  if (current() == context) contexts.pop_back();
  return kOk;  // kept: its id must never come again
}
FAKE int cuCtxSetCurrent(Context* context) {
  if (!contexts.empty()) contexts.pop_back();
  if (context) contexts.push_back(context);
  return kOk;
}
FAKE int cuCtxGetCurrent(Context** context) {
  BEGIN("cuCtxGetCurrent");
  return *context = current(), kOk;
}
FAKE int cuCtxPushCurrent_v2(Context* context) {
  BEGIN("cuCtxPushCurrent");
  return contexts.push_back(context), kOk;
}
FAKE int cuCtxPopCurrent_v2(Context** context) {
  BEGIN("cuCtxPopCurrent");
  if (contexts.empty()) return kNoContext;
  *context = contexts.back();
  return contexts.pop_back(), kOk;
}
FAKE int cuCtxGetDevice(int* device) {
  BEGIN("cuCtxGetDevice");
  if (!current()) return kNoContext;
  return *device = current()->device, kOk;
}
FAKE int cuCtxGetId(Context* context, unsigned long long* id) {
  BEGIN("cuCtxGetId");
  if (!context) context = current();
  if (!context) return kNoContext;
  return *id = context->id, kOk;
}
FAKE int cuDevicePrimaryCtxRetain(Context** context, int device) {
  BEGIN("cuDevicePrimaryCtxRetain");
  return *context = primary_of(device), kOk;
}
FAKE int cuCtxSynchronize() {
  BEGIN("cuCtxSynchronize");
  release_kept();
  return call.forbidden() ? kForbiddenInCapture : kOk;
}

// -------------------------------------------------------------------------------------- streams

FAKE int cuStreamGetCtx(Stream* stream, Context** context) {
  BEGIN("cuStreamGetCtx");
  return *context = stream->context, kOk;
}
FAKE int cuStreamCreate(Stream** stream, unsigned) {
  return *stream = regard_fake_stream(current() ? current() : primary_of(0)), kOk;
}
FAKE int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
  if (flags != 1 || priority != kGreatestPriority) return kInvalid;
  const int result = cuStreamCreate(stream, flags);
  BEGIN("cuStreamCreateWithPriority");
  return result;
}
FAKE int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = kGreatestPriority, kOk;
}
FAKE int cuStreamIsCapturing(Stream* stream, int* status) {
  return *status = stream && stream->captures, kOk;
}
FAKE int cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
  BEGIN("cuStreamWaitEvent");
  if (call.m.is_recording) call.m.waits.emplace_back(event->stream, stream);
  return flags == 0 ? kOk : kInvalid;
}
FAKE int cuStreamDestroy_v2(Stream*) {  // kept
  BEGIN("cuStreamDestroy");
  return kOk;
}
FAKE int cuStreamQuery(Stream*) { return kOk; }
FAKE int cuStreamSynchronize(Stream*) {
  BEGIN("cuStreamSynchronize");
  return call.forbidden() ? kForbiddenInCapture : kOk;
}
FAKE int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kOk;
}
FAKE int cuTensorMapEncodeTiled(void* map, int, std::uint32_t rank, void* data,
                                const std::uint64_t* sizes, const std::uint64_t* strides,
                                const std::uint32_t* box, const std::uint32_t*, int, int, int,
                                int) {
  BEGIN("cuTensorMapEncodeTiled");
  if (rank != 4 || reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return kInvalid;
  regard::emulated::BoxMap made{.data = data,
                                .sizes = {},
                                .strides = {2},
                                .box_columns = int(box[0]),
                                .box_rows = int(box[1])};
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] == 0 || sizes[i] >> 32 != 0 || box[i] == 0 || box[i] > 256) return kInvalid;
    made.sizes[i] = std::int64_t(sizes[i]);
  }
  for (int i = 0; i < 3; ++i) {
    if (strides[i] % 16 != 0 || strides[i] >> 40 != 0) return kInvalid;
    made.strides[i + 1] = std::int64_t(strides[i]);
  }
  static_assert(sizeof made <= sizeof(regard::TensorMap));
  return std::memcpy(map, &made, sizeof made), kOk;
}

FAKE int cuTensorMapReplaceAddress(void* map, void* data) {
  BEGIN("cuTensorMapReplaceAddress");
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return kInvalid;
  regard::emulated::BoxMap made;
  std::memcpy(&made, map, sizeof made);
  made.data = data;
  return std::memcpy(map, &made, sizeof made), kOk;
}

FAKE int cuEventCreate(Event** event, unsigned) { return *event = new Event, kOk; }
FAKE int cuEventDestroy_v2(Event* event) { return delete event, kOk; }
FAKE int cuEventRecord(Event* event, Stream* stream) {
  event->stream = stream;
  return event->time = std::chrono::steady_clock::now(), kOk;
}
FAKE int cuEventSynchronize(Event*) { return kOk; }
FAKE int cuEventElapsedTime(float* milliseconds, Event* begin, Event* end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return kOk;
}

// --------------------------------------------------------------------------------------- memory

FAKE int cuMemAlloc_v2(std::uint64_t* memory, std::size_t bytes) {
  BEGIN("cuMemAlloc");
  if (call.forbidden()) return kForbiddenInCapture;
  return allocate(memory, bytes, false);
}
FAKE int cuMemFree_v2(std::uint64_t memory) {
  BEGIN("cuMemFree");
  if (call.forbidden()) return kForbiddenInCapture;
  return release(memory);
}
FAKE int cuMemPoolCreate(Pool** pool, const PoolProperties* properties) {
  BEGIN("cuMemPoolCreate");
  if (call.forbidden()) return kForbiddenInCapture;
  const auto& [allocation, handles, location, ordinal, unused] = *properties;
  if (allocation != 1 || handles != 0 || location != 1) return kInvalid;
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  return *pool = &call.m.pools.emplace_back(Pool{.device = ordinal}), kOk;
}
FAKE int cuMemPoolSetAttribute(Pool* pool, int attribute, void* value) {
  BEGIN("cuMemPoolSetAttribute");
  if (attribute != 4) return kInvalid;  // release threshold
  return pool->threshold = *static_cast<std::uint64_t*>(value), kOk;
}
FAKE int cuMemPoolTrimTo(Pool* pool, std::size_t bytes) {
  BEGIN("cuMemPoolTrimTo");
  return pool->kept = std::min(pool->kept, bytes), kOk;
}
FAKE int cuMemAllocFromPoolAsync(std::uint64_t* memory, std::size_t bytes, Pool* pool, Stream*) {
  BEGIN("cuMemAllocFromPoolAsync");
  const int result = allocate(memory, bytes, true);
  if (result != kOk) return result;
  machine().memory[*memory].pool = pool;
  return pool->kept -= std::min(pool->kept, bytes), kOk;
}
FAKE int cuMemAllocAsync(std::uint64_t* memory, std::size_t bytes, Stream*) {
  BEGIN("cuMemAllocAsync");
  return allocate(memory, bytes, true);
}
FAKE int cuMemFreeAsync(std::uint64_t memory, Stream*) {
  BEGIN("cuMemFreeAsync");
  return release(memory);
}
FAKE int cuMemsetD8Async(std::uint64_t memory, unsigned char byte, std::size_t bytes, Stream*) {
  BEGIN("cuMemsetD8Async");
  const auto* const allocation = allocation_at(memory);
  if (!allocation || memory + bytes > allocation->first + allocation->second.bytes) return kInvalid;
  std::memset(reinterpret_cast<void*>(memory), byte, bytes);
  return kOk;
}
FAKE int cuMemcpyHtoD_v2(std::uint64_t to, const void* from, std::size_t bytes) {
  BEGIN("cuMemcpyHtoD");
  if (call.forbidden()) return kForbiddenInCapture;
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), kOk;
}
FAKE int cuMemcpyDtoH_v2(void* to, std::uint64_t from, std::size_t bytes) {
  BEGIN("cuMemcpyDtoH");
  if (call.forbidden()) return kForbiddenInCapture;
  return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), kOk;
}
FAKE int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void* from, std::size_t bytes, Stream*) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), kOk;
}
FAKE int cuMemcpyDtoHAsync_v2(void* to, std::uint64_t from, std::size_t bytes, Stream*) {
  return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), kOk;
}
// Each allocation is a range and a mapping.
FAKE int cuPointerGetAttributes(unsigned count, int* attributes, void** values,
                                std::uint64_t pointer) {
  BEGIN("cuPointerGetAttributes");
  const auto* const allocation = allocation_at(pointer);
  const bool reachable = allocation && current() && allocation->second.device == current()->device;
  for (unsigned i = 0; i < count; ++i) {
    const int attribute = attributes[i];
    if (attribute >= 18 && !call.m.knows_mappings) return kInvalid;
    void* const to = values[i];
    if (attribute == 2) *static_cast<unsigned*>(to) = allocation ? 2 : 0;
    if (attribute == 3) *static_cast<std::uint64_t*>(to) = reachable ? pointer : 0;
    if (attribute == 9) *static_cast<int*>(to) = allocation ? allocation->second.device : -2;
    if (attribute == 11 || attribute == 19)
      *static_cast<std::uint64_t*>(to) = allocation ? allocation->first : 0;
    if (attribute == 12 || attribute == 18)
      *static_cast<std::size_t*>(to) = allocation ? allocation->second.bytes : 0;
  }
  return kOk;
}

// -------------------------------------------------------------------------------------- kernels

FAKE int cuModuleLoadDataEx(Function** module, const void* image, unsigned, int*, void**) {
  BEGIN("cuModuleLoadDataEx");
  if (call.forbidden()) return kForbiddenInCapture;
  if (!current()) return kNoContext;
  Kernel* const kernel = load(image, call.m.fault);
  if (!kernel) return kInvalidImage;
  return *module = new Function{kernel}, kOk;
}
FAKE int cuModuleGetFunction(Function** function, Function* module, const char* name) {
  BEGIN("cuModuleGetFunction");
  if (std::strcmp(name, "regard_kernel") != 0) return kNotFound;
  return *function = module, kOk;
}
FAKE int cuFuncSetAttribute(Function* function, int attribute, int value) {
  BEGIN("cuFuncSetAttribute");
  if (attribute != 8 || value > device_chip()->shared_per_block) return kInvalid;
  return function->most_shared = value, kOk;
}
FAKE int cuFuncGetAttribute(int* value, int attribute, Function* function) {
  BEGIN("cuFuncGetAttribute");
  return *value = attribute == 5 ? function->kernel->ptx_version() : 0, kOk;
}

// Of the second parameter, which only kernels with tensor maps have.
static std::vector<const void*> mapped_by(const void* parameter) {
  constexpr std::size_t kMaps = sizeof(regard::LaunchMaps) / sizeof(regard::TensorMap);
  std::vector<const void*> found;
  for (std::size_t i = 0; parameter && i < kMaps; ++i) {
    regard::emulated::BoxMap map;
    std::memcpy(&map, static_cast<const regard::TensorMap*>(parameter) + i, sizeof map);
    if (map.data) found.push_back(map.data);
  }
  return found;
}

FAKE int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** parameters,
                          void** extra) {
  BEGIN("cuLaunchKernelEx");
  if (!current()) return kNoContext;
  const auto& [grid, block, shared_bytes, stream, attributes, attribute_count] = *config;
  const unsigned threads = block[0];
  if (grid[0] == 0 || grid[1] * grid[2] * block[1] * block[2] != 1 || threads == 0 ||
      threads > 1024 || int(shared_bytes) > function->most_shared || extra) {
    return kInvalid;
  }
  if (reinterpret_cast<std::uintptr_t>(stream) > 2 && stream->context != current()) {
    return kInvalidHandle;
  }
  bool may_overlap = false;
  for (unsigned i = 0; i < attribute_count; ++i) {
    if (attributes[i].id != 6) return kInvalid;  // programmatic stream serialization
    may_overlap = attributes[i].value == 1;
  }
  const Launch launch{.image = call.m.is_recording ? function->kernel->image() : "",
                      .blocks = grid[0],
                      .threads = threads,
                      .shared_bytes = shared_bytes,
                      .may_overlap = may_overlap,
                      .stream = stream,
                      .params = *static_cast<const regard::KernelParams*>(parameters[0]),
                      .mapped = {}};
  if (call.m.is_recording) {
    call.m.launches.push_back(launch);
    call.m.launches.back().mapped = mapped_by(parameters[1]);
  }
  return function->kernel->run(launch, parameters, call.m.fault);
}

FAKE int cuGetErrorName(int result, const char** name) {
  static const std::map<int, const char*> names{
      {kInvalid, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
      {kForbiddenInCapture, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"}};
  const auto known = names.find(result);
  return *name = known == names.end() ? nullptr : known->second, *name ? kOk : kInvalid;
}
FAKE int cuGetErrorString(int, const char** text) { return *text = machine().fault.c_str(), kOk; }
