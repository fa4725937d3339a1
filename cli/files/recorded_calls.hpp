// What a run with REGARD_RECORD wrote down: calls, one JSON object a line.
#pragma once

#include <regard/cuda.hpp>
#include <string>
#include <vector>

namespace regard::cli {

struct RecordedCall {
  std::string chip;  // "sm_90"
  PlannedCall call;
};

// Refuses a file that is not as the library writes it, naming the line and the field. Skips empty
// lines.
std::vector<RecordedCall> read_recorded_calls(const std::string& path);

}  // namespace regard::cli
