// Rows in a GPU's memory, by one small kernel on the call's stream.
#include <optional>

#include "cuda/driver.hpp"
#include "cuda/planning.hpp"
#include "cuda/reachable.hpp"
#include "cuda/side_stream.hpp"
#include "cuda/workspace.hpp"
#include "cuda/write_rows.hpp"
#include "distributed/memory.hpp"
#include "problem/given_memory.hpp"
#include "problem/refuse.hpp"

namespace regard::distributed {
namespace {

using namespace cuda_backend;

DevicePointer address(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

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

  void* stream(Lane lane) override { return lane == Lane::call ? stream_ : beside().get(); }
  void let_other_wait_for(Lane first) override {
    first == Lane::call ? beside().let_side_wait() : beside().let_callers_wait();
  }

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
    write_rows({.first = from, .to = to, .add = add}, chip_of(run_), context_.id(), stream_,
               run_.device.index);
  }

 private:
  SideStream& beside() {
    if (!beside_) beside_.emplace(stream_, run_.device.index);
    return *beside_;
  }

  const Run& run_;
  const Driver& d_;
  const Stream stream_;
  const CurrentContext context_;
  ReachableMemory reachable_;
  DeviceWorkspace memory_;
  std::optional<SideStream> beside_;
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
