// Parameters and attributes as the driver takes them.
#include "cuda/launch.hpp"

#include <atomic>
#include <random>
#include <string>

#include "cuda/jit.hpp"

namespace regard::cuda_backend {

uint64 new_nonce() {
  static std::atomic<uint64> calls{std::random_device()()};
  uint64 x = calls.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return (x ^ x >> 31) | 1;
}

// The maps are the kernel's second parameter; other kernels have one.
void launch_kernel(const Driver& d, const CudaLaunch& launch, const LoadedKernel& kernel,
                   KernelParams& params, LaunchMaps* maps, Stream stream, int device) {
  void* arguments[] = {&params, maps};
  constexpr LaunchAttribute kOverlap = {.id = kProgrammaticSerialization, .value = 1, .unused = {}};
  const LaunchConfig config = {.grid = {unsigned(launch.blocks()), 1, 1},
                               .block = {unsigned(launch.threads), 1, 1},
                               .shared_bytes = unsigned(launch.shared_bytes),
                               .stream = stream,
                               .attributes = &kOverlap,
                               .attribute_count = kernel.may_overlap ? 1u : 0u};
  const Result result = d.launch(&config, kernel.function, arguments, nullptr);
  if (result != kSuccess) {
    check(result, ("cuLaunchKernelEx of " + printed(launch.config)).c_str(), device);
  }
}

}  // namespace regard::cuda_backend
