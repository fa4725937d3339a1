// The C++ API of the library over the emulated GPU, in place of src/api.cpp: so that whatever tests
// the library through its C or C++ API tests the GPU's plans and kernels on any machine.
//
// Backends: "reference", and "emulated:<choice>[+<chip>][+<order>][+<seed>]" with <choice> as after
// "cuda:" ("mma", "simt", "mma75@rows=32", ...), a chip as "sm_80" and an order of warps.
#include <cstdlib>
#include <ostream>

#include "problem/describe.hpp"
#include "problem/given_memory.hpp"
#include "problem/mask_contents.hpp"
#include "problem/refuse.hpp"
#include "reference/reference.hpp"
#include "regard/regard.hpp"
#include "tests/cuda/emulator.hpp"

namespace regard {
namespace {

struct EmulatedRun {
  CudaChoice choice;
  const Chip* chip = nullptr;
  emulated::Schedule schedule;
};

std::string name_of(const Run& run) {
  const char* const forced = std::getenv("REGARD_BACKEND");
  if (!run.backend.empty()) return run.backend;
  return forced && *forced ? forced : "emulated:mma";
}

EmulatedRun parse(const std::string& name, int multiprocessors) {
  constexpr char kPrefix[] = "emulated";
  require(name.rfind(kPrefix, 0) == 0, "backend", name, "is not an emulated one");
  std::string rest = name.substr(sizeof kPrefix - 1);
  EmulatedRun run;
  run.chip = chip_named("sm_86");
  std::string choice = rest.substr(0, rest.find('+'));
  while (rest.find('+') != rest.npos) {
    rest = rest.substr(rest.find('+') + 1);
    const std::string word = rest.substr(0, rest.find('+'));
    if (word == "forward") continue;
    if (word == "backward") {
      run.schedule.order = emulated::Order::backward;
    } else if (word == "mixed") {
      run.schedule.order = emulated::Order::mixed;
    } else if (word.rfind("sm_", 0) == 0) {
      run.chip = chip_named(word);
      require(run.chip != nullptr, "backend", name, "names no chip that is known");
    } else {
      run.schedule.seed = std::strtoull(word.c_str(), nullptr, 10);
    }
  }
  std::string why_not;
  if (!parse_cuda_choice("cuda" + choice, run.choice, why_not)) refuse("backend", name, why_not);
  run.choice.multiprocessors = multiprocessors;
  return run;
}

CudaPlan planned(const Problem& problem, const EmulatedRun& run, const std::string& name) {
  CudaPlan plan = plan_cuda(problem, *run.chip, run.choice, Reasons::given);
  if (!plan.refusal.empty()) refuse("backend", name, plan.refusal, Code::unavailable);
  return plan;
}

// The emulated machine's faults come out as internal errors.
void emulate(const Problem& problem, const Run& run) {
  const std::string name = name_of(run);
  const EmulatedRun how = parse(name, run.multiprocessors);
  try {
    const CudaPlan plan = planned(problem, how, name);
    if (is_given(run.workspace)) check_given(run.workspace, plan.workspace.size);
    emulated::emulate(problem, plan, how.schedule, run.workspace.data);
  } catch (const emulated::Fault& fault) {
    throw Error(Code::internal, "kernel", name, fault.what());
  }
}

}  // namespace

void forward(const Attention& a, const ForwardOutputs& to, const Run& run) {
  if (run.backend == "reference") return reference::forward(describe_forward(a, to), run);
  emulate(describe_forward(a, to), run);
}

void backward(const Attention& a, const BackwardInputs& from, const Gradients& to, const Run& run) {
  if (run.backend == "reference") return reference::backward(describe_backward(a, from, to), run);
  emulate(describe_backward(a, from, to), run);
}

std::size_t workspace(const Attention& a, Pass pass, const Run& run) {
  const std::string name = name_of(run);
  return static_cast<std::size_t>(
      planned(describe(a, pass, NullData::allowed), parse(name, run.multiprocessors), name)
          .workspace.size);
}

// Each call makes its own tile map, as where a Mask has none for the call.
std::size_t mask_memory(const Attention&, const Run&) { return 0; }
Mask make_mask(const Attention& a, const Workspace&, const Run& run) {
  const Problem p = describe_mask(a, NullData::outside_masks);
  return MaskContents::to_mask({.mask = a.mask,
                                .row_spans = a.row_spans,
                                .key_spans = a.key_spans,
                                .sizes = p.sizes,
                                .packed = p.packed,
                                .device = run.device});
}

Explanation explain(const Attention& a, Pass pass, const Run& run) {
  const std::string name = name_of(run);
  const EmulatedRun how = parse(name, run.multiprocessors);
  const Problem problem = describe(a, pass, NullData::allowed);
  const CudaPlan plan = planned(problem, how, name);
  return {.supported = true, .text = cuda_explanation(problem, *how.chip, plan)};
}
std::ostream& operator<<(std::ostream& out, const Explanation& e) { return out << e.text; }

void dropout_mask(const Attention&, const Tensor& keep) {
  refuse("keep", keep, "an emulated GPU writes no mask", Code::unavailable);
}
double dropout_probability(double p) { return realised_probability(dropout_params(p, 0, 0)); }

std::vector<BackendInfo> backends() {
  return {{"emulated:mma", true, "the GPU's matrix kernels on the emulated machine"},
          {"emulated:simt", true, "the GPU's scalar kernels on the emulated machine"},
          {"reference", true, "the textbook in float64"}};
}

Machine machine() { return {}; }
double measured_peak(Type, const Run&) { return 0; }
const char* version() { return "0.2.0"; }

}  // namespace regard
