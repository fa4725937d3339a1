// `regard check`: draws problems until the count or the time is reached; prints how to repeat a
// failure, a table of the worst ratios, and a last line "N passed, M failed".
#include <fmt/core.h>

#include <algorithm>

#include "command_line/arguments.hpp"
#include "command_line/parse.hpp"
#include "output/progress.hpp"
#include "output/table.hpp"
#include "tensors/mirror.hpp"
#include "verify/ahead.hpp"
#include "verify/judge.hpp"

namespace regard::cli {

namespace {

struct Worst {
  double ratio = 0;
  std::uint64_t problem = 0;
  std::uint64_t compared = 0;
};

struct Tally {
  std::array<Worst, kOutputNames.size()> worst;
  std::uint64_t passed = 0, failed = 0, left_out = 0;
  std::string why_left_out;  // the first time

  void add(const Verdict& verdict, std::uint64_t index) {
    if (!verdict.left_out.empty()) {
      if (++left_out == 1) why_left_out = verdict.left_out;
      return;
    }
    ++(verdict.complaints.empty() ? passed : failed);
    for (std::size_t n = 0; n < worst.size(); ++n) {
      if (!verdict.compared[n]) continue;
      ++worst[n].compared;
      if (verdict.ratios[n] > worst[n].ratio) {
        worst[n].ratio = verdict.ratios[n];
        worst[n].problem = index;
      }
    }
  }

  std::string table() const {
    Table table({"<output", "problems", "worst error / tolerance", "in problem"});
    for (std::size_t n = 0; n < worst.size(); ++n) {
      if (worst[n].compared == 0) continue;
      table.add({kOutputNames[n], std::to_string(worst[n].compared),
                 fmt::format("{:.3g}", worst[n].ratio), std::to_string(worst[n].problem)});
    }
    return table.text();
  }
};

// Runs the smallest problem, so that an unknown or missing backend is the library's own refusal.
std::string chosen_backend(const CheckArguments& arguments, Run run) {
  const Array one(f32, {1, 1, 1, 1}), out(f32, {1, 1, 1, 1});
  Mirror mirror(run.device);
  for (const Array* array : {&one, &out}) mirror.add(array->data(), array->byte_count());
  mirror.upload();
  Attention small;
  small.q = small.k = small.v = one.tensor();
  const Attention there = mirror.at(small);
  const ForwardOutputs outputs = mirror.at(ForwardOutputs{.out = out.tensor(), .lse = {}});
  try {
    run.workspace = mirror.workspace(workspace(there, outputs, run));
    forward(there, outputs, run);
  } catch (const Error& error) {
    if (error.code() != Code::unsupported) throw;  // of other problems it may be capable
  }
  const bool on_cpu = run.device.kind == Device::Kind::cpu;
  const std::string name = run.backend.empty() ? "the default backend" : run.backend;
  return on_cpu ? name : fmt::format("{} on {}", name, arguments.device);
}

std::string repeat_command(const CheckArguments& arguments, std::uint64_t index) {
  std::string command = "regard check";
  if (arguments.device != "cpu") command += " --device " + arguments.device;
  if (!arguments.backend.empty()) command += " --backend " + arguments.backend;
  command += fmt::format(" --seed {} --problem {}", arguments.seed, index);
  if (!arguments.type.empty()) command += " --type " + arguments.type;
  if (arguments.max_len != 4000) command += fmt::format(" --max-len {}", arguments.max_len);
  if (arguments.threads > 0) command += fmt::format(" --threads {}", arguments.threads);
  return command;
}

}  // namespace

int run_check(const CheckArguments& arguments) {
  ProblemLimits limits;
  if (!arguments.type.empty()) limits.type = parse_type(arguments.type, "--type");
  limits.max_len = arguments.max_len;
  Run run;
  run.device = parse_device(arguments.device);
  run.backend = arguments.backend;
  run.threads = arguments.threads;
  allow_compilation(!arguments.forbid_compiling);
  const std::string name = chosen_backend(arguments, run);
  const bool single = arguments.problem >= 0;
  const std::int64_t first = single ? arguments.problem : 0;
  std::int64_t last = arguments.problems > 0 ? arguments.problems : INT64_MAX;
  if (single) last = first + 1;
  double seconds = arguments.seconds;
  if (seconds <= 0 && last == INT64_MAX) seconds = 60;

  fmt::print("{} against float64: seed {}\n", name, arguments.seed);
  std::fflush(stdout);
  Tally tally;
  Progress progress("checking");
  Ahead ahead({.seed = arguments.seed, .first = first, .last = last}, limits, run,
              arguments.threads);
  for (std::int64_t index = first; index < last; ++index) {
    if (seconds > 0 && progress.seconds() >= seconds) break;
    const auto number = static_cast<std::uint64_t>(index);
    RandomProblem problem = ahead.next();
    if (single || arguments.verbose) fmt::print("problem {}: {}\n", index, problem.description);
    Verdict verdict;
    bool device_failed = false;
    try {
      verdict = judge(problem, run);
    } catch (const Error& error) {
      if (error.code() != Code::device_failure) throw;
      verdict.complaints.push_back(error.what());
      device_failed = true;  // it may not answer again
    }
    tally.add(verdict, number);
    if (!verdict.complaints.empty()) {
      fmt::print("FAILED problem {}: {}\n", index, problem.description);
      for (const std::string& complaint : verdict.complaints) fmt::print("  {}\n", complaint);
      fmt::print("  repeat: {}\n", repeat_command(arguments, number));
      std::fflush(stdout);
    }
    progress.set(last == INT64_MAX
                     ? fmt::format("checking: {} problems, {} failed", index + 1, tally.failed)
                     : fmt::format("checking: {} of {} problems, {} failed", index - first + 1,
                                   last - first, tally.failed));
    if (device_failed) break;
  }
  fmt::print("{}", tally.table());
  if (tally.left_out > 0) {
    fmt::print("{} left out, the first because {}\n", tally.left_out, tally.why_left_out);
  }
  fmt::print("{} passed, {} failed\n", tally.passed, tally.failed);
  return tally.failed == 0 ? 0 : 1;
}

}  // namespace regard::cli
