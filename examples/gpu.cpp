// A call on a GPU, without CUDA's headers; docs/guide-cpp.md shows its middle part. Where there is
// no GPU it says so.
#include <cmath>
#include <cstdio>
#include <regard/cuda.hpp>
#include <regard/regard.hpp>
#include <vector>

namespace {

void attend_on_gpu() {
  const std::int64_t B = 1, H = 8, S = 512, D = 64, n = B * H * S * D;
  const std::vector<float> ones(n, 1);
  std::vector<float> result(n);
  // [gpu]
  const int device = 0;
  const std::size_t bytes = n * sizeof(float);
  void* const q = regard::cuda_memory::allocate(device, bytes);  // or any device pointer
  void* const out = regard::cuda_memory::allocate(device, bytes);
  regard::cuda_memory::to_device(device, q, ones.data(), bytes);

  const regard::Tensor rows{q, regard::f32, {B, H, S, D}};
  const regard::Run run{.device = regard::cuda(device), .stream = nullptr};        // or a CUstream
  regard::prepare({.q = rows, .k = rows, .v = rows}, regard::Pass::forward, run);  // compiles
  regard::forward({.q = rows, .k = rows, .v = rows},
                  {.out = regard::Tensor{out, regard::f32, {B, H, S, D}}}, run);
  regard::cuda_memory::to_host(device, result.data(), out, bytes);
  // [/gpu]
  regard::cuda_memory::free(device, q);
  regard::cuda_memory::free(device, out);
  double worst = 0;
  for (const float x : result) worst = std::fmax(worst, std::fabs(x - 1));
  std::printf("a mean of ones on the GPU is off by %.1e\n", worst);
}

}  // namespace

int main() {
  const regard::CudaSetup setup = regard::cuda_setup();
  if (setup.devices.empty() || !setup.has_compiler) {
    std::printf("no GPU to use: %s; %s\n", setup.driver.c_str(), setup.compiler.c_str());
    return 0;
  }
  attend_on_gpu();
}
