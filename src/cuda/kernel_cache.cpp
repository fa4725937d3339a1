// Kernels in memory, by configuration.
#include "cuda/kernel_cache.hpp"

#include <bit>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "cuda/compile_progress.hpp"
#include "cuda/disk_cache.hpp"
#include "cuda/environment.hpp"
#include "cuda/in_parallel.hpp"
#include "cuda/kernel_lock.hpp"
#include "plan/cuda/config_members.hpp"
#include "plan/cuda/config_text.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

// What a kernel is made for, and what it belongs to: a context or a compute capability.
struct Key {
  KernelConfig config;
  std::uint64_t owner = 0;

  bool operator==(const Key&) const = default;
};

// Mixes every member into the hash; seven bits apart, so that no two flags meet.
template <class Value>
void mix(std::uint64_t& sum, const Value& value) {
  if constexpr (std::is_class_v<Value>) {
    for_each_member(value, [&](const char*, const auto& member) { mix(sum, member); });
  } else {
    sum = std::rotl(sum, 7) ^ std::uint64_t(value);
  }
}

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    std::uint64_t sum = 0;
    mix(sum, key.config);
    sum = (sum ^ key.owner) * 0x9e3779b97f4a7c15u;
    return sum ^ sum >> 29;
  }
};

// ------------------------------------------------------------------------------ kernels as binary

std::atomic<bool> may_compile{true};

// One kernel for one compute capability; the mutex lets one thread make it and the others wait.
struct Slot {
  std::mutex mutex;
  std::atomic<bool> ready{false};
  KernelBinary binary;
};

Slot& slot_of(const KernelConfig& config, int capability) {
  static std::mutex mutex;
  static auto* const slots = new std::unordered_map<Key, std::unique_ptr<Slot>, KeyHash>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Slot>& slot = (*slots)[Key{config, std::uint64_t(capability)}];
  if (!slot) slot = std::make_unique<Slot>();
  return *slot;
}

[[noreturn]] void refuse_missing(const KernelConfig& config, const std::string& architecture,
                                 const std::string& reason) {
  refuse("kernel", printed(config),
         "is not among the cached kernels of " +
             (cache_folder().empty() ? "any folder" : cache_folder()) + " for " + architecture +
             ", and " + reason + "; `regard prebuild --devices " + architecture +
             "` fills the folder on any machine with NVRTC",
         Code::unavailable);
}

// What the kernel is compiled for, or would be.
std::string architecture_of(const KernelConfig& config, const Compiler* compiler, int capability) {
  const bool own_features = config.family == Family::wgmma;
  if (compiler) return compiler->architecture(capability, own_features);
  return "sm_" + std::to_string(capability) + (own_features ? "a" : "");
}

// One line a process: what ails the folder ails every kernel.
void log_once(const std::string& reason) {
  static std::atomic_flag logged;
  if (!logged.test_and_set()) log_line("cache: kernels are not kept: " + reason);
}

KernelBinary make_binary(const KernelConfig& config, int capability, Origin& origin) {
  const KernelUnit unit = kernel_unit(config);
  const bool may = may_compile.load(std::memory_order_relaxed);
  const Compiler* const compiler = may ? Compiler::if_any() : nullptr;
  const std::string architecture = architecture_of(config, compiler, capability);
  KernelBinary binary;
  const KernelKey key =
      kernel_key(config, unit, architecture, compiler ? compiler->name() : std::string());
  if (load_kernel(key, binary)) {
    origin = Origin::disk;
    if (is_logging()) log_line("from disk, " + architecture + ": " + printed(config));
    return binary;
  }
  if (!may) refuse_missing(config, architecture, "compiling is switched off");
  if (!compiler)
    refuse_missing(config, architecture, "there is no compiler: " + Compiler::why_not());
  if (architecture.empty()) {
    refuse("device", "sm_" + std::to_string(capability),
           compiler->name() + " does not know chips as old as this one", Code::unavailable);
  }
  const KernelLock lock(key);
  if (lock.is_held() && load_kernel(key, binary)) {  // another process has just made it
    origin = Origin::disk;
    return binary;
  }
  binary = compile_kernel(config, unit, *compiler, architecture);
  binary.not_kept = store_kernel(key, binary);
  if (!binary.not_kept.empty()) log_once(binary.not_kept);
  origin = Origin::compiler;
  return binary;
}

// ---------------------------------------------------------------------------- kernels in contexts

// Only ever grows, so that readers need no lock.
struct Node {
  Key key;
  LoadedKernel kernel;
  Node* next = nullptr;
};
constexpr std::size_t kBuckets = 1024;
std::atomic<Node*> buckets[kBuckets];
std::mutex loading;

std::atomic<Node*>& bucket_of(const Key& key) { return buckets[KeyHash()(key) % kBuckets]; }

Node* find(const Key& key) {
  Node* node = bucket_of(key).load(std::memory_order_acquire);
  while (node && node->key != key) node = node->next;
  return node;
}

[[noreturn]] void refuse_load(Result result, const KernelConfig& config) {
  std::string reason = "the driver does not load it: " + text_of(result);
  if (result == kNoBinary || result == kInvalidImage || result == kUnsupportedPtx) {
    const Compiler* const compiler = Compiler::if_any();
    reason += "; is the driver (CUDA " + std::to_string(driver_version() / 1000) + "." +
              std::to_string(driver_version() % 1000 / 10) + ") older than the compiler" +
              (compiler ? " (" + compiler->name() + ")" : std::string()) + "?";
  }
  refuse("kernel", printed(config), reason,
         result == kOutOfMemory ? Code::out_of_memory : Code::device_failure);
}

// Whether the kernel begins with griddepcontrol.wait (kernel_text.cpp), and the driver supports
// such launches, also in graphs. Old compilers make kernels without the wait for later chips too.
bool waits_by_itself(const Driver& d, Function function) {
  constexpr int kFirstVersion = 90, kFirstDriver = 12030;
  int version = 0;
  if (d.function_attribute(&version, kPtxVersion, function) != kSuccess) return false;
  return version >= kFirstVersion && driver_version() >= kFirstDriver;
}

void load(const Key& key, const KernelBinary& binary) {
  const Driver& d = driver();
  const std::lock_guard lock(loading);
  if (find(key)) return;
  const RelaxedCapture relaxed(d);
  Module module = nullptr;
  Function function = nullptr;
  Result result = d.load_module(&module, binary.image.data(), 0, nullptr, nullptr);
  if (result == kSuccess) result = d.function(&function, module, kKernelSymbol);
  if (result != kSuccess) refuse_load(result, key.config);
  auto* const node = new Node;
  node->key = key;
  node->kernel.function = function;
  node->kernel.may_overlap = waits_by_itself(d, function);

  std::atomic<Node*>& bucket = bucket_of(key);
  node->next = bucket.load(std::memory_order_relaxed);
  bucket.store(node, std::memory_order_release);
}

}  // namespace

void set_compilation(bool allowed) { may_compile.store(allowed, std::memory_order_relaxed); }

const KernelBinary& kernel_binary(const KernelConfig& config, int capability, Origin* origin) {
  Slot& slot = slot_of(config, capability);
  Origin found = Origin::memory;
  if (!slot.ready.load(std::memory_order_acquire)) {
    const std::lock_guard lock(slot.mutex);
    if (!slot.ready.load(std::memory_order_relaxed)) {
      slot.binary = make_binary(config, capability, found);
      slot.ready.store(true, std::memory_order_release);
    }
  }
  if (origin) *origin = found;
  return slot.binary;
}

bool kernel_at_hand(const KernelConfig& config, int capability, KernelBinary& binary) {
  Slot& slot = slot_of(config, capability);
  if (slot.ready.load(std::memory_order_acquire)) {
    binary = slot.binary;
    return true;
  }
  const Compiler* const compiler = Compiler::if_any();
  const std::string architecture = architecture_of(config, compiler, capability);
  const std::string name = compiler ? compiler->name() : "";
  return load_kernel(kernel_key(config, kernel_unit(config), architecture, name), binary);
}

void compile_each(const std::vector<KernelConfig>& configs, int capability,
                  const std::function<void(const KernelConfig&, Origin)>& done) {
  in_parallel(configs.size(), [&](std::size_t i) {
    Origin origin = Origin::memory;
    kernel_binary(configs[i], capability, &origin);
    if (done) done(configs[i], origin);
  });
}

const LoadedKernel* loaded_kernel(const KernelConfig& config, std::uint64_t context) {
  const Node* const node = find(Key{config, context});
  return node ? &node->kernel : nullptr;
}

void load_kernels(std::vector<KernelConfig> missing, const Chip& chip, std::uint64_t context) {
  std::erase_if(missing, [&](const KernelConfig& c) { return loaded_kernel(c, context); });
  remove_repetitions(missing);
  {
    CompileProgress progress(missing.size(), chip.capability());
    compile_each(missing, chip.capability(),
                 [&](const KernelConfig&, Origin origin) { progress.add(origin); });
  }
  for (const KernelConfig& config : missing) {
    load({config, context}, kernel_binary(config, chip.capability()));
  }
}

}  // namespace regard::cuda_backend
