// Workspaces that callers give, and those that the library allocates.
#include "cuda/workspace.hpp"

#include <mutex>
#include <string>
#include <vector>

#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

// Pools are never destroyed: other threads may still use them while the process ends. That of a
// context that is gone stays unused, because no other context has its number.
struct KnownPool {
  std::uint64_t context;
  MemoryPool pool;
};
struct KnownPools {
  std::mutex mutex;
  std::vector<KnownPool> all;
};
KnownPools& known_pools() {
  static auto* const pools = new KnownPools;
  return *pools;
}

// Null where the driver makes none: workspaces then come from the device's default pool.
MemoryPool make_pool(const Gpu& gpu) {
  constexpr std::uint64_t kPartOfDevice = 16;
  const Driver& d = driver();
  const RelaxedCapture relaxed(d);
  const PoolProperties properties{.ordinal = gpu.ordinal};
  MemoryPool pool = nullptr;
  if (d.create_pool(&pool, &properties) != kSuccess) return nullptr;
  std::uint64_t keep = gpu.memory / kPartOfDevice;
  d.set_pool_attribute(pool, kReleaseThreshold, &keep);
  return pool;
}

}  // namespace

MemoryPool workspace_pool(int device, std::uint64_t context) {
  const Gpu& gpu = device_at(device);
  if (!gpu.has_pools) return nullptr;
  KnownPools& pools = known_pools();
  const std::lock_guard lock(pools.mutex);
  for (const KnownPool& known : pools.all) {
    if (known.context == context) return known.pool;
  }
  return pools.all.emplace_back(context, make_pool(gpu)).pool;
}

void trim_workspace_pool(int device, std::uint64_t context) {
  if (const MemoryPool pool = workspace_pool(device, context)) {
    check(driver().trim_pool(pool, 0), "cuMemPoolTrimTo", device);
  }
}

DeviceWorkspace::DeviceWorkspace(const Driver& d, std::int64_t size, const Run& run,
                                 MemoryPool pool, ReachableMemory& reachable)
    : d_(d), stream_(static_cast<Stream>(run.stream)) {
  if (size == 0) return;
  const auto use = [&](const Workspace& given, const MemoryNames& names) {
    check_on_device(given, size, names, reachable);
    begin_ = reinterpret_cast<DevicePointer>(given.data);
  };
  if (is_given(run.workspace)) {
    use(run.workspace, {});
    return;
  }
  if (run.allocator.allocate) {
    void* const data = allocated_by(run.allocator, std::size_t(size));
    use({.data = data, .size = std::size_t(size)}, {"allocator", "allocator"});
    return;
  }
  const int index = run.device.index;
  if (!device_at(index).has_pools) {
    refuse("workspace", "none", "this device cannot allocate in a stream's order: give one");
  }
  const Result result = pool ? d.allocate_from_pool(&begin_, std::size_t(size), pool, stream_)
                             : d.allocate_async(&begin_, std::size_t(size), stream_);
  if (result == kOutOfMemory) {
    refuse("workspace", size, "so many bytes could not be allocated: " + text_of(result),
           Code::out_of_memory);
  }
  check(result, pool ? "cuMemAllocFromPoolAsync" : "cuMemAllocAsync", index);
  owned_ = true;
}

// It fails only if earlier work on the stream failed, which the caller will see there.
DeviceWorkspace::~DeviceWorkspace() {
  if (owned_) d_.free_async(begin_, stream_);
}

void check_on_device(const Workspace& given, std::int64_t bytes, const MemoryNames& names,
                     ReachableMemory& reachable) {
  check_given(given, bytes, names);
  if (reinterpret_cast<std::uintptr_t>(given.data) % 256 != 0) {
    refuse(names.data, static_cast<const void*>(given.data),
           "must be aligned to 256 bytes on a GPU");
  }
  reachable.check(names.data, given.data);
}

}  // namespace regard::cuda_backend
