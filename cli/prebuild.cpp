// `regard prebuild`: compiles the usual kernels, or those of recorded calls, for chips that need
// not be in this machine. --check fails where a kernel spills registers, uses a stack or serialises
// its products.
#include <fmt/core.h>

#include <algorithm>

#include "command_line/arguments.hpp"
#include "command_line/parse.hpp"
#include "files/recorded_calls.hpp"
#include "kernel_words.hpp"
#include "known_spills.hpp"
#include "output/output.hpp"
#include "output/progress.hpp"
#include "output/table.hpp"

namespace regard::cli {

namespace {

// NVRTC 13 compiles for no older chip.
std::vector<std::string> current_chips() {
  std::vector<std::string> names = chips();
  names.erase(names.begin(), std::find(names.begin(), names.end(), "sm_75"));
  return names;
}

std::vector<std::string> each_once(const std::vector<std::string>& names) {
  std::vector<std::string> unique;
  for (const std::string& name : names) {
    if (std::find(unique.begin(), unique.end(), name) == unique.end()) unique.push_back(name);
  }
  return unique;
}

std::vector<std::string> chips_of(const std::string& text, const CudaSetup& setup) {
  if (text == "all") return current_chips();
  std::vector<std::string> chips;
  if (!text.empty()) {
    for (const std::string& name : split(text, ',')) {
      if (!name.starts_with("sm_")) {
        throw UsageError(
            fmt::format("--devices = \"{}\": must be chips such as sm_80,sm_90", text));
      }
      chips.push_back(name);
    }
  }
  for (const CudaDevice& device : setup.devices) {
    if (text.empty()) chips.push_back(device.chip);
  }
  if (chips.empty()) {
    throw UsageError("--devices: there is no GPU here; name the chips, for example sm_80,sm_90");
  }
  return each_once(chips);
}

// What to compile: calls for each chip; no calls stand for the usual ones.
struct Wanted {
  std::string chip;
  std::vector<PlannedCall> calls;
};

std::vector<Wanted> wanted_of(const PrebuildArguments& arguments, const CudaSetup& setup) {
  std::vector<Wanted> all;
  std::vector<RecordedCall> recorded;
  if (!arguments.recorded.empty()) recorded = read_recorded_calls(arguments.recorded);
  std::vector<std::string> chips;
  for (const RecordedCall& one : recorded) chips.push_back(one.chip);
  const bool all_calls = recorded.empty() || !arguments.devices.empty();
  for (const std::string& chip :
       all_calls ? chips_of(arguments.devices, setup) : each_once(chips)) {
    Wanted& wanted = all.emplace_back(Wanted{.chip = chip, .calls = {}});
    for (const RecordedCall& one : recorded) {
      if (all_calls || one.chip == chip) wanted.calls.push_back(one.call);
    }
  }
  return all;
}

struct OfChip {
  int kernels = 0, compiled = 0, spilling = 0, known = 0, serialized = 0, failed = 0, registers = 0;
  std::size_t bytes = 0;
  double seconds = 0;
};

class Prebuild {
 public:
  explicit Prebuild(const PrebuildArguments& arguments) : arguments_(arguments) {
    if (!arguments.known.empty()) known_ = read_known_spills(arguments.known);
  }

  int run(const std::vector<Wanted>& all) {
    for (const auto& [name, calls] : all) {
      const std::string& chip = name;  // lambdas capture no binding
      OfChip& of = chips_.emplace_back();
      std::vector<CompiledKernel> kernels;
      Progress progress("compiling for " + chip);
      const auto done = [&](const CompiledKernel& k, int number, int count) {
        progress.set(fmt::format("compiling for {}: {} of {} kernels", chip, number, count));
        kernels.push_back(k);
      };
      try {
        calls.empty() ? prebuild(chip, done) : prebuild(chip, calls, done);
      } catch (const Error&) {
        if (kernels.empty()) throw;  // the failure of a kernel is in its `fault`
      }
      std::sort(kernels.begin(), kernels.end(),
                [](const auto& a, const auto& b) { return a.config < b.config; });
      for (const CompiledKernel& k : kernels) add(k, of);
      summary_.add({chip, std::to_string(of.kernels), std::to_string(of.compiled),
                    fmt::format("{:.1f}", of.seconds), std::to_string(of.registers),
                    bytes_text(double(of.bytes)), std::to_string(of.spilling),
                    std::to_string(of.known), std::to_string(of.serialized),
                    std::to_string(of.failed)});
    }
    return report();
  }

 private:
  // Without --check, a kernel that the cache did not keep is a failure.
  bool all_kept() const {
    if (not_kept_ > 0) {
      output::print("\nNOT KEPT: {} kernels; {}\n", not_kept_, reason_);
    }
    return not_kept_ == 0;
  }

  void add(const CompiledKernel& k, OfChip& of) {
    ++of.kernels;
    if (!k.fault.empty()) {
      ++of.failed;
      output::print("FAILED {}: {}\n", k.chip, joined(kernel_words(k.config)));
      if (of.failed == 1) output::print("{}\n", k.fault);
      return;
    }
    if (!k.not_kept.empty()) {
      ++not_kept_;
      reason_ = k.not_kept;
    }
    if (!k.was_cached) {
      ++of.compiled;
      of.seconds += k.seconds;
    }
    of.registers = std::max(of.registers, k.registers);
    of.bytes += k.bytes;
    const bool spills = k.spill_bytes > 0 || k.stack_bytes > 0;
    const KnownSpill* const known = spills ? known_spill(known_, k) : nullptr;
    of.spilling += spills;
    of.known += known != nullptr;
    if (spills && !known) unknown_.push_back(spill_line(k));
    of.serialized += k.serialized;
    if (k.serialized) serialized_.push_back(k.chip + ": " + joined(kernel_words(k.config)));
    wrong_ += k.serialized || (spills && !known);
    if (arguments_.verbose || (arguments_.check && spills)) {
      kernels_.add({k.chip, std::to_string(k.registers), std::to_string(k.spill_bytes),
                    std::to_string(k.stack_bytes), std::to_string(k.shared_bytes),
                    fmt::format("{:.2f}", k.seconds),
                    "  " + joined(kernel_words(k.config)) +
                        (known ? "  (known: " + known->reason + ")" : std::string())});
      any_kernel_ = true;
    }
  }

  int report() const {
    int failed = 0;
    for (const OfChip& of : chips_) failed += of.failed;
    if (any_kernel_) output::print("{}\n", kernels_.text());
    output::print("{}", summary_.text());
    if (!arguments_.check) return failed == 0 && all_kept() ? 0 : 1;
    for (const KnownSpill& known : known_) {
      if (!known.used) {
        output::print("note: {}:{} covers nothing here: {}\n", arguments_.known, known.line,
                      joined(known.words));
      }
    }
    if (!unknown_.empty()) {
      output::print("\nNot known; mend the kernel, or write into the list with a reason:\n");
    }
    for (const std::string& line : unknown_) output::print("  {}\n", line);
    if (!serialized_.empty()) {
      output::print(
          "\nProducts of warpgroups wait for each other (ptxas: Potential Performance Loss):\n");
    }
    for (const std::string& line : serialized_) output::print("  {}\n", line);
    int kernels = 0;
    for (const OfChip& of : chips_) kernels += of.kernels;
    const int wrong = failed + wrong_;
    output::print("{} passed, {} failed\n", kernels - wrong, wrong);
    return wrong == 0 ? 0 : 1;
  }

  const PrebuildArguments& arguments_;
  std::vector<KnownSpill> known_;
  std::vector<OfChip> chips_;
  std::vector<std::string> unknown_, serialized_;
  int not_kept_ = 0;
  std::string reason_;  // why the cache did not keep them
  int wrong_ = 0;       // kernels of unknown_ or serialized_
  Table kernels_{
      {"<chip", "registers", "spill bytes", "stack bytes", "shared", "seconds", "<  kernel"}};
  bool any_kernel_ = false;
  Table summary_{{"<chip", "kernels", "compiled", "seconds of a core", "most registers", "size",
                  "spilling", "known", "serialized", "failed"}};
};

}  // namespace

int run_prebuild(const PrebuildArguments& arguments) {
  const CudaSetup setup = cuda_setup();
  const std::vector<Wanted> wanted = wanted_of(arguments, setup);
  Prebuild prebuild(arguments);
  if (!setup.has_compiler) throw Error(Code::unavailable, "NVRTC", "missing", setup.compiler);
  const std::string fault = make_kernel_cache();
  output::print("{}\nkernels go to {}\n\n", setup.compiler,
                fault.empty() ? setup.cache : "nowhere: " + fault);
  output::flush();
  if (fault.empty() || arguments.check) return prebuild.run(wanted);
  output::error("kernels cannot be kept: {}", fault);
  return 1;
}

}  // namespace regard::cli
