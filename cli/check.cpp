// `regard check`: draws problems until the count or the time is reached; prints how to repeat a
// failure, a table of the worst ratios, and a last line "N passed, M failed".
#include <fmt/core.h>

#include <algorithm>

#include "command_line/arguments.hpp"
#include "command_line/parse.hpp"
#include "output/json.hpp"
#include "output/output.hpp"
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

  std::vector<Json> json() const {
    std::vector<Json> list;
    for (std::size_t n = 0; n < worst.size(); ++n) {
      if (worst[n].compared == 0) continue;
      list.push_back(Fields{{"output", kOutputNames[n]},
                            {"problems", worst[n].compared},
                            {"ratio", worst[n].ratio},
                            {"problem", worst[n].problem}});
    }
    return list;
  }
};

// Runs the smallest problem, so that the library refuses an unknown or missing backend.
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
    if (error.code() != Code::unsupported) throw;  // the backend may take other problems
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

// Prints as it goes, or all at finish() as one JSON object.
class CheckReport {
 public:
  CheckReport(const CheckArguments& arguments, const std::string& backend)
      : arguments_(arguments), backend_(backend) {
    if (arguments.json) return;
    output::print("{} against float64: seed {}\n", backend, arguments.seed);
    output::flush();
  }

  void begin(std::uint64_t index, const RandomProblem& problem) const {
    if (arguments_.json || !(arguments_.verbose || arguments_.problem >= 0)) return;
    output::print("problem {}: {}\n", index, problem.description);
  }

  void fail(std::uint64_t index, const RandomProblem& problem, const Verdict& verdict) {
    const std::string repeat = repeat_command(arguments_, index);
    if (arguments_.json) {
      failures_.push_back(Fields{{"problem", index},
                                 {"description", problem.description},
                                 {"complaints", verdict.complaints},
                                 {"repeat", repeat}});
      return;
    }
    output::print("FAILED problem {}: {}\n", index, problem.description);
    for (const std::string& complaint : verdict.complaints) output::print("  {}\n", complaint);
    output::print("  repeat: {}\n", repeat);
    output::flush();
  }

  void finish(const Tally& tally) {
    if (arguments_.json) {
      const Json all =
          Fields{{"backend", backend_},    {"seed", arguments_.seed},    {"passed", tally.passed},
                 {"failed", tally.failed}, {"left_out", tally.left_out}, {"failures", failures_},
                 {"worst", tally.json()}};
      output::print("{}\n", all.text());
      return;
    }
    output::put(tally.table());
    if (tally.left_out > 0) {
      output::print("{} left out, the first because {}\n", tally.left_out, tally.why_left_out);
    }
    output::print("{} passed, {} failed\n", tally.passed, tally.failed);
  }

 private:
  const CheckArguments& arguments_;
  const std::string backend_;
  std::vector<Json> failures_;
};

struct Limit {
  std::int64_t first = 0, last = INT64_MAX;
  double seconds = 0;  // 0 = none
};

Limit limit_of(const CheckArguments& arguments) {
  Limit limit;
  if (arguments.problem >= 0) {
    limit.first = arguments.problem;
    limit.last = limit.first + 1;
  } else if (arguments.problems > 0) {
    limit.last = arguments.problems;
  }
  limit.seconds = arguments.seconds;
  if (limit.seconds <= 0 && limit.last == INT64_MAX) limit.seconds = 60;
  return limit;
}

std::string progress_text(const Limit& limit, std::int64_t done, std::uint64_t failed) {
  return limit.last == INT64_MAX ? fmt::format("checking: {} problems, {} failed", done, failed)
                                 : fmt::format("checking: {} of {} problems, {} failed", done,
                                               limit.last - limit.first, failed);
}

}  // namespace

int run_check(const CheckArguments& arguments) {
  if (arguments.problem >= 0 && arguments.problems > 0) {
    throw UsageError(fmt::format("--problem = {}: is one problem alone; leave out --problems",
                                 arguments.problem));
  }
  ProblemLimits limits;
  if (!arguments.type.empty()) limits.type = parse_type(arguments.type, "--type");
  limits.max_len = arguments.max_len;
  Run run;
  run.device = parse_device(arguments.device);
  run.backend = arguments.backend;
  run.threads = arguments.threads;
  allow_compilation(!arguments.forbid_compiling);
  CheckReport report(arguments, chosen_backend(arguments, run));
  const Limit limit = limit_of(arguments);
  Tally tally;
  Progress progress("checking");
  Ahead ahead({.seed = arguments.seed, .first = limit.first, .last = limit.last}, limits, run,
              arguments.threads);
  bool device_failed = false;  // a failed device may not answer again
  for (std::int64_t index = limit.first; index < limit.last && !device_failed; ++index) {
    if (limit.seconds > 0 && progress.seconds() >= limit.seconds) break;
    const auto number = static_cast<std::uint64_t>(index);
    RandomProblem problem = ahead.next();
    report.begin(number, problem);
    Verdict verdict;
    try {
      verdict = judge(problem, run);
    } catch (const Error& error) {
      if (error.code() != Code::device_failure) throw;
      verdict.complaints.push_back(error.what());
      device_failed = true;
    }
    tally.add(verdict, number);
    if (!verdict.complaints.empty()) report.fail(number, problem, verdict);
    progress.set(progress_text(limit, index - limit.first + 1, tally.failed));
  }
  report.finish(tally);
  if (tally.passed + tally.failed + tally.left_out == 0) {
    output::error("--seconds = {}: is over before the first problem; give more", limit.seconds);
    return 1;
  }
  return tally.failed == 0 ? 0 : 1;
}

}  // namespace regard::cli
