// The fake driver and compiler within a test: what they record, and attention on their devices.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "regard/cuda.hpp"
#include "tests/cuda/driver.hpp"

namespace regard::tests {

// Ends the program as skipped where libcuda.so.1 is a real one, or none.
struct FakeCuda {
  fake::Machine* machine = nullptr;
  fake::Context* (*context)(int device) = nullptr;
  fake::Stream* (*stream)(fake::Context*) = nullptr;
  void (*capture)(fake::Stream*, bool on) = nullptr;
  int (*push)(fake::Context*) = nullptr;
  int (*pop)(fake::Context**) = nullptr;
  int (*current)(fake::Context**) = nullptr;

  FakeCuda() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const auto find = [&](const char* name, auto& function) {
      function =
          library
              ? reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name))
              : nullptr;
    };
    fake::MachineOf machine_of = nullptr;
    find(fake::kMachineSymbol, machine_of);
    if (!machine_of) {
      std::printf("skipped: libcuda.so.1 is not the tests' own\n");
      std::fflush(stdout);
      std::_Exit(77);
    }
    machine = machine_of();
    find("regard_fake_context", context);
    find("regard_fake_stream", stream);
    find("regard_fake_capture", capture);
    find("cuCtxPushCurrent_v2", push);
    find("cuCtxPopCurrent_v2", pop);
    find("cuCtxGetCurrent", current);
    clear();
  }

  void clear() const {
    machine->failures.clear();
    machine->calls.clear();
    machine->launches.clear();
    machine->broken_capture = false;
    machine->knows_mappings = true;
    machine->is_recording = true;
  }
  fake::Context* current_context() const {
    fake::Context* context = nullptr;
    current(&context);
    return context;
  }
};

// An empty cache folder for one scope.
class EmptyCache {
 public:
  EmptyCache() {
    char name[] = "/tmp/regard-test-XXXXXX";
    folder_ = mkdtemp(name);
    setenv("REGARD_CACHE_DIR", folder_.c_str(), 1);
  }
  ~EmptyCache() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  EmptyCache(const EmptyCache&) = delete;
  EmptyCache& operator=(const EmptyCache&) = delete;

  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
};

// One allocation on a device.
class DeviceBytes {
 public:
  DeviceBytes(int device, std::size_t bytes)
      : device_(device), data_(cuda_memory::allocate(device, bytes)) {}
  ~DeviceBytes() { cuda_memory::free(device_, data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  void* data() const { return data_; }

 private:
  int device_;
  void* data_;
};

// A small problem, both passes, with every tensor on one device.
struct DeviceCase {
  static constexpr std::int64_t kHeads = 2, kLength = 130, kDim = 64;
  static constexpr std::size_t kBytes = kHeads * kLength * kDim * 4;

  int device;
  DeviceBytes memory{device, 16 * kBytes};
  Attention a;
  ForwardOutputs outputs;
  BackwardInputs inputs;
  Gradients gradients;
  Run run;

  explicit DeviceCase(int device = 0) : device(device) {
    a.q = rows(0);
    a.k = rows(1);
    a.v = rows(2);
    outputs.out = rows(3);
    outputs.lse = Tensor(at(4), f32, {1, kHeads, kLength});
    inputs = {.out = rows(3), .lse = outputs.lse, .dout = rows(5), .dlse = {}};
    gradients = {.dq = rows(6), .dk = rows(7), .dv = rows(8), .dbias = {}, .dsink = {}};
    run.device = cuda(device);
  }

  void* at(int number) const { return static_cast<char*>(memory.data()) + number * kBytes; }
  Tensor rows(int number) const { return Tensor(at(number), f16, {1, kHeads, kLength, kDim}); }

  void forward() const { regard::forward(a, outputs, run); }
  void backward() const { regard::backward(a, inputs, gradients, run); }
  std::size_t backward_workspace() const { return workspace(a, inputs, gradients, run); }
};

// The Error that a call throws; fails the test where there is none.
template <class Call>
Error error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  FAIL_CHECK("nothing was thrown");
  return Error(Code::internal, "", "", "");
}

}  // namespace regard::tests
