// The kernel cache: memory -> disk -> compiler. Each kernel is compiled once, by one thread, and
// stays loaded.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "cuda/driver.hpp"
#include "cuda/jit.hpp"
#include "plan/cuda/plan.hpp"

namespace regard::cuda_backend {

// A kernel in a context.
struct LoadedKernel {
  Function function = nullptr;
  bool may_overlap = false;                  // it waits for the kernel before it by itself
  mutable std::atomic<int> shared_bytes{0};  // dynamic, that it may use
};

// Null where it is not loaded yet. Takes no lock.
const LoadedKernel* loaded_kernel(const KernelConfig&, std::uint64_t context);

// Finds or compiles those that are missing, side by side, and loads them into the current context.
// May be called while a stream is captured.
void load_kernels(std::vector<KernelConfig>, const Chip&, std::uint64_t context);

enum class Origin { memory, disk, compiler };

// The kernel for chips of this compute capability. Error where it cannot be had.
const KernelBinary& kernel_binary(const KernelConfig&, int capability, Origin* = nullptr);

// Several at once, on as many threads as there are cores; `done` is called on any of them.
void compile_each(const std::vector<KernelConfig>&, int capability,
                  const std::function<void(const KernelConfig&, Origin)>& done);

// From memory or disk only; false where it would have to be compiled.
bool kernel_at_hand(const KernelConfig&, int capability, KernelBinary&);

// Where compiling is switched off, kernels that are not on disk are an Error.
void set_compilation(bool allowed);

}  // namespace regard::cuda_backend
