// Runs one random problem and compares every output with float64.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "verify/random_problem.hpp"

namespace regard::cli {

inline constexpr std::array kOutputNames{"out", "lse", "dq", "dk", "dv", "dbias", "dsink"};

struct Verdict {
  std::array<double, kOutputNames.size()> ratios{};  // worst error / tolerance; 0 = not computed
  std::array<bool, kOutputNames.size()> compared{};
  std::vector<std::string> complaints;  // empty: passed
  std::string left_out;                 // why a GPU's kernels do not take the problem
};

// Runs the problem on `run`'s device and backend and judges every output. run.threads 0: as the
// problem says.
Verdict judge(RandomProblem& problem, Run run);

}  // namespace regard::cli
