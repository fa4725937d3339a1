// `regard check`: random problems, the chosen backend against float64.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "random_problem.hpp"

namespace regard::cli {

inline constexpr std::array kOutputNames{"out", "lse", "dq", "dk", "dv", "dbias", "dsink"};

struct Verdict {
  std::array<double, kOutputNames.size()> ratios{};  // worst error / tolerance; 0 = not computed
  std::array<bool, kOutputNames.size()> compared{};
  std::vector<std::string> complaints;  // empty: passed
};

// Runs the problem on the backend and judges every output. threads 0: as the problem says.
Verdict judge(const RandomProblem& problem, const std::string& backend, int threads);

}  // namespace regard::cli
