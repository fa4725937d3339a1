// `regard bench`: checks each case, then times it; an aligned table and JSON lines.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>

#include "bench_problem.hpp"
#include "command_line/arguments.hpp"
#include "command_line/parse.hpp"
#include "output/json_line.hpp"
#include "output/output.hpp"
#include "output/progress.hpp"
#include "output/table.hpp"
#include "tensors/mirror.hpp"
#include "tensors/timing.hpp"

namespace regard::cli {

namespace {

struct Case {
  std::string name;
  Attention described;
  std::string mask;
};

std::string mask_name(const AttentionFlags& flags) {
  std::string name;
  if (!flags.causal.empty()) name = flags.causal == "top-left" ? "causal top-left" : "causal";
  if (!flags.window.empty()) name += (name.empty() ? "" : " ") + ("window " + flags.window);
  return name.empty() ? "full" : name;
}

std::vector<const char*> preset_shapes(const std::string& preset) {
  if (preset == "gpu") return {"16x16x1024x64", "4x16x4096x64", "8x16x1024x128", "2x16x4096x128"};
  if (preset == "long") return {"1x16x8192x64", "1x8x8192x128", "1x2x16384x128", "1x1x32768x64"};
  if (preset == "short") return {"64x12x16x64", "32x12x64x64", "8x12x128x64", "8x16x256x64"};
  return {"1x16x512x64", "1x16x2048x64", "1x8x2048x128", "1x1x8192x64", "8x12x128x64"};
}

const char* default_types(const BenchArguments& arguments) {
  return arguments.device == "cpu" ? "f32,bf16,f16" : "bf16,f16";
}

std::string preset_of(const BenchArguments& arguments) {
  if (!arguments.preset.empty()) return arguments.preset;
  return arguments.device == "cpu" ? "cpu" : "gpu";
}

std::vector<Case> cases_of(const BenchArguments& arguments) {
  std::vector<Case> cases;
  for (const std::string& type :
       split(arguments.types.empty() ? default_types(arguments) : arguments.types, ',')) {
    parse_type(type, "--type");
    ShapeFlags shape = arguments.shape;
    shape.type = type;
    AttentionFlags flags = arguments.attention;
    if (!shape.q.empty()) {
      cases.push_back({shape.q, described_attention(shape, flags), mask_name(flags)});
      continue;
    }
    for (const char* q : preset_shapes(preset_of(arguments))) {
      shape.q = q;
      for (const char* causal : {"", "bottom-right"}) {
        if (!arguments.attention.causal.empty() && *causal == '\0') continue;
        if (*causal != '\0' && arguments.attention.causal.empty()) flags.causal = causal;
        cases.push_back({q, described_attention(shape, flags), mask_name(flags)});
        flags = arguments.attention;
      }
    }
  }
  return cases;
}

struct Passes {
  bool forward = false, backward = false;
};

Passes passes_of(const std::string& text) {
  Passes passes;
  for (const std::string& word : split(text, ',')) {
    if (word == "forward") {
      passes.forward = true;
    } else if (word == "backward") {
      passes.backward = true;
    } else {
      throw UsageError(
          fmt::format("--passes = \"{}\": must be forward, backward or forward,backward", text));
    }
  }
  return passes;
}

std::string gpu_name(int index) {
  return cuda_setup().devices.at(static_cast<std::size_t>(index)).name;
}

// Median of at least three measurements that together take at least `seconds`, after a run to warm
// up. On a GPU a measurement is of so many runs that their launches do not count.
template <class Work>
double timed(const Device& device, double seconds, Work&& work) {
  work();
  int runs = 1;
  if (device.kind == Device::Kind::cuda) {
    runs = static_cast<int>(std::clamp(0.01 / device_seconds(device, work), 1.0, 1000.0));
  }
  std::vector<double> times;
  double total = 0;
  while (times.size() < 3 || total < seconds) {
    const double taken = device_seconds(device, [&] {
      for (int n = 0; n < runs; ++n) work();
    });
    times.push_back(taken / runs);
    total += taken;
  }
  return median(std::move(times));
}

class Bench {
 public:
  explicit Bench(const BenchArguments& arguments)
      : arguments_(arguments),
        passes_(passes_of(arguments.passes)),
        device_(parse_device(arguments.device)) {
    allow_compilation(!arguments.forbid_compiling);
    const char* const commit = std::getenv("REGARD_COMMIT");
    commit_ = !arguments.commit.empty() ? arguments.commit : commit ? commit : "";
    if (!arguments.json.empty()) {
      json_.open(arguments.json, std::ios::app);
      if (!json_) throw UsageError(fmt::format("--json = {}: cannot be written", arguments.json));
    }
  }

  int run() {
    const std::vector<Case> cases = cases_of(arguments_);
    const std::vector<std::string> backends = split(arguments_.backends, ',');
    for (const Case& one : cases) {
      for (const std::string& backend : backends) refuse_impossible(one, backend);
    }
    Progress progress("benchmark");
    std::size_t done = 0;
    for (const Case& one : cases) {
      for (const std::string& backend : backends) {
        progress.set(fmt::format("{} of {}: {} {} {}", ++done, cases.size() * backends.size(),
                                 one.name, name_of(one.described.q.type), one.mask));
        run_case(one, backend);
      }
    }
    output::print("\n{}", table_.text());
    output::print(
        "\nEach case was first compared with float64: every output at up to 192 keys, 1 "
        "batch, 2 kv heads;\nand out, lse, dq of the last 16 rows of the last head at full "
        "size (full, causal bottom-right, window).\n");
    if (failed_ > 0) output::print("{} cases are wrong and were not timed\n", failed_);
    return failed_ == 0 ? 0 : 1;
  }

 private:
  Run run_on(const std::string& backend) const {
    Run run;
    run.device = device_;
    run.backend = backend;
    run.threads = arguments_.threads;
    return run;
  }

  // What the library refuses, or what no memory holds, is refused before tensors are filled.
  void refuse_impossible(const Case& one, const std::string& backend) const {
    if (passes_.forward) explain(one.described, Pass::forward, run_on(backend));
    if (passes_.backward) explain(one.described, Pass::backward, run_on(backend));
    const double bytes = bytes_needed(one.described, passes_.backward);
    if (bytes <= double(physical_memory())) return;
    throw UsageError(fmt::format("--q = {}: the tensors need {}, more than this machine has",
                                 one.name, bytes_text(bytes)));
  }

  void run_case(const Case& one, const std::string& backend) {
    const Run run = run_on(backend);
    BenchProblem small(shortened(one.described), passes_.backward, device_);
    small.run_forward(run);
    if (passes_.backward) small.run_backward(run);
    small.fetch();
    std::string complaint = small.check_all();
    BenchProblem problem(one.described, passes_.backward, device_);
    problem.run_forward(run);
    if (passes_.backward) problem.run_backward(run);
    problem.fetch();
    if (complaint.empty() && problem.can_check_last_rows()) complaint = problem.check_last_rows();
    if (!complaint.empty()) {
      output::print("WRONG {} {} {} {}: {}\n", one.name, name_of(one.described.q.type), one.mask,
                    backend, complaint);
      ++failed_;
      return;
    }
    if (passes_.forward) {
      const double seconds = timed(device_, arguments_.seconds, [&] { problem.run_forward(run); });
      report(one, problem, Pass::forward, run, seconds);
    }
    if (passes_.backward) {
      const double seconds = timed(device_, arguments_.seconds, [&] { problem.run_backward(run); });
      report(one, problem, Pass::backward, run, seconds);
    }
  }

  void report(const Case& one, const BenchProblem& problem, Pass pass, const Run& run,
              double seconds) {
    const Explanation plan = explain(problem.attention(), pass, run);
    const Type type = one.described.q.type;
    const bool on_gpu = device_.kind == Device::Kind::cuda;
    const double flops = plan.flops / seconds, peak = on_gpu ? 0 : peak_of(type, run);
    const char* const pass_name = pass == Pass::forward ? "forward" : "backward";
    table_.add({one.name, pass_name, name_of(type), one.mask, plan.backend,
                fmt::format("{:.3f}", seconds * 1e3), fmt::format("{:.1f}", flops / 1e9),
                on_gpu ? "-" : fmt::format("{:.0f} %", 100 * flops / peak),
                bytes_text(double(plan.workspace))});
    if (!json_.is_open()) return;
    const Shape shape = shape_of(problem.attention());
    JsonLine sizes, line;
    sizes.integer("B", shape.batch);
    sizes.integer("Hq", shape.heads_q);
    sizes.integer("Hkv", shape.heads_kv);
    sizes.integer("Sq", shape.len_q);
    sizes.integer("Sk", shape.len_k);
    sizes.integer("D", shape.dim);
    sizes.integer("Dv", shape.dim_v);
    line.text("case", one.name);
    line.text("pass", pass_name);
    line.text("backend", plan.backend);
    line.text("type", name_of(type));
    line.object("sizes", sizes);
    line.text("mask", one.mask);
    line.number("ms", seconds * 1e3);
    line.number("gflops", flops / 1e9);
    if (!on_gpu) line.number("peak_gflops", peak / 1e9);
    if (!on_gpu) line.number("share", flops / peak);
    line.count("workspace", plan.workspace);
    if (!on_gpu) line.integer("threads", run.threads > 0 ? run.threads : machine().threads);
    line.text("device", on_gpu ? gpu_name(device_.index) : machine().cpu);
    line.text("commit", commit_);
    json_ << line.str() << "\n" << std::flush;
    if (!json_) throw UsageError(fmt::format("--json = {}: cannot be written", arguments_.json));
  }

  double peak_of(Type type, const Run& run) {
    const auto key = std::pair(run.backend, type);
    const auto found = peaks_.find(key);
    if (found != peaks_.end()) return found->second;
    return peaks_[key] = measured_peak(type, run);
  }

  const BenchArguments& arguments_;
  Passes passes_;
  Device device_;
  std::string commit_;
  std::ofstream json_;
  std::map<std::pair<std::string, Type>, double> peaks_;
  Table table_{
      {"<case", "<pass", "<type", "<mask", "<backend", "ms", "GFLOP/s", "of peak", "workspace"}};
  int failed_ = 0;
};

}  // namespace

int run_bench(const BenchArguments& arguments) { return Bench(arguments).run(); }

}  // namespace regard::cli
