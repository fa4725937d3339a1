// What cuda.hpp says of devices, compiler and cached kernels.
#include <exception>
#include <mutex>

#include "cuda/backend.hpp"
#include "cuda/compile_progress.hpp"
#include "cuda/disk_cache.hpp"
#include "cuda/driver.hpp"
#include "cuda/environment.hpp"
#include "cuda/in_parallel.hpp"
#include "cuda/kernel_cache.hpp"
#include "cuda/planning.hpp"
#include "cuda/record.hpp"
#include "plan/cuda/config_text.hpp"
#include "plan/cuda/representative.hpp"
#include "problem/describe.hpp"
#include "problem/mask_contents.hpp"
#include "problem/refuse.hpp"
#include "regard/cuda.hpp"

namespace regard {
namespace {

using namespace cuda_backend;

std::string chip_name(const Chip& chip) { return "sm_" + std::to_string(chip.capability()); }

CompiledKernel compiled(std::size_t bytes, const KernelResources& resources) {
  CompiledKernel k;
  k.bytes = bytes;
  k.registers = resources.registers;
  k.spill_bytes = resources.spill_bytes;
  k.stack_bytes = resources.stack_bytes;
  k.shared_bytes = resources.shared_bytes;
  k.serialized = resources.serialized != 0;
  k.seconds = double(resources.seconds);
  return k;
}

void make_ready(const Attention& a, const Problem& problem, const Run& run) {
  if (a.visible.given()) check_made_on(a.visible, run.device);
  const CudaPlan plan = make_supported_plan(problem, run);
  const std::vector<KernelConfig> kernels = kernels_to_load(plan, problem, run);
  if (run.device.kind == Device::Kind::cuda) {
    const CurrentContext context(run.device.index, static_cast<Stream>(run.stream));
    load_kernels(kernels, chip_of(run), context.id());
  } else {
    compile_each(kernels, chip_of(run).capability(), {});
  }
}

using BuiltKernel = void(const CompiledKernel&, int number, int count);

void build(const std::vector<KernelConfig>& kernels, const Chip& chip,
           const std::function<BuiltKernel>& done) {
  std::mutex mutex;
  int number = 0;
  in_parallel(kernels.size(), [&](std::size_t i) {
    CompiledKernel k;
    std::exception_ptr failure;
    try {
      Origin origin = Origin::memory;
      const KernelBinary& binary = kernel_binary(kernels[i], chip.capability(), &origin);
      k = compiled(binary.image.size(), binary.resources);
      k.was_cached = origin != Origin::compiler;
      k.not_kept = binary.not_kept;
    } catch (const Error& error) {
      k.fault = error.what();
      failure = std::current_exception();
    }
    k.config = to_text(kernels[i]);
    k.chip = chip_name(chip);
    const std::lock_guard lock(mutex);
    ++number;
    if (done) done(k, number, int(kernels.size()));
    if (failure) std::rethrow_exception(failure);
  });
}

// An Error of a call that says where it is written says that too.
std::vector<KernelConfig> kernels_of_planned(const PlannedCall& call, const Run& run) {
  try {
    return kernels_of(call, run);
  } catch (const Error& error) {
    if (call.origin.empty()) throw;
    const std::string begin = error.argument() + " = " + error.value() + ": ";
    throw Error(error.code(), call.origin + ": " + error.argument(), error.value(),
                std::string(error.what()).substr(begin.size()));
  }
}

}  // namespace

CudaSetup cuda_setup() {
  CudaSetup setup;
  setup.has_driver = driver_if_any() != nullptr;
  setup.driver = setup.has_driver ? std::to_string(driver_version() / 1000) + "." +
                                        std::to_string(driver_version() % 1000 / 10)
                                  : why_no_driver();
  for (int i = 0; i < device_count(); ++i) {
    const Gpu& device = device_at(i);
    const Chip& chip = device.chip;
    setup.devices.push_back({.name = chip.name,
                             .chip = chip_name(chip),
                             .multiprocessors = chip.multiprocessors,
                             .memory = device.memory,
                             .l2 = std::size_t(chip.l2),
                             .shared_per_block = std::size_t(chip.shared_per_block)});
  }
  const Compiler* const compiler = Compiler::if_any();
  setup.has_compiler = compiler != nullptr;
  setup.compiler = compiler ? compiler->name() + ", " + compiler->path() : Compiler::why_not();
  setup.skipped = Compiler::skipped();
  setup.cache = cache_folder();
  setup.cache_fault = cache_fault();
  return setup;
}

void prepare(const Attention& a, Pass pass, const Run& run) {
  with_memory_errors([&] {
    if (on_gpu(run)) make_ready(a, describe(a, pass, NullData::allowed), run);
  });
}

void prepare(const Attention& a, const ForwardOutputs& to, const Run& run) {
  with_memory_errors([&] {
    if (on_gpu(run)) make_ready(a, describe_forward(a, to), run);
  });
}

void prepare(const Attention& a, const BackwardInputs& from, const Gradients& to, const Run& run) {
  with_memory_errors([&] {
    if (on_gpu(run)) make_ready(a, describe_backward(a, from, to), run);
  });
}

void allow_compilation(bool allowed) { set_compilation(allowed); }

void show_compiling(bool shown) { set_progress(shown); }

std::vector<CompiledKernel> cached_kernels() {
  std::vector<CompiledKernel> list;
  for (const CacheEntry& entry : cache_entries()) {
    CompiledKernel k = compiled(entry.image_bytes, entry.resources);
    k.file = entry.path;
    k.fault = entry.fault;
    k.compiler = entry.key.compiler;
    k.was_cached = true;
    const std::string& subject = entry.key.subject;
    const std::size_t line = subject.find('\n');
    if (line != std::string::npos) {
      k.config = subject.substr(0, line);
      k.chip = subject.substr(line + 1, subject.find(' ', line) - line - 1);
    }
    list.push_back(std::move(k));
  }
  return list;
}

std::string make_kernel_cache() { return make_cache_folder(); }

int clear_cached_kernels() { return clear_cache(); }

std::vector<std::string> chips() {
  std::vector<std::string> names;
  for (const Chip& chip : known_chips()) names.push_back(chip.name);
  return names;
}

void prebuild(const std::string& name, const std::function<BuiltKernel>& done) {
  const Chip& chip = chip_of({.device = regard::chip(name)});
  build(representative_kernels(chip), chip, done);
}

void prebuild(const std::string& name, const std::vector<PlannedCall>& calls,
              const std::function<BuiltKernel>& done) {
  std::vector<KernelConfig> kernels;
  for (const PlannedCall& call : calls) {
    const Run run{.device = regard::chip(name), .backend = call.backend};
    const std::vector<KernelConfig> of_call = kernels_of_planned(call, run);
    kernels.insert(kernels.end(), of_call.begin(), of_call.end());
  }
  remove_repetitions(kernels);
  build(kernels, chip_of({.device = regard::chip(name)}), done);
}

}  // namespace regard
