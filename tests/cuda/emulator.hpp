// The emulated GPU: compiles planned kernels with the C++ compiler and runs them on the CPU.
#pragma once

#include <string>

#include "plan/cuda/planner.hpp"
#include "tests/cuda/emulator_build.hpp"
#include "tests/cuda/machine/block_machine.hpp"

namespace regard::emulated {

struct Schedule {
  Order order = Order::forward;
  std::uint64_t seed = 1;
};

// The kernel of a unit (cuda/kernel_text.hpp) that runs on the machine, from memory, from the
// folder of compiled kernels (REGARD_EMULATOR_CACHE), or from the compiler.
KernelEntry compiled(const std::string& unit, Machine&);

// Runs one launch; params.grid is the launch's.
void run_launch(const CudaLaunch&, KernelParams, Schedule);

// Runs a plan in host memory, its workspace filled with NaN where it is not cleared; a given
// workspace keeps there what it holds. The number of the call follows from the seed: a given
// workspace meets the same again as with a graph that is replayed.
void emulate(const Problem&, const CudaPlan&, Schedule, void* workspace);

}  // namespace regard::emulated
