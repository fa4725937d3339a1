// From a KernelConfig to machine code, and what the code takes of the chip.
#pragma once

#include <string>

#include "cuda/kernel_text.hpp"
#include "plan/cuda/kernel/kernel_config.h"

namespace regard::cuda_backend {

struct KernelResources {
  int registers = 0;     // per thread
  int stack_bytes = 0;   // per thread
  int spill_bytes = 0;   // stores and loads, per thread
  int shared_bytes = 0;  // static, per block
  int serialized = 0;    // 1: products of warpgroups wait for each other (see resources_in)
  float seconds = 0;     // of a processor, that the compiler took
};

struct KernelBinary {
  std::string image;  // cubin, or PTX
  KernelResources resources;
  std::string not_kept;  // why the disk cache did not keep it, "" = it did
};

// "forward mma, level 80, bf16, dim 128 ...": for messages.
std::string printed(const KernelConfig&);

// Error where the compiler fails; its log is in it.
KernelBinary compile_kernel(const KernelConfig&, const KernelUnit&, const Compiler&,
                            const std::string& architecture);

// What ptxas -v printed. `serialized` is its note "Potential Performance Loss": ptxas waits after
// every wgmma where it cannot follow who uses the registers of one that is still running.
KernelResources resources_in(const std::string& log);

}  // namespace regard::cuda_backend
