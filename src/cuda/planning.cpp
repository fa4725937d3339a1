// Reads what is forced, finds the chip, plans.
#include "cuda/planning.hpp"

#include "cuda/backend.hpp"
#include "cuda/environment.hpp"
#include "cuda/mask_maps.hpp"
#include "plan/cuda/possible_calls.hpp"
#include "problem/describe.hpp"
#include "problem/mask_contents.hpp"
#include "problem/refuse.hpp"

namespace regard::cuda_backend {
namespace {

const char* who_forces(const Run& run) {
  return run.backend.empty() ? "REGARD_BACKEND" : "backend";
}

CudaChoice choice_of(const Run& run) {
  const std::string name = forced_backend(run);
  CudaChoice choice;
  std::string why_not;
  if (!name.empty() && !name.starts_with("cuda")) {
    refuse(who_forces(run), name, "is for the CPU, and the device is " + device_name(run),
           Code::unavailable);
  }
  if (!parse_cuda_choice(name, choice, why_not)) {
    refuse(who_forces(run), name, why_not, Code::unavailable);
  }
  choice.multiprocessors = run.multiprocessors;
  return choice;
}

// Of the plan's problem and of the calls that it may become.
int64 most_workspace(const CudaPlan& plan, const Problem& problem, const Run& run) {
  int64 most = plan.workspace.size;
  for (const Problem& call : possible_calls(problem)) {
    most = larger(most, make_plan(call, run, Reasons::left_out).workspace.size);
  }
  return most;
}

class GpuBackend final : public Backend {
 public:
  // They are in the memory of the device.
  bool reads_tables() const override { return false; }

  int64 workspace(const Problem& problem, const Run& run) const override {
    return most_workspace(make_supported_plan(problem, run), problem, run);
  }

  void run(const Problem& problem, const MadeMaps* maps, const Run& run) const override {
    cuda_backend::run(problem, maps, run);
  }

  Explanation explain(const Problem& problem, const MadeMaps* maps, const Run& run) const override {
    const Chip& chip = chip_of(run);
    CudaPlan plan = make_plan(problem, run, Reasons::given);
    if (maps) explain_made_map(problem, *maps, plan);
    Explanation e;
    e.supported = plan.supported();
    e.backend = plan.supported() ? plan.name() : "";
    e.kernel = cuda_kernel_line(plan);
    e.text = cuda_explanation(problem, chip, plan) + resources_text(plan, chip);
    if (plan.supported()) e.workspace = std::size_t(most_workspace(plan, problem, run));
    return e;
  }

  int64 mask_memory(const Problem& forward, const Run& run) const override {
    return cuda_backend::mask_memory(forward, run);
  }

  std::shared_ptr<const MadeMaps> make_maps(const Problem& forward, const Workspace& memory,
                                            const Run& run) const override {
    return cuda_backend::make_maps(forward, memory, run);
  }
};

}  // namespace

bool on_gpu(const Run& run) {
  const auto& [kind, index, name] = run.device;
  require(kind <= Device::Kind::chip, "device", int(kind), "is no such kind of device");
  if (kind == Device::Kind::cuda && index < 0) {
    refuse("device", device_name(run), "must be a GPU from cuda(0) on");
  }
  require(kind != Device::Kind::chip || !name.empty(), "device", "chip(\"\")",
          "must have the name of a chip, as \"sm_80\"");
  return kind != Device::Kind::cpu;
}

std::string forced_backend(const Run& run) {
  return run.backend.empty() ? backend_variable() : run.backend;
}

std::string device_name(const Run& run) { return to_string(run.device); }

const Chip& chip_of(const Run& run) {
  if (run.device.kind == Device::Kind::cuda) return this_chip(run.device.index);
  const Chip* const chip = chip_named(run.device.name);
  if (!chip) {
    std::string names;
    for (const Chip& known : known_chips()) names += (names.empty() ? "" : ", ") + known.name;
    refuse("device", run.device.name, "is no known chip; known are " + names, Code::unavailable);
  }
  return *chip;
}

CudaPlan make_plan(const Problem& problem, const Run& run, Reasons reasons) {
  return plan_cuda(problem, chip_of(run), choice_of(run), reasons);
}

CudaPlan make_supported_plan(const Problem& problem, const Run& run) {
  CudaPlan made = make_plan(problem, run, Reasons::left_out);
  if (made.too_large) refuse("workspace", to_string(problem), made.refusal, Code::unsupported);
  if (!made.supported()) {
    const std::string forced = forced_backend(run);
    refuse(forced.empty() ? "device" : who_forces(run), forced.empty() ? device_name(run) : forced,
           made.refusal, Code::unsupported);
  }
  return made;
}

std::vector<KernelConfig> kernels_to_load(const CudaPlan& plan, const Problem& problem,
                                          const Run& run) {
  std::vector<KernelConfig> configs = configs_of(plan);
  if (problem.backward || !run.gradients_follow) return configs;
  Problem p = with_gradients(problem);
  for (const View& dbias : {View(), p.bias}) {
    p.dbias = dbias;
    const CudaPlan gradients = make_plan(p, run, Reasons::left_out);
    if (!gradients.supported()) continue;
    for (const CudaLaunch& launch : gradients.launches) configs.push_back(launch.config);
  }
  return configs;
}

const Backend& gpu() {
  static constinit const GpuBackend backend;
  return backend;
}

}  // namespace regard::cuda_backend
