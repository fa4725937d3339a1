// libcuda for the emulated GPU: the calls of src/cuda/driver.cpp and of tests/gpu, so that both can
// run, unchanged, on a machine without a GPU. Device memory is the host's; a launch is over when
// its call returns, and a kernel's fault is its error.
//
// REGARD_EMULATED_CHIP: the chip ("sm_86"). REGARD_EMULATED_ORDER: of warps between barriers,
// "forward", "backward" or "mixed"; REGARD_EMULATED_SEED.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/kernels/params.h"
#include "plan/cuda/chip.hpp"
#include "tests/cuda/emulator_build.hpp"
#include "tests/cuda/emulator_image.hpp"
#include "tests/cuda/machine/block_machine.hpp"

using namespace regard;
using namespace regard::emulated;
namespace files = std::filesystem;

namespace {

using Pointer = std::uint64_t;

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201,
              kInvalidImage = 200, kNotFound = 500, kLaunchFailed = 719;
constexpr int kMultiprocessors = 16, kL2Bytes = 38, kMajor = 75, kMinor = 76, kMemoryPools = 115,
              kSharedPerMultiprocessor = 81, kRegisters = 82, kSharedPerBlock = 97;

struct Context {
  unsigned long long id;
};
struct Stream {
  Context* context;
};
struct Event {
  std::chrono::steady_clock::time_point time;
};
struct Function {
  KernelEntry entry;
  int most_shared = 48 << 10;
};
struct Module {
  Function function;
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream* stream;
  const void* attributes;  // of launches that may overlap; these do not
  unsigned attribute_count;
};

std::mutex mutex;  // of everything below
Context primary{1};
unsigned long long contexts = 1;
std::map<Pointer, std::size_t> allocations;
std::string last_fault = "no fault";
thread_local std::vector<Context*> current;

const Chip& chip() {
  static const Chip* const known = chip_named(setting("REGARD_EMULATED_CHIP", "sm_86"));
  return *known;
}

BlockMachine& block_machine() {
  static auto* const machine = new BlockMachine;
  return *machine;
}

Order order() {
  const std::string name = setting("REGARD_EMULATED_ORDER", "forward");
  return name == "mixed" ? Order::mixed : name == "backward" ? Order::backward : Order::forward;
}

int allocate(Pointer* to, std::size_t bytes) {
  void* memory = nullptr;
  if (bytes == 0) return kInvalidValue;
  if (posix_memalign(&memory, 512, bytes)) return kOutOfMemory;
  const std::lock_guard lock(mutex);
  std::memset(memory, 0xff, bytes);
  *to = reinterpret_cast<Pointer>(memory);
  allocations[*to] = bytes;
  return kSuccess;
}

int release(Pointer at) {
  const std::lock_guard lock(mutex);
  if (allocations.erase(at) == 0) return kInvalidValue;
  std::free(reinterpret_cast<void*>(at));
  return kSuccess;
}

bool is_device_memory(Pointer at) {
  const std::lock_guard lock(mutex);
  auto next = allocations.upper_bound(at);
  if (next == allocations.begin()) return false;
  --next;
  return at < next->first + next->second;
}

int copy(Pointer to, const void* from, std::size_t bytes) {
  std::memmove(reinterpret_cast<void*>(to), from, bytes);
  return kSuccess;
}

struct Bound {
  KernelEntry entry;
  KernelParams params;
  LaunchMaps maps;
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// ------------------------------------------------------------------------------------ the device

EXPORTED int cuInit(unsigned) {
  return chip_named(setting("REGARD_EMULATED_CHIP", "sm_86")) ? 0 : 100;
}
EXPORTED int cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
EXPORTED int cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
EXPORTED int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? kSuccess : 101;
}
EXPORTED int cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, std::size_t(size), "emulated %s", chip().name.c_str());
  return kSuccess;
}
EXPORTED int cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  return *bytes = std::size_t(4) << 30, kSuccess;
}
EXPORTED int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  return *free = *total = std::size_t(4) << 30, kSuccess;
}
EXPORTED int cuDeviceCanAccessPeer(int* can, int, int) { return *can = 0, kSuccess; }
EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int) {
  const Chip& c = chip();
  switch (attribute) {
    case kMajor:
      return *value = c.major, kSuccess;
    case kMinor:
      return *value = c.minor, kSuccess;
    case kMultiprocessors:
      return *value = c.multiprocessors, kSuccess;
    case kSharedPerBlock:
      return *value = int(c.shared_per_block), kSuccess;
    case kSharedPerMultiprocessor:
      return *value = int(c.shared_per_multiprocessor), kSuccess;
    case kRegisters:
      return *value = c.registers_per_multiprocessor, kSuccess;
    case kL2Bytes:
      return *value = int(c.l2), kSuccess;
    case kMemoryPools:
      return *value = 1, kSuccess;
    default:
      return kInvalidValue;
  }
}

// ---------------------------------------------------------------------------- contexts and streams

EXPORTED int cuDevicePrimaryCtxRetain(Context** context, int) {
  return *context = &primary, kSuccess;
}
EXPORTED int cuCtxCreate_v2(Context** context, unsigned, int) {
  const std::lock_guard lock(mutex);
  *context = new Context{++contexts};
  current.push_back(*context);
  return kSuccess;
}
EXPORTED int cuCtxDestroy_v2(Context* context) {
  if (!current.empty() && current.back() == context) current.pop_back();
  return kSuccess;  // kept: its id must never come again
}
EXPORTED int cuCtxGetCurrent(Context** context) {
  return *context = current.empty() ? nullptr : current.back(), kSuccess;
}
EXPORTED int cuCtxSetCurrent(Context* context) {
  if (!current.empty()) current.pop_back();
  if (context) current.push_back(context);
  return kSuccess;
}
EXPORTED int cuCtxPushCurrent_v2(Context* context) { return current.push_back(context), kSuccess; }
EXPORTED int cuCtxPopCurrent_v2(Context** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}
EXPORTED int cuCtxGetDevice(int* device) {
  return *device = 0, current.empty() || !current.back() ? kInvalidContext : kSuccess;
}
EXPORTED int cuCtxGetId(Context* context, unsigned long long* id) {
  return *id = context ? context->id : current.back()->id, kSuccess;
}
EXPORTED int cuCtxSynchronize() { return kSuccess; }

EXPORTED int cuStreamCreate(Stream** stream, unsigned) {
  return *stream = new Stream{current.empty() ? &primary : current.back()}, kSuccess;
}
EXPORTED int cuStreamDestroy_v2(Stream* stream) { return delete stream, kSuccess; }
EXPORTED int cuStreamGetCtx(Stream* stream, Context** context) {
  return *context = stream->context, kSuccess;
}
EXPORTED int cuStreamSynchronize(Stream*) { return cuCtxSynchronize(); }
EXPORTED int cuStreamQuery(Stream*) { return cuCtxSynchronize(); }
EXPORTED int cuThreadExchangeStreamCaptureMode(int* mode) { return *mode = 0, kSuccess; }

EXPORTED int cuTensorMapEncodeTiled(void* map, int, std::uint32_t rank, void* data,
                                    const std::uint64_t* sizes, const std::uint64_t* strides,
                                    const std::uint32_t* box, const std::uint32_t*, int, int, int,
                                    int) {
  if (rank != 4 || reinterpret_cast<Pointer>(data) % 16 != 0) return kInvalidValue;
  BoxMap made{.data = data,
              .sizes = {},
              .strides = {2},
              .box_columns = int(box[0]),
              .box_rows = int(box[1])};
  for (int i = 0; i < 4; ++i) made.sizes[i] = std::int64_t(sizes[i]);
  for (int i = 0; i < 3; ++i) {
    if (strides[i] % 16 != 0 || strides[i] >> 40 != 0) return kInvalidValue;
    made.strides[i + 1] = std::int64_t(strides[i]);
  }
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] == 0 || sizes[i] >> 32 != 0 || box[i] == 0 || box[i] > 256) return kInvalidValue;
  }
  std::memcpy(map, &made, sizeof made);
  return kSuccess;
}

EXPORTED int cuEventCreate(Event** event, unsigned) { return *event = new Event, kSuccess; }
EXPORTED int cuEventDestroy_v2(Event* event) { return delete event, kSuccess; }
EXPORTED int cuEventRecord(Event* event, Stream*) {
  return event->time = std::chrono::steady_clock::now(), kSuccess;
}
EXPORTED int cuEventSynchronize(Event*) { return cuCtxSynchronize(); }
EXPORTED int cuEventElapsedTime(float* milliseconds, Event* begin, Event* end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return kSuccess;
}

// ----------------------------------------------------------------------------------------- memory

EXPORTED int cuMemAlloc_v2(Pointer* to, std::size_t bytes) { return allocate(to, bytes); }
EXPORTED int cuMemAllocAsync(Pointer* to, std::size_t bytes, Stream*) {
  return allocate(to, bytes);
}
EXPORTED int cuMemFree_v2(Pointer at) { return release(at); }
EXPORTED int cuMemFreeAsync(Pointer at, Stream*) { return release(at); }
EXPORTED int cuMemsetD8Async(Pointer at, unsigned char byte, std::size_t bytes, Stream*) {
  std::memset(reinterpret_cast<void*>(at), byte, bytes);
  return cuCtxSynchronize();
}
EXPORTED int cuMemcpyHtoD_v2(Pointer to, const void* from, std::size_t bytes) {
  return copy(to, from, bytes);
}
EXPORTED int cuMemcpyDtoH_v2(void* to, Pointer from, std::size_t bytes) {
  return copy(reinterpret_cast<Pointer>(to), reinterpret_cast<const void*>(from), bytes);
}
EXPORTED int cuMemcpyHtoDAsync_v2(Pointer to, const void* from, std::size_t bytes, Stream*) {
  return copy(to, from, bytes);
}
EXPORTED int cuMemcpyDtoHAsync_v2(void* to, Pointer from, std::size_t bytes, Stream*) {
  return cuMemcpyDtoH_v2(to, from, bytes);
}
EXPORTED int cuPointerGetAttributes(unsigned count, const int* attributes, void** values,
                                    Pointer at) {
  const bool known = is_device_memory(at);
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == 2) *static_cast<unsigned*>(values[i]) = known ? 2 : 0;  // kind
    if (attributes[i] == 3) *static_cast<Pointer*>(values[i]) = known ? at : 0;  // reachable at
    if (attributes[i] == 9) *static_cast<int*>(values[i]) = known ? 0 : -2;      // ordinal
  }
  return kSuccess;
}

// ---------------------------------------------------------------------------------------- kernels

EXPORTED int cuModuleLoadDataEx(Module** module, const void* image, unsigned, int*, void**) {
  ImageHead head, expected;
  std::memcpy(&head, image, sizeof head);
  if (std::memcmp(head.name, expected.name, sizeof head.name) != 0) return kInvalidImage;
  std::string name = (files::temp_directory_path() / "regard-emulated-XXXXXX").string();
  const int file = mkstemp(name.data());
  if (file < 0) return kInvalidImage;
  fclose(fdopen(file, "w"));
  std::ofstream(name, std::ios::binary)
      .write(static_cast<const char*>(image) + sizeof head, std::streamsize(head.size));
  try {
    *module = new Module{{.entry = load_kernel(name, block_machine())}};
  } catch (const std::exception& error) {
    last_fault = error.what();
  }
  files::remove(name);
  return *module ? kSuccess : kInvalidImage;
}
EXPORTED int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  *function = &module->function;
  return std::strcmp(name, "regard_kernel") == 0 ? kSuccess : kNotFound;
}
EXPORTED int cuFuncSetAttribute(Function* function, int attribute, int value) {
  if (attribute != 8 || value > chip().shared_per_block) return kInvalidValue;
  return function->most_shared = value, kSuccess;
}
EXPORTED int cuFuncGetAttribute(int* value, int attribute, Function*) {
  return *value = attribute == 5 ? chip().capability() : 0, kSuccess;  // the PTX version
}

EXPORTED int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** parameters,
                              void**) {
  const unsigned *const grid = config->grid, *const block = config->block;
  if (grid[0] == 0 || grid[1] * grid[2] * block[1] * block[2] != 1 || block[0] > 1024) {
    return kInvalidValue;
  }
  if (int(config->shared_bytes) > function->most_shared) return kInvalidValue;
  const std::lock_guard lock(mutex);
  const Bound bound{
      function->entry, *static_cast<const KernelParams*>(parameters[0]),
      function->entry.takes_maps ? *static_cast<const LaunchMaps*>(parameters[1]) : LaunchMaps{}};
  try {
    block_machine().run(
        {.kernel =
             [](const void* context) {
               const Bound& kernel = *static_cast<const Bound*>(context);
               kernel.entry(kernel.params, kernel.maps);
             },
         .params = &bound,
         .blocks = grid[0],
         .threads = int(block[0]),
         .shared_bytes = config->shared_bytes,
         .cluster = bound.entry.cluster,
         .order = order(),
         .seed = std::strtoull(setting("REGARD_EMULATED_SEED", "1").c_str(), nullptr, 10)});
  } catch (const Fault& fault) {
    last_fault = fault.what();
    return kLaunchFailed;
  }
  return kSuccess;
}

EXPORTED int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names = {{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                   {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
                                                   {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"}};
  const auto known = names.find(error);
  *name = known == names.end() ? "CUDA_ERROR_UNKNOWN" : known->second;
  return kSuccess;
}
EXPORTED int cuGetErrorString(int error, const char** text) {
  *text = error == kLaunchFailed || error == kInvalidImage ? last_fault.c_str() : "as it says";
  return kSuccess;
}
