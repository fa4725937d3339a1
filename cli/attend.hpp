// What `regard attend` computed, for its two halves: running and comparing.
#pragma once

#include "attend_inputs.hpp"
#include "verify/unfused.hpp"

namespace regard::cli {

struct AttendResults {
  Array out, lse, dq, dk, dv, dbias, dsink;  // in the file's shapes
  double forward_seconds = 0, backward_seconds = 0;
  std::size_t workspace = 0;
};

// Prints errors against float64, and time and memory, ours beside an unfused computation.
void compare_with_unfused(const AttendInputs& inputs, const AttendResults& results,
                          const AttendArguments& arguments);

}  // namespace regard::cli
