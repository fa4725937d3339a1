// Checks the caller's memory, builds the parameters, launches.
#include "cuda/backend.hpp"

#include <cstdio>
#include <optional>

#include "cuda/buffers.hpp"
#include "cuda/disk_cache.hpp"
#include "cuda/driver.hpp"
#include "cuda/kernel_cache.hpp"
#include "cuda/launch.hpp"
#include "cuda/prepared_call.hpp"
#include "cuda/reachable.hpp"
#include "cuda/workspace.hpp"
#include "plan/cuda/config_text.hpp"
#include "plan/cuda/input_copies.hpp"
#include "problem/addresses.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

// copied: the problem with the plan's copies in place of inputs.
CudaBuffers buffers_of(const Problem& p, const Problem& copied, const CudaPlan& plan,
                       const DeviceWorkspace& memory) {
  CudaBuffers b =
      buffers_at([&](WorkspacePart part) { return memory.at<void>(plan.workspace.begin(part)); });
  b.dbias_strides = plan.dbias_strides;
  for (int n = 0; n < kInputs; ++n) {
    if (plan.copies.has(Input(n))) b.copies[n] = view_of(copied, Input(n)).data;
  }
  if (plan.workspace.bytes(WorkspacePart::dbias_sums) == 0) {
    b.dbias_sums = static_cast<float*>(p.dbias.data);
  }
  return b;
}

}  // namespace

const Chip& this_chip(int device) { return device_at(device).chip; }

std::string missing(Family family) {
  if (!driver_if_any()) return why_no_driver();
  bool fits = family == Family::simt;
  for (int i = 0; i < device_count(); ++i) {
    const Chip& chip = device_at(i).chip;
    fits |= family == Family::wgmma ? chip.major == 9 : chip.capability() >= 75;
  }
  if (!fits) return "no GPU of this machine has them";
  return Compiler::if_any() ? "" : "only kernels that are cached can run: " + Compiler::why_not();
}

void run(const Problem& p, const MadeMaps* maps, const Run& run) {
  if (run.device.kind != Device::Kind::cuda) {
    refuse("device", run.device.name, "is a chip to plan for; kernels run on cuda(0)",
           Code::unavailable);
  }
  const Driver& d = driver();
  const int index = run.device.index;
  const auto stream = static_cast<Stream>(run.stream);
  const CurrentContext context(index, stream);
  // Whatever can be checked is checked before anything is written.
  ReachableMemory reachable(d, index);
  for_each_address(p,
                   [&](const char* name, const void* pointer) { reachable.check(name, pointer); });
  if (p.seed_in_memory) {
    reachable.check("dropout.seed_words", reinterpret_cast<const void*>(seed_address(p.dropout)));
  }
  const std::shared_ptr<PreparedCall> kept = prepared_call(p, run, context.id());
  PreparedCall& call = *kept;
  const CudaPlan& plan = call.plan;
  const MadeMap* const made = made_map(p, plan, maps);
  const CudaLaunch* const done = made ? map_launch(plan) : nullptr;
  if (made) reachable.check("visible", made->words);
  const bool allocates = !is_given(run.workspace) && !run.allocator.allocate;
  if (plan.workspace.size > 0 && allocates && !call.pool) {
    call.pool = workspace_pool(index, context.id());
  }
  const DeviceWorkspace memory(d, plan.workspace.size, run, call.pool, reachable);
  std::optional<Problem> copied;
  if (!plan.copies.empty()) {
    copied =
        with_copies(p, plan.copies, memory.at<uint8>(plan.workspace.begin(WorkspacePart::copies)));
  }
  KernelParams params{.problem = p,
                      .buffers = buffers_of(p, copied ? *copied : p, plan, memory),
                      .grid = {},
                      .by = {},
                      .splits = plan.splits,
                      .nonce = new_nonce()};
  if (made) params.buffers.tile_map = made->words;
  if (plan.workspace.clear > 0) {
    check(d.fill_async(memory.begin(), 0, std::size_t(plan.workspace.clear), stream),
          "cuMemsetD8Async", index);
  }
  for (std::size_t i = 0; i < plan.launches.size(); ++i) {
    const CudaLaunch& launch = plan.launches[i];
    if (&launch == done) continue;
    if (copied) params.problem = reads_copies(launch.config, p) ? *copied : p;
    params.grid = launch.grid;
    params.by = launch.by;
    PreparedLaunch& prepared = call.launches[i];
    LaunchMaps* const launch_maps =
        launch.config.family != Family::wgmma
            ? nullptr
            : &prepared.maps.at(d, params.problem, launch.config, params.buffers.hi_lo, index);
    launch_kernel(d, launch, *prepared.kernel, params, launch_maps, stream, index);
  }
}

std::string resources_text(const CudaPlan& plan, const Chip& chip) {
  std::string text;
  std::string not_kept = plan.launches.empty() ? "" : cache_fault();
  for (const KernelConfig& config : configs_of(plan)) {
    KernelBinary binary;
    if (!kernel_at_hand(config, chip.capability(), binary)) continue;
    const KernelResources& r = binary.resources;
    char line[200];
    std::snprintf(
        line, sizeof line,
        "%-11s%s: %d registers, %d bytes of static shared memory, %d spilled, stack %d%s\n",
        "compiled", name_of(config.kernel), r.registers, r.shared_bytes, r.spill_bytes,
        r.stack_bytes, r.serialized ? ", products serialized" : "");
    text += line;
    if (!binary.not_kept.empty()) not_kept = binary.not_kept;
  }
  if (not_kept.empty()) return text;
  return text + "not kept   " + not_kept + "; each process compiles anew\n";
}

}  // namespace regard::cuda_backend
