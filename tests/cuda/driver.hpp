// A CUDA driver without a GPU, the libcuda.so.1 of the tests: what it records, how a test makes it
// fail, and the interface of its two devices. fake_device.cpp keeps kernels as texts, and
// emulated_device.cpp runs them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/params.h"
#include "plan/cuda/chip.hpp"

namespace regard::fake {

constexpr int kOk = 0, kInvalid = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidImage = 200,
              kNoContext = 201, kInvalidHandle = 400, kNotFound = 500, kLaunchFailed = 719,
              kForbiddenInCapture = 906;

struct Context {
  int device = 0;
  std::uint64_t id = 0;
};

struct Stream {
  Context* context = nullptr;
  bool captures = false;
};

struct Launch {
  std::string image;  // of the kernel's module
  unsigned blocks = 0;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
  bool may_overlap = false;  // begin before what is launched before it is done
  void* stream = nullptr;
  KernelParams params;
  std::vector<const void*> mapped;  // where the tensors of its tensor maps begin
};

struct Pool {
  int device = 0;
  std::size_t threshold = 0;  // bytes that a synchronisation leaves it
  std::size_t kept = 0;       // bytes that nobody uses
};

struct Allocation {
  std::size_t bytes = 0;
  int device = 0;
  bool in_stream_order = false;
  Pool* pool = nullptr;
};

struct Machine {
  std::mutex mutex;
  std::map<std::string, int> failures;  // by function: what its calls return from now on
  std::map<std::string, int> calls;
  std::map<std::uintptr_t, Allocation> memory;
  std::deque<Pool> pools;
  std::vector<Launch> launches;
  std::vector<std::pair<void*, void*>> waits;  // a stream, and the one that waits for it
  std::string fault = "as the test wants it";  // the text of errors
  bool broken_capture = false;                 // something was called that a capture forbids
  bool knows_mappings = true;                  // in pointer attributes
  bool is_recording = false;  // on: calls are counted, launches kept, failures given

  std::size_t stream_ordered() const {  // allocations that live
    std::size_t count = 0;
    for (const auto& entry : memory) count += entry.second.in_stream_order;
    return count;
  }
};

// Of the library that the process has opened as libcuda.so.1; null if that is none of ours.
using MachineOf = Machine* (*)();
inline constexpr const char* kMachineSymbol = "regard_fake_machine";

// ------------------------------------------------------------------------------ a kind of devices

// A loaded module.
struct Kernel {
  virtual ~Kernel() = default;
  virtual int ptx_version() const = 0;
  virtual std::string image() const { return {}; }
  // Returns kOk or an error; `fault` then says what was wrong.
  virtual int run(const Launch& launch, void** parameters, std::string& fault) = 0;
};

extern const int kDevices;
const Chip* device_chip();  // null: there is none of the name that was asked for
std::string device_name();
// Null if the image is none.
Kernel* load(const void* image, std::string& fault);

}  // namespace regard::fake
