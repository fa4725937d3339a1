// The CUDA driver, opened at run time: the few of its functions that we call, and its devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "plan/cuda/chip.hpp"

namespace regard::cuda_backend {

using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Event = struct EventTag*;
using MemoryPool = struct MemoryPoolTag*;
using DevicePointer = std::uint64_t;
using Result = int;

// Results that we tell apart.
inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kInvalidImage = 200;
inline constexpr Result kNoBinary = 209;
inline constexpr Result kUnsupportedPtx = 222;

enum FunctionAttribute : int { kPtxVersion = 5, kMaxDynamicShared = 8 };
enum PointerAttribute : int {
  kMemoryType = 2,
  kReachableAt = 3,
  kOrdinal = 9,
  kRangeBegin = 11,  // of the allocation, or of reserved addresses that may be mapped in part
  kRangeSize = 12,
  kMappingSize = 18,
  kMappingBegin = 19,
};
enum PoolAttribute : int { kReleaseThreshold = 4 };
enum CaptureMode : int { kRelaxed = 2 };
enum StreamFlag : unsigned { kNonBlocking = 1 };  // by the legacy default stream
enum EventFlag : unsigned { kWithoutTime = 2 };
enum WaitKind : unsigned { kWaitForLater = 0 };
enum LaunchAttributeId : int { kProgrammaticSerialization = 6 };

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  LaunchAttributeId id;
  alignas(8) int value;
  unsigned char unused[60];
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

// CUmemPoolProps.
struct PoolProperties {
  int allocation = 1;    // pinned: the only kind
  int handle_types = 0;  // no other process sees the memory
  int location = 1;      // a device
  int ordinal = 0;
  unsigned char unused[72] = {};
};
static_assert(sizeof(PoolProperties) == 88);

// CUDA_MEMCPY2D.
struct Copy2d {
  struct Side {
    std::size_t first_byte = 0, first_row = 0;
    int memory = 4;  // any that its address tells
    const void* host = nullptr;
    DevicePointer address = 0;
    void* array = nullptr;
    std::size_t pitch = 0;
  };
  Side from, to;
  std::size_t width = 0, rows = 0;
};
static_assert(sizeof(Copy2d) == 128);

// Signatures of the driver API, version 12.0.
struct Driver {
  Result (*init)(unsigned flags);
  Result (*version)(int*);
  Result (*device_count)(int*);
  Result (*device)(int* device, int ordinal);
  Result (*device_name)(char* name, int size, int device);
  Result (*device_attribute)(int* value, int attribute, int device);
  Result (*device_memory)(std::size_t* bytes, int device);
  Result (*reaches_peer)(int* can, int device, int peer);

  Result (*current_context)(Context*);
  Result (*push_context)(Context);
  Result (*pop_context)(Context*);
  Result (*device_of_context)(int* device);
  Result (*context_id)(Context, unsigned long long*);
  Result (*retain_primary)(Context*, int device);
  Result (*synchronize)();

  Result (*context_of_stream)(Stream, Context*);
  Result (*synchronize_stream)(Stream);
  Result (*is_capturing)(Stream, int* status);
  Result (*priorities)(int* least, int* greatest);
  Result (*create_stream)(Stream*, unsigned flags, int priority);
  Result (*destroy_stream)(Stream);
  Result (*wait_for_event)(Stream, Event, unsigned flags);
  Result (*exchange_capture_mode)(int* mode);

  Result (*allocate)(DevicePointer*, std::size_t);
  Result (*free)(DevicePointer);
  Result (*allocate_async)(DevicePointer*, std::size_t, Stream);
  Result (*allocate_from_pool)(DevicePointer*, std::size_t, MemoryPool, Stream);
  Result (*free_async)(DevicePointer, Stream);
  Result (*fill_async)(DevicePointer, unsigned char, std::size_t, Stream);
  Result (*copy_in)(DevicePointer, const void*, std::size_t);
  Result (*copy_in_async)(DevicePointer, const void*, std::size_t, Stream);
  Result (*copy_out)(void*, DevicePointer, std::size_t);
  Result (*copy_async)(DevicePointer to, DevicePointer from, std::size_t, Stream);
  Result (*copy_2d_async)(const Copy2d*, Stream);
  Result (*write_word)(Stream, DevicePointer, std::uint32_t value, unsigned flags);
  Result (*wait_for_word)(Stream, DevicePointer, std::uint32_t value, unsigned flags);
  Result (*create_pool)(MemoryPool*, const PoolProperties*);
  Result (*set_pool_attribute)(MemoryPool, int attribute, void* value);
  Result (*trim_pool)(MemoryPool, std::size_t bytes_to_keep);
  Result (*pointer_attributes)(unsigned count, int* attributes, void** values, DevicePointer);

  Result (*load_module)(Module*, const void* image, unsigned count, int* options, void** values);
  Result (*function)(Function*, Module, const char* name);
  Result (*set_function_attribute)(Function, int attribute, int value);
  Result (*function_attribute)(int* value, int attribute, Function);
  Result (*launch)(const LaunchConfig*, Function, void** parameters, void** extra);

  Result (*encode_tiled)(void* map, int type, std::uint32_t rank, void* data,
                         const std::uint64_t* sizes, const std::uint64_t* strides,
                         const std::uint32_t* box, const std::uint32_t* steps, int interleave,
                         int swizzle, int promotion, int fill);
  Result (*replace_address)(void* map, void* data);

  Result (*create_event)(Event*, unsigned flags);
  Result (*record_event)(Event, Stream);
  Result (*synchronize_event)(Event);
  Result (*elapsed)(float* milliseconds, Event, Event);
  Result (*destroy_event)(Event);

  Result (*error_name)(Result, const char**);
  Result (*error_text)(Result, const char**);
};

// The machine's driver, opened and initialised at the first call; null where there is none.
const Driver* driver_if_any();
const std::string& why_no_driver();  // and how to get one

const Driver& driver();  // or an Error
int driver_version();    // 13000 for CUDA 13.0; 0 without a driver
int device_count();      // 0 without a driver

// What is known of a device; asked for once.
struct Gpu {
  int ordinal = 0;
  Chip chip;
  std::size_t memory = 0;
  bool has_pools = false;  // memory can be allocated in the order of a stream
};
const Gpu& device_at(int index);  // or an Error

// An Error unless the call succeeded. `during` says what was being done.
void check(Result, const char* during, int device);
std::string text_of(Result);  // "CUDA_ERROR_OUT_OF_MEMORY, out of memory"

// The context of the stream, else the current one if it belongs to the device, else the device's
// primary one. It is current while this object lives.
class CurrentContext {
 public:
  CurrentContext(int device, Stream stream);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  std::uint64_t id() const { return id_; }  // no other context ever had it

 private:
  std::uint64_t id_ = 0;
  bool pushed_ = false;
};

// Lets the thread call what a capture in another thread would forbid, and what touches no stream:
// loading kernels, making pools.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& d) : d_(d) { d_.exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { d_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& d_;
  int mode_ = kRelaxed;
};

}  // namespace regard::cuda_backend
