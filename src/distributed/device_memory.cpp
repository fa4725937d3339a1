// Rows in a GPU's memory, by one small kernel on the call's stream.
#include <limits>

#include "cuda/driver.hpp"
#include "cuda/kernel_cache.hpp"
#include "cuda/launch.hpp"
#include "cuda/planning.hpp"
#include "cuda/reachable.hpp"
#include "cuda/workspace.hpp"
#include "distributed/memory.hpp"
#include "plan/cuda/write_rows.hpp"
#include "problem/given_memory.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

using namespace cuda_backend;

DevicePointer address(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

View view_of(const Tensor& x) {
  return {.data = x.data,
          .type = x.type,
          .strides = {.batch = x.strides[0],
                      .head = x.strides[1],
                      .row = x.strides[2],
                      .column = x.strides[3]}};
}

class DeviceMemory final : public Memory {
 public:
  DeviceMemory(std::size_t bytes, const Run& run)
      : run_(run),
        d_(driver()),
        stream_(static_cast<Stream>(run.stream)),
        context_(run.device.index, stream_),
        reachable_(d_, run.device.index),
        memory_(d_, std::int64_t(bytes), run,
                is_given(run.workspace) ? nullptr : workspace_pool(run.device.index, context_.id()),
                reachable_) {}

  std::byte* workspace() override { return memory_.at<std::byte>(0); }

  const void* table(const void* host, std::size_t bytes, void* to) override {
    if (bytes == 0) return to;
    check(d_.copy_in_async(address(to), host, bytes, stream_), "cuMemcpyHtoDAsync",
          run_.device.index);
    return to;
  }

  void zero(void* to, std::size_t bytes) override {
    if (bytes == 0) return;
    check(d_.fill_async(address(to), 0, bytes, stream_), "cuMemsetD8Async", run_.device.index);
  }

  void require_reachable(const char* name, const Tensor& x) override {
    if (x.given()) reachable_.check(name, x.data);
  }

  void write(const Tensor& from, const Tensor& to, bool add) override {
    constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();
    const std::int64_t rows = to.sizes[0] * to.sizes[1] * to.sizes[2];
    if (rows == 0 || to.sizes[3] == 0) return;
    require(rows <= kMostRows, "rows", rows, "are more than a grid has blocks for");
    const CudaLaunch launch = write_rows_launch(from.type, to.type, rows);
    KernelParams params;
    Problem& p = params.problem;
    p.sizes = {
        .batch = to.sizes[0], .heads_q = to.sizes[1], .len_q = to.sizes[2], .dim = to.sizes[3]};
    p.q = view_of(from);
    p.out = view_of(to);
    p.accumulate = add;
    launch_kernel(d_, launch, loaded(launch.config), params, nullptr, stream_, run_.device.index);
  }

 private:
  const LoadedKernel& loaded(const KernelConfig& config) const {
    const LoadedKernel* kernel = loaded_kernel(config, context_.id());
    if (!kernel) load_kernels({config}, chip_of(run_), context_.id());
    return kernel ? *kernel : *loaded_kernel(config, context_.id());
  }

  const Run& run_;
  const Driver& d_;
  const Stream stream_;
  const CurrentContext context_;
  ReachableMemory reachable_;
  DeviceWorkspace memory_;
};

}  // namespace

std::unique_ptr<Memory> device_memory(std::size_t bytes, const Run& run) {
  if (run.device.kind != Device::Kind::cuda) {
    refuse("device", run.device.name, "is a chip to plan for; kernels run on cuda(0)",
           Code::unavailable);
  }
  return std::make_unique<DeviceMemory>(bytes, run);
}

}  // namespace regard::distributed
