// The C++ API: describe, plan, run. The only file that knows every backend. Each function computes
// under the default floating-point state.
#include <algorithm>
#include <cmath>
#include <ostream>

#include "cpu/backend.hpp"
#include "cpu/cpuid.hpp"
#include "cpu/processor.hpp"
#include "cuda/backend.hpp"
#include "cuda/planning.hpp"
#include "cuda/record.hpp"
#include "plan/backend.hpp"
#include "plan/cuda/config_text.hpp"
#include "problem/describe.hpp"
#include "problem/mask_contents.hpp"
#include "problem/refuse.hpp"
#include "problem/tensor_checks.hpp"
#include "reference/reference.hpp"
#include "regard/regard.hpp"
#include "system/system.hpp"
#include "threads/float_state.hpp"
#include "threads/threads.hpp"

namespace regard {
namespace {

Choice choice_of(const Run& run) {
  if (!run.backend.empty()) return {run.backend};
  return {system::variable("REGARD_BACKEND")};
}

Plan make_plan(const Problem& problem, const Run& run) {
  require(run.stream == nullptr, "stream", "a stream", "the CPU takes none");
  return plan(problem, cpu_backend::this_processor(), choice_of(run), worker_count(run));
}

Plan make_supported_plan(const Problem& problem, const Run& run) {
  Plan made = make_plan(problem, run);
  if (made.too_large) refuse("workspace", to_string(problem), made.refusal, Code::unsupported);
  if (!made.supported()) {
    refuse(run.backend.empty() ? "REGARD_BACKEND" : "backend", choice_of(run).name, made.refusal,
           Code::unavailable);
  }
  return made;
}

// The CPU: vector kernels, or the float64 reference where it is asked for by name.
class CpuBackend final : public Backend {
 public:
  bool reads_tables() const override { return true; }

  int64 workspace(const Problem& problem, const Run& run) const override {
    return make_supported_plan(problem, run).workspace.size;
  }

  void run(const Problem& problem, const MadeMaps*, const Run& run) const override {
    const Plan plan = make_supported_plan(problem, run);
    if (plan.backend == BackendKind::reference) {
      problem.backward ? reference::backward(problem, run) : reference::forward(problem, run);
    } else {
      problem.backward ? cpu_backend::backward(problem, plan, run)
                       : cpu_backend::forward(problem, plan, run);
    }
  }

  Explanation explain(const Problem& problem, const MadeMaps*, const Run& run) const override {
    const Plan plan = make_plan(problem, run);
    Explanation e;
    e.supported = plan.supported();
    e.backend = plan.name;
    e.kernel = kernel_line(problem, plan);
    e.text = explanation(problem, plan);
    e.workspace = static_cast<std::size_t>(plan.workspace.size);
    return e;
  }

  // Kernels look at masks as they go.
  int64 mask_memory(const Problem&, const Run&) const override { return 0; }
  std::shared_ptr<const MadeMaps> make_maps(const Problem&, const Workspace&,
                                            const Run&) const override {
    return nullptr;
  }
};

const Backend& backend_of(const Run& run) {
  require(run.multiprocessors >= 0, "multiprocessors", run.multiprocessors,
          "must be 0 (all) or more");
  static constinit const CpuBackend cpu;
  return cuda_backend::on_gpu(run) ? cuda_backend::gpu() : cpu;
}

// Those of the call's Mask, which must be for the call's device; null without one.
const MadeMaps* maps_for(const Attention& a, const Run& run) {
  if (!a.visible.given()) return nullptr;
  check_made_on(a.visible, run.device);
  return MaskContents::of(a.visible)->maps.get();
}

// A problem and the backend that it is for, with what the problem reads of the caller's tables.
class Call {
 public:
  template <class Describe>
  Call(const Attention& a, const Run& run, const Describe& describe)
      : run_(run),
        backend_(backend_of(run)),
        maps_(maps_for(a, run)),
        problem_(describe(backend_.reads_tables() ? &copies_ : nullptr)) {}

  void compute() const { backend_.run(problem_, maps_, run_); }

  std::size_t workspace() const {
    return static_cast<std::size_t>(backend_.workspace(problem_, run_));
  }

  Explanation explain() const {
    const double dim = double(problem_.sizes.dim), dim_v = double(problem_.sizes.dim_v);
    Explanation e = backend_.explain(problem_, maps_, run_);
    e.pairs = interval_pairs(problem_);
    e.flops = e.pairs * 2 * (problem_.backward ? 3 * dim + 2 * dim_v : dim + dim_v);
    return e;
  }

  std::size_t mask_memory() const {
    return static_cast<std::size_t>(backend_.mask_memory(problem_, run_));
  }

  Mask make_mask(const Attention& a, const Workspace& memory) const {
    return MaskContents::to_mask({.mask = a.mask,
                                  .row_spans = a.row_spans,
                                  .key_spans = a.key_spans,
                                  .sizes = problem_.sizes,
                                  .packed = problem_.packed,
                                  .device = run_.device,
                                  .maps = backend_.make_maps(problem_, memory, run_)});
  }

 private:
  const DefaultFloatState floats_;
  const Run& run_;
  const Backend& backend_;
  const MadeMaps* const maps_;
  TableCopies copies_;
  const Problem problem_;
};

Call call_of(const Attention& a, Pass pass, const Run& run) {
  return {a, run,
          [&](TableCopies* copies) { return describe(a, pass, NullData::allowed, copies); }};
}
Call call_of(const Attention& a, const ForwardOutputs& to, const Run& run) {
  return {a, run, [&](TableCopies* copies) { return describe_forward(a, to, copies); }};
}
Call call_of(const Attention& a, const BackwardInputs& from, const Gradients& to, const Run& run) {
  return {a, run, [&](TableCopies* copies) { return describe_backward(a, from, to, copies); }};
}
Call mask_of(const Attention& a, NullData nulls, const Run& run) {
  return {a, run, [&](TableCopies* copies) { return describe_mask(a, nulls, copies); }};
}

// keep: (B, Hq, Sq, Sk).
void write_keep(const Attention& a, const Tensor& keep_tensor) {
  const DefaultFloatState floats;
  TableCopies copies;
  const Problem p = describe(a, Pass::forward, NullData::allowed, &copies);
  check_data("q_positions", a.q_positions);
  const View view = describe_keep(p, keep_tensor);
  const Sizes& s = p.sizes;
  if (s.len_k == 0) return;
  const Run run;
  parallel_tasks(s.batch * s.heads_q * s.len_q, worker_count(run), run, [&](int64 row, int) {
    const int64 i = row % s.len_q, h = row / s.len_q % s.heads_q, b = row / s.len_q / s.heads_q;
    const int64 first = offset_of(view.strides, b, h, 0, i);
    const Positions at = positions_of(p.sequences, b);
    for (int64 j = 0; j < s.len_k; ++j) {
      static_cast<uint8*>(view.data)[first + j * view.strides.column] =
          keep(p.dropout, at, b, h, i, j);
    }
  });
}

}  // namespace

void forward(const Attention& a, const ForwardOutputs& to, const Run& run) {
  with_memory_errors([&] {
    call_of(a, to, run).compute();
    if (cuda_backend::is_recorded(run)) {
      cuda_backend::record({.attention = a,
                            .outputs = to,
                            .backend = run.backend,
                            .gradients_follow = run.gradients_follow},
                           run);
    }
  });
}

void backward(const Attention& a, const BackwardInputs& from, const Gradients& to, const Run& run) {
  with_memory_errors([&] {
    call_of(a, from, to, run).compute();
    if (cuda_backend::is_recorded(run)) {
      cuda_backend::record({.pass = Pass::backward,
                            .attention = a,
                            .inputs = from,
                            .gradients = to,
                            .backend = run.backend},
                           run);
    }
  });
}

std::size_t workspace(const Attention& a, Pass pass, const Run& run) {
  return with_memory_errors([&] { return call_of(a, pass, run).workspace(); });
}

std::size_t workspace(const Attention& a, const ForwardOutputs& to, const Run& run) {
  return with_memory_errors([&] { return call_of(a, to, run).workspace(); });
}

std::size_t workspace(const Attention& a, const BackwardInputs& from, const Gradients& to,
                      const Run& run) {
  return with_memory_errors([&] { return call_of(a, from, to, run).workspace(); });
}

Explanation explain(const Attention& a, Pass pass, const Run& run) {
  return with_memory_errors([&] { return call_of(a, pass, run).explain(); });
}

std::ostream& operator<<(std::ostream& out, const Explanation& e) { return out << e.text; }

std::size_t mask_memory(const Attention& a, const Run& run) {
  return with_memory_errors([&] { return mask_of(a, NullData::allowed, run).mask_memory(); });
}

Mask make_mask(const Attention& a, const Workspace& memory, const Run& run) {
  return with_memory_errors(
      [&] { return mask_of(a, NullData::outside_masks, run).make_mask(a, memory); });
}

void dropout_mask(const Attention& a, const Tensor& keep_tensor) {
  with_memory_errors([&] { write_keep(a, keep_tensor); });
}

double dropout_probability(double p) {
  const DefaultFloatState floats;
  require(p >= 0 && p < 1, "p", p, "must be in [0, 1)");
  return realised_probability(dropout_params(p, 0, 0));
}

std::vector<BackendInfo> backends() {
  const Processor& processor = cpu_backend::this_processor();
  constexpr const char* notes[] = {
      "any processor, one element at a time",
      "NEON, on every aarch64: 4 floats at a time",
      "AVX2, FMA and F16C: 8 floats at a time",
      "AVX-512 (F, BW, DQ, VL): 16 floats at a time",
      "AVX512-BF16: dot products of bf16; other types as cpu:avx512",
      "AMX: tile products of bf16, and of f16 by two terms; else as cpu:avx512"};
  static_assert(std::size(notes) == kIsaCount);
  std::vector<BackendInfo> list;
  for (int i = kIsaCount - 1; i >= 0; --i) {
    const auto& usable = processor.usable;
    const bool available = std::find(usable.begin(), usable.end(), Isa(i)) != usable.end();
    std::string note = notes[i];
    if (!available) note += " - " + cpu_backend::missing(Isa(i));
    if (available && multiplies_bf16(Isa(i))) {
      const bool pays = Isa(i) == Isa::amx ? processor.amx_pays : processor.bf16_dot_pays;
      note += pays ? " (faster than f32 FMA here)" : " (slower than f32 FMA here)";
    }
    list.push_back({std::string("cpu:") + name_of(Isa(i)), available, note});
  }
  list.push_back(
      {"reference", true, "the textbook in float64, row by row: the judge of the others"});
  for (const Family family : {Family::wgmma, Family::mma, Family::simt}) {
    std::string note =
        family == Family::wgmma ? "warpgroups of GPUs of compute capability 9.0 (H100, H200)"
        : family == Family::mma ? "tensor cores of GPUs from compute capability 7.5 on"
                                : "any GPU; f64, and what tensor cores do not take";
    const std::string missing = cuda_backend::missing(family);
    if (!missing.empty()) note += " - " + missing;
    list.push_back({std::string("cuda:") + name_of(family), missing.empty(), note});
  }
  return list;
}

Machine machine() {
  Machine m;
  m.cpu = cpu_backend::processor_name();
  for (Isa isa : cpu_backend::this_processor().usable) m.isa.push_back(name_of(isa));
  m.threads = worker_count({});
  m.l1 = system::cache_size(1);
  m.l2 = system::cache_size(2);
  m.l3 = system::cache_size(3);
  return m;
}

double measured_peak(Type type, const Run& run) {
  const DefaultFloatState floats;
  require(!cuda_backend::on_gpu(run), "device", cuda_backend::device_name(run),
          "only the CPU's peak can be measured");
  const Tensor shape(nullptr, type, {1, 1, 1, 1});
  const Problem problem =
      describe({.q = shape, .k = shape, .v = shape}, Pass::forward, NullData::allowed);
  const Plan plan = make_supported_plan(problem, run);
  require(plan.backend == BackendKind::cpu, "backend", plan.name, "has no instruction to measure");
  return cpu_backend::measured_peak(problem, plan, run);
}

const char* version() { return REGARD_VERSION; }

}  // namespace regard
