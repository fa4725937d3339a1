// Each pass has a map of its own, because its main kernel has tiles of its own.
#include "cuda/mask_maps.hpp"

#include <string>
#include <vector>

#include "cuda/kernel_cache.hpp"
#include "cuda/launch.hpp"
#include "cuda/planning.hpp"
#include "cuda/reachable.hpp"
#include "cuda/workspace.hpp"
#include "plan/cuda/possible_calls.hpp"
#include "problem/addresses.hpp"
#include "problem/describe.hpp"

namespace regard::cuda_backend {
namespace {

// What makes the map of one pass, and where the map begins in the memory of all.
struct MapPlan {
  Problem problem;
  CudaLaunch launch;
  int64 begin = 0;
};

struct MapPlans {
  std::vector<MapPlan> all;
  int64 bytes = 0;  // a multiple of 256, as the parts of a workspace are

  void add(const Problem& p, const Run& run) {
    const CudaPlan plan = make_plan(p, run, Reasons::left_out);
    const CudaLaunch* const launch = map_launch(plan);
    if (!launch) return;
    all.push_back({.problem = p, .launch = *launch, .begin = bytes});
    bytes += plan.workspace.bytes(WorkspacePart::tile_map);
  }
};

// A call that no kernel computes has no map; its own error will say why.
MapPlans plans_of(const Problem& forward, const Run& run) {
  MapPlans plans;
  plans.add(forward, run);
  plans.add(with_gradients(forward), run);
  return plans;
}

std::shared_ptr<const MadeMaps> maps_at(const MapPlans& plans, uint8* memory) {
  auto maps = std::make_shared<MadeMaps>();
  for (const MapPlan& plan : plans.all) {
    auto* const words = memory ? reinterpret_cast<uint64*>(memory + plan.begin) : nullptr;
    maps->all.push_back(map_of(plan.problem, plan.launch.config, words));
  }
  return maps;
}

void launch_all(const MapPlans& plans, const MadeMaps& maps, const Run& run,
                std::uint64_t context) {
  std::vector<KernelConfig> configs;
  for (const MapPlan& plan : plans.all) configs.push_back(plan.launch.config);
  load_kernels(configs, chip_of(run), context);
  const uint64 nonce = new_nonce();
  for (std::size_t n = 0; n < plans.all.size(); ++n) {
    const CudaLaunch& launch = plans.all[n].launch;
    KernelParams params{.problem = plans.all[n].problem,
                        .buffers = {},
                        .grid = launch.grid,
                        .by = launch.by,
                        .nonce = nonce};
    params.buffers.tile_map = maps.all[n].words;
    launch_kernel(driver(), launch, *loaded_kernel(launch.config, context), params, nullptr,
                  static_cast<Stream>(run.stream), run.device.index);
  }
}

}  // namespace

int64 mask_memory(const Problem& forward, const Run& run) {
  int64 most = plans_of(forward, run).bytes;
  for (const Problem& call : possible_calls(forward)) {
    most = larger(most, plans_of(call, run).bytes);
  }
  return most;
}

std::shared_ptr<const MadeMaps> make_maps(const Problem& forward, const Workspace& memory,
                                          const Run& run) {
  const MapPlans plans = plans_of(forward, run);
  if (run.device.kind != Device::Kind::cuda) return maps_at(plans, nullptr);
  const CurrentContext context(run.device.index, static_cast<Stream>(run.stream));
  ReachableMemory reachable(driver(), run.device.index);
  for_each_address(forward,
                   [&](const char* name, const void* pointer) { reachable.check(name, pointer); });
  if (plans.bytes > 0)
    check_on_device(memory, plans.bytes, {"memory.data", "memory.size"}, reachable);
  auto maps = maps_at(plans, static_cast<uint8*>(memory.data));
  launch_all(plans, *maps, run, context.id());
  return maps;
}

}  // namespace regard::cuda_backend
