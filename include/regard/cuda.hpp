// What programs need beside attention itself to use a GPU without CUDA's headers: devices, memory,
// time, and the kernels that the library compiles at run time.
//
// Everything throws Error: Code::unavailable where there is no driver, device or compiler.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "regard/regard.hpp"

#pragma GCC visibility push(default)

namespace regard {

// ----------------------------------------------------------------------------------------- devices

struct CudaDevice {
  std::string name;
  std::string chip;  // "sm_90"
  int multiprocessors = 0;
  std::size_t memory = 0;  // bytes
  std::size_t l2 = 0;
  std::size_t shared_per_block = 0;
};

struct CudaSetup {
  std::vector<CudaDevice> devices;  // empty without a driver
  std::string driver;               // "13.0": the newest CUDA that it serves; or why there is none
  bool has_driver = false;
  std::string compiler;  // NVRTC's version and file; or why there is none
  bool has_compiler = false;
  std::string cache;  // the folder of compiled kernels; "" = none
};
CudaSetup cuda_setup();

// ------------------------------------------------------------------------------------------ memory
// On the device's primary context. Copies return when they are done.

namespace cuda_memory {

void* allocate(int device, std::size_t bytes);  // aligned to 256 bytes
void free(int device, void* memory);
void fill(int device, void* memory, unsigned char byte, std::size_t bytes);
void to_device(int device, void* to, const void* from, std::size_t bytes);
void to_host(int device, void* to, const void* from, std::size_t bytes);
void synchronize(int device);  // waits until the device has nothing left to do

}  // namespace cuda_memory

// Seconds of GPU time that the work takes that `enqueue` puts on the default stream.
double cuda_seconds(int device, const std::function<void()>& enqueue);

// ----------------------------------------------------------------------------------------- kernels

// Compiles the kernels of a call, or finds them, so that the call itself will not wait. The device
// may be chip("sm_80"); on the CPU there is nothing to do. With a pass alone, data pointers may be
// null, and the call is taken to give every output and gradient in the inputs' own types.
void prepare(const Attention&, Pass, const Run&);
void prepare(const Attention&, const ForwardOutputs&, const Run&);
void prepare(const Attention&, const BackwardInputs&, const Gradients&, const Run&);

// Switched off, a call whose kernels are not cached is an Error that names the missing kernel.
void allow_compilation(bool);

struct CompiledKernel {
  std::string config;  // as the compiler reads it
  std::string chip;    // "sm_90"
  std::string compiler;
  std::string file;
  std::string fault;  // why the cache does not use the file, or why there is none; "" = all is well
  std::size_t bytes = 0;
  int registers = 0;        // of a thread
  int spill_bytes = 0;      // of a thread: stores and loads
  int stack_bytes = 0;      // of a thread
  int shared_bytes = 0;     // of a block
  bool serialized = false;  // products that should overlap wait for each other
  double seconds = 0;       // of a processor, that the compiler took
  bool was_cached = false;
};

std::vector<CompiledKernel> cached_kernels();
int clear_cached_kernels();  // returns how many files were removed

// Compiles, into the cache, the kernels of usual problems (head sizes, types, masks) for a chip.
// `done` is told of each, also of one that fails, from several threads, one at a time. Afterwards
// the first failure is thrown.
void prebuild(const std::string& chip,
              const std::function<void(const CompiledKernel&, int number, int count)>& done);

}  // namespace regard

#pragma GCC visibility pop
