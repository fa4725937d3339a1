// The last few problems of each thread.
//
// Nothing here goes stale: a context's number never comes again, kernels stay loaded, and what the
// environment forces is part of the key.
#include "cuda/prepared_call.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/planning.hpp"
#include "problem/addresses.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

// ------------------------------------------------------------------------------------- the makers

// What a plan may depend on: of an address its alignment, and whether there is one. Plans are made
// from this, so that they cannot depend on more.
Problem without_addresses(const Problem& p) {
  constexpr std::uintptr_t kAlignment = 16;
  Problem stripped = p;
  for_each_address(stripped, [](const char*, auto*& pointer) {
    if (!pointer) return;
    const std::uintptr_t rest = reinterpret_cast<std::uintptr_t>(pointer) % kAlignment;
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(kAlignment + rest);
  });
  Positions& at = stripped.sequences.positions;
  at.first_key = at.first_batch = at.first_head = 0;
  stripped.dropout.key_low = stripped.dropout.key_high = stripped.dropout.offset = 0;
  return stripped;
}

// Under a lock: two threads must not set the attribute in the wrong order.
void allow_shared(const LoadedKernel& kernel, std::int64_t bytes, int device) {
  constexpr std::int64_t kWithoutAsking = 48 << 10;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (bytes <= std::max<std::int64_t>(kernel.shared_bytes, kWithoutAsking)) return;
  check(driver().set_function_attribute(kernel.function, kMaxDynamicShared, int(bytes)),
        "cuFuncSetAttribute of shared memory", device);
  kernel.shared_bytes = int(bytes);
}

// All kernels of the plan, and of the gradients that follow, become ready with the first one that
// is missing.
void load_missing(const CudaPlan& plan, const Problem& p, const Run& run, std::uint64_t context) {
  const auto is_loaded = [&](const CudaLaunch& launch) {
    return loaded_kernel(launch.config, context) != nullptr;
  };
  if (std::all_of(plan.launches.begin(), plan.launches.end(), is_loaded)) return;
  load_kernels(kernels_to_load(plan, p, run), chip_of(run), context);
}

PreparedCall prepare_call(const Problem& p, const Run& run, std::uint64_t context) {
  constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();
  const int device = run.device.index;
  PreparedCall call{.plan = make_supported_plan(p, run), .launches = {}};
  load_missing(call.plan, p, run, context);
  for (const CudaLaunch& launch : call.plan.launches) {
    require(launch.grid.blocks() <= kMostBlocks, "blocks", launch.grid.blocks(),
            "a grid has at most 2^31 - 1");
    const LoadedKernel& kernel = *loaded_kernel(launch.config, context);
    allow_shared(kernel, launch.shared_bytes, device);
    call.launches.push_back({.kernel = &kernel, .maps = {}});
  }
  return call;
}

// -------------------------------------------------------------------------------------- the cache

struct Key {
  Problem problem;
  std::string backend;  // that the call or the environment forces
  int device = 0;
  int multiprocessors = 0;
  std::uint64_t context = 0;

  bool operator==(const Key&) const = default;
};

struct Entry {
  Key key;
  PreparedCall call;
};

// Latest first.
using Entries = std::array<std::shared_ptr<Entry>, 16>;

// The thread's own, so that no call waits for another. Freed when the thread ends; a call from a
// destructor that runs even later makes them anew.
Entries& entries() {
  thread_local Entries* own = nullptr;
  struct AtEnd {
    ~AtEnd() {
      delete own;
      own = nullptr;
    }
  };
  if (!own) {
    thread_local const AtEnd at_end;
    (void)at_end;
    own = new Entries;
  }
  return *own;
}

}  // namespace

std::shared_ptr<PreparedCall> prepared_call(const Problem& p, const Run& run,
                                            std::uint64_t context) {
  Key key{.problem = without_addresses(p),
          .backend = forced_backend(run),
          .device = run.device.index,
          .multiprocessors = run.multiprocessors,
          .context = context};
  Entries& known = entries();
  auto found = std::find_if(known.begin(), known.end(),
                            [&](const auto& entry) { return entry && entry->key == key; });
  if (found == known.end()) {
    auto made = std::make_shared<Entry>();
    made->call = prepare_call(key.problem, run, context);
    made->key = std::move(key);
    *--found = std::move(made);
  }
  std::rotate(known.begin(), found, found + 1);
  return {known.front(), &known.front()->call};
}

}  // namespace regard::cuda_backend
