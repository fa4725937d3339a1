// Checks the caller's memory, finds workspace, builds the parameters, launches.
#include "cuda/backend.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <limits>
#include <random>

#include "cuda/buffers.hpp"
#include "cuda/disk_cache.hpp"
#include "cuda/driver.hpp"
#include "cuda/kernel_cache.hpp"
#include "cuda/planning.hpp"
#include "cuda/tensor_maps.hpp"
#include "plan/cuda/config_text.hpp"
#include "plan/cuda/input_copies.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

std::string printed_pointer(const void* pointer) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", pointer);
  return text;
}

// ----------------------------------------------------------------------------- the caller's memory

// Memory that the current context's kernels may access: the device's own, a peer's, managed, or
// registered by the host.
void check_reachable(const Driver& d, const char* name, const void* pointer, int index) {
  if (!pointer) return;
  int ordinal = -1;
  std::uint32_t kind = 0;
  DevicePointer reachable_at = 0;
  int attributes[] = {kReachableAt, kOrdinal, kMemoryType};
  void* values[] = {&reachable_at, &ordinal, &kind};
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  check(d.pointer_attributes(3, attributes, values, address), "cuPointerGetAttributes", index);
  if (reachable_at == address) return;
  const std::string device = "cuda:" + std::to_string(index);
  if (kind == 0) {
    refuse(name, printed_pointer(pointer),
           "is memory of the host that " + device + " does not know");
  }
  refuse(name, printed_pointer(pointer),
         "is memory of cuda:" + std::to_string(ordinal) + " that " + device + " cannot reach");
}

void check_memory(const Driver& d, const Problem& p, int index) {
  const std::pair<const char*, const void*> tensors[] = {
      {"q", p.q.data},
      {"k", p.k.data},
      {"v", p.v.data},
      {"bias", p.bias.data},
      {"mask", p.mask.data},
      {"alibi_slopes", p.alibi_slopes.data},
      {"sink", p.sink.data},
      {"cu_seqlens_q", p.sequences.begins_q},
      {"cu_seqlens_k", p.sequences.begins_k},
      {"seqused_q", p.sequences.used_q},
      {"seqused_k", p.sequences.used_k},
      {"out", p.out.data},
      {"lse", p.lse.data},
      {"dout", p.dout.data},
      {"dlse", p.dlse.data},
      {"dq", p.dq.data},
      {"dk", p.dk.data},
      {"dv", p.dv.data},
      {"dbias", p.dbias.data},
      {"dsink", p.dsink.data},
  };
  for (const auto& [name, pointer] : tensors) check_reachable(d, name, pointer, index);
}

// ------------------------------------------------------------------------------------- workspace

// The caller's, or memory that exists in the stream's order from here to the end of this.
class DeviceWorkspace {
 public:
  DeviceWorkspace(const Driver& d, std::int64_t size, const Run& run)
      : d_(d), stream_(static_cast<Stream>(run.stream)) {
    if (size == 0) return;
    const int index = run.device.index;
    if (run.workspace.data || run.workspace.size > 0) {
      use(d, size, run.workspace, index);
      return;
    }
    if (!device_at(index).has_pools) {
      refuse("workspace", "none", "this device cannot allocate in a stream's order: give one");
    }
    const Result result = d.allocate_async(&begin_, std::size_t(size), stream_);
    if (result == kOutOfMemory) {
      refuse("workspace", size, "so many bytes could not be allocated: " + text_of(result),
             Code::out_of_memory);
    }
    check(result, "cuMemAllocAsync", index);
    owned_ = true;
  }
  // It fails only if earlier work on the stream failed, which the caller will see there.
  ~DeviceWorkspace() {
    if (owned_) d_.free_async(begin_, stream_);
  }
  DeviceWorkspace(const DeviceWorkspace&) = delete;
  DeviceWorkspace& operator=(const DeviceWorkspace&) = delete;

  DevicePointer begin() const { return begin_; }
  template <class T>
  T* at(std::int64_t offset) const {
    return begin_ ? reinterpret_cast<T*>(begin_ + std::size_t(offset)) : nullptr;
  }

 private:
  void use(const Driver& d, std::int64_t size, const Workspace& given, int index) {
    require(given.data != nullptr, "workspace.data", "null", "must be given with a size");
    if (given.size < std::size_t(size)) {
      refuse("workspace.size", given.size, "must be at least " + std::to_string(size));
    }
    require(reinterpret_cast<std::uintptr_t>(given.data) % 256 == 0, "workspace.data",
            printed_pointer(given.data), "must be aligned to 256 bytes on a GPU");
    check_reachable(d, "workspace.data", given.data, index);
    begin_ = reinterpret_cast<DevicePointer>(given.data);
  }

  const Driver& d_;
  Stream stream_;
  DevicePointer begin_ = 0;
  bool owned_ = false;
};

// copied: the problem with the plan's copies in place of inputs.
CudaBuffers buffers_of(const Problem& p, const Problem& copied, const CudaPlan& plan,
                       const DeviceWorkspace& memory) {
  CudaBuffers b =
      buffers_at([&](WorkspacePart part) { return memory.at<void>(plan.workspace.begin(part)); });
  b.dbias_strides = plan.dbias_strides;
  for (int n = 0; n < kInputs; ++n) {
    if (plan.copies.has(Input(n))) b.copies[n] = view_of(copied, Input(n)).data;
  }
  const bool has_own_sums =
      std::any_of(plan.launches.begin(), plan.launches.end(),
                  [](const CudaLaunch& l) { return l.config.kernel == Kernel::convert_dbias; });
  if (!has_own_sums) b.dbias_sums = static_cast<float*>(p.dbias.data);
  return b;
}

// A new 64-bit number for each call. Flags in the workspace are compared with it, so that the
// workspace never needs clearing. A replayed graph brings the same number again; each user says why
// that does no harm (arrivals, tile_scheduler.cuh, has_flags).
uint64 new_nonce() {
  static std::atomic<uint64> calls{std::random_device()()};
  uint64 x = calls.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return (x ^ x >> 31) | 1;
}

// --------------------------------------------------------------------------------------- launches

constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kSharedWithoutAsking = 48 << 10;

void allow_shared(const Driver& d, const LoadedKernel& kernel, std::int64_t bytes, int index) {
  if (bytes <= kernel.shared_bytes.load(std::memory_order_relaxed)) return;
  if (bytes > kSharedWithoutAsking) {
    const Result result = d.set_function_attribute(kernel.function, kMaxDynamicShared, int(bytes));
    check(result, "cuFuncSetAttribute of shared memory", index);
  }
  kernel.shared_bytes.store(int(bytes), std::memory_order_relaxed);
}

// All kernels of the plan, and of the gradients that follow, become ready with the first one that
// is missing.
const LoadedKernel& kernel_of(const CudaLaunch& launch, const CudaPlan& plan, const Problem& p,
                              const Run& run, std::uint64_t context) {
  const LoadedKernel* kernel = loaded_kernel(launch.config, context);
  if (!kernel) {
    std::vector<KernelConfig> configs = configs_of(plan);
    if (run.gradients_follow && !p.backward) {
      for (const KernelConfig& c : kernels_of_gradients(p, run)) configs.push_back(c);
    }
    load_kernels(std::move(configs), this_chip(run.device.index), context);
    kernel = loaded_kernel(launch.config, context);
  }
  return *kernel;
}

void launch_kernel(const Driver& d, const CudaLaunch& launch, const LoadedKernel& kernel,
                   KernelParams& params, Stream stream, int index) {
  const std::int64_t blocks = launch.blocks();
  params.grid = launch.grid;
  LaunchMaps maps;
  if (launch.config.family == Family::wgmma) {
    maps = launch_maps(d, params.problem, launch.config, params.buffers.hi_lo, index);
  }
  void* arguments[] = {&params, &maps};
  constexpr LaunchAttribute kOverlap = {.id = kProgrammaticSerialization, .value = 1, .unused = {}};
  const LaunchConfig config = {.grid = {unsigned(blocks), 1, 1},
                               .block = {unsigned(launch.threads), 1, 1},
                               .shared_bytes = unsigned(launch.shared_bytes),
                               .stream = stream,
                               .attributes = &kOverlap,
                               .attribute_count = kernel.may_overlap ? 1u : 0u};
  const Result result = d.launch(&config, kernel.function, arguments, nullptr);
  if (result != kSuccess) {
    check(result, ("cuLaunchKernelEx of " + printed(launch.config)).c_str(), index);
  }
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

void run(const Problem& p, const CudaPlan& plan, const Run& run) {
  if (run.device.kind != Device::Kind::cuda) {
    refuse("device", run.device.name, "is a chip to plan for; kernels run on cuda(0)",
           Code::unavailable);
  }
  const Driver& d = driver();
  const int index = run.device.index;
  const auto stream = static_cast<Stream>(run.stream);
  const CurrentContext context(index, stream);
  check_memory(d, p, index);
  // Whatever can fail does so before anything is written.
  constexpr std::size_t kMostLaunches = 16;
  const LoadedKernel* kernels[kMostLaunches];
  require(plan.launches.size() <= kMostLaunches, "launches", plan.launches.size(), "too many");
  for (std::size_t i = 0; i < plan.launches.size(); ++i) {
    const CudaLaunch& launch = plan.launches[i];
    require(launch.grid.blocks() <= kMostBlocks, "blocks", launch.grid.blocks(),
            "a grid has at most 2^31 - 1");
    kernels[i] = &kernel_of(launch, plan, p, run, context.id());
    allow_shared(d, *kernels[i], launch.shared_bytes, index);
  }
  const DeviceWorkspace memory(d, plan.workspace.size, run);
  const Problem copied =
      with_copies(p, plan.copies, memory.at<uint8>(plan.workspace.begin(WorkspacePart::copies)));
  KernelParams params{.problem = p,
                      .buffers = buffers_of(p, copied, plan, memory),
                      .grid = {},
                      .splits = plan.splits,
                      .nonce = new_nonce()};
  if (plan.workspace.clear > 0) {
    check(d.fill_async(memory.begin(), 0, std::size_t(plan.workspace.clear), stream),
          "cuMemsetD8Async", index);
  }
  for (std::size_t i = 0; i < plan.launches.size(); ++i) {
    if (plan.launches[i].grid.blocks() == 0) continue;
    params.problem = reads_copies(plan.launches[i].config, p) ? copied : p;
    launch_kernel(d, plan.launches[i], *kernels[i], params, stream, index);
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
