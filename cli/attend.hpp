// The results of `regard attend`, which its parts compute, compare, report and write.
#pragma once

#include <optional>
#include <vector>

#include "attend_inputs.hpp"
#include "output/json.hpp"
#include "verify/comparison.hpp"

namespace regard::cli {

struct TimedPass {
  const char* name;
  Explanation plan;
  double seconds = 0;
};

struct AttendResults {
  Array out, lse, dq, dk, dv, dbias, dsink;  // in the file's shapes; gradients if asked for
  std::vector<TimedPass> passes;             // forward, then backward if asked for

  double forward_seconds() const { return passes[0].seconds; }
  double both_seconds() const { return passes[0].seconds + passes.back().seconds; }
  std::size_t workspace() const;  // the larger one
};

// Errors of the library and of an unfused computation against float64, and the latter's time and
// memory.
struct UnfusedComparison {
  struct Line {
    const char* output;
    PlainError ours;
    std::optional<PlainError> unfused;
  };
  std::vector<Line> lines;
  double matrices = 0;    // bytes of the score matrices; where they do not fit, the rest is 0
  std::size_t bytes = 0;  // held in addition to the tensors
  double forward_seconds = 0, both_seconds = 0;
  int threads = 0;

  bool fits() const { return threads > 0; }
};
UnfusedComparison compare_with_unfused(const AttendInputs& inputs, const AttendResults& results,
                                       const AttendArguments& arguments);

// Prints step by step as text, or all at finish() as one JSON object.
class AttendReport {
 public:
  AttendReport(const AttendInputs& inputs, const AttendArguments& arguments)
      : inputs_(inputs), arguments_(arguments) {}

  void add_plans(const AttendResults& results);
  void add_passes(const AttendResults& results);
  void add_comparison(const UnfusedComparison& comparison, const AttendResults& results);
  void add_written(const std::vector<std::string>& tensors);
  void finish() const;

 private:
  const AttendInputs& inputs_;
  const AttendArguments& arguments_;
  Fields json_;
};

// Refuses, before the work, a target that write_results() would refuse after it.
void check_target(const AttendArguments& arguments, const AttendInputs& inputs);

// Returns the names of the tensors that were written.
std::vector<std::string> write_results(const std::string& target, const AttendResults& results);

}  // namespace regard::cli
