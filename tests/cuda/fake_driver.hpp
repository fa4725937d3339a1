// A CUDA driver without a GPU: what libcuda.so.1 of the tests records, and how it is told to fail.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/kernels/params.h"

namespace regard::fake {

struct Context {
  int device = 0;
  std::uint64_t id = 0;
};

struct Stream {
  Context* context = nullptr;
  bool captures = false;
};

struct Module {
  std::string image;
};

struct Launch {
  std::string image;  // of the kernel's module
  unsigned blocks = 0;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
  bool may_overlap = false;  // begin before what is launched before it is done
  void* stream = nullptr;
  KernelParams params;
};

struct Allocation {
  std::size_t bytes = 0;
  int device = 0;
  bool in_stream_order = false;
};

struct Machine {
  std::mutex mutex;
  int devices = 2;
  int capability = 90;
  std::map<std::string, int> failures;  // by function: what its calls return from now on
  std::map<std::string, int> calls;
  std::map<std::uintptr_t, Allocation> memory;
  std::vector<Launch> launches;
  bool broken_capture = false;  // something was called that a capture forbids
  bool is_recording = true;     // off: calls are not counted and launches not kept

  std::size_t stream_ordered() const {  // allocations that live
    std::size_t count = 0;
    for (const auto& entry : memory) count += entry.second.in_stream_order;
    return count;
  }
};

// Of the library that the process has opened as libcuda.so.1; null if that is none of ours.
using MachineOf = Machine* (*)();
inline constexpr const char* kMachineSymbol = "regard_fake_machine";

}  // namespace regard::fake
