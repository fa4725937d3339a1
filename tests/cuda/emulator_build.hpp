// Makes a kernel for the emulated machine of the unit that is NVRTC's on a GPU.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cuda/kernels/params.h"
#include "cuda/kernels/tensor_maps.h"
#include "tests/cuda/machine/machine.hpp"

namespace regard::emulated {

// A kernel as one thread runs it.
struct KernelEntry {
  void* function = nullptr;
  bool takes_maps = false;
  int cluster = 1;

  // Maps of either pass: a kernel reads its own of them, where they begin.
  void operator()(const KernelParams& params, const LaunchMaps& maps) const {
    if (takes_maps) {
      reinterpret_cast<void (*)(KernelParams, LaunchMaps)>(function)(params, maps);
    } else {
      reinterpret_cast<void (*)(KernelParams)>(function)(params);
    }
  }
};

std::string setting(const char* variable, const std::string& otherwise);
std::string content(const std::filesystem::path&);

// The project's folder: REGARD_EMULATOR_SOURCE, or the one that this was built from.
std::filesystem::path source_folder();

// How the compiler is called: REGARD_EMULATOR_CXX (g++) and REGARD_EMULATOR_FLAGS, the machine's
// headers, and then these folders.
std::string compiler_command(const std::vector<std::filesystem::path>& folders);

// Writes a shared library; an existing one is replaced as a whole. Throws std::runtime_error with
// what the compiler said.
void build_kernel(const std::string& unit, const std::string& command,
                  const std::filesystem::path& to);

// The entry of this name in a library, which will run on the machine.
KernelEntry load_kernel(const std::filesystem::path&, Machine&,
                        const std::string& symbol = "regard_kernel");

}  // namespace regard::emulated
