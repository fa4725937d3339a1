// One shape with random contents, to be checked and timed.
#pragma once

#include <string>

#include "tensors/geometry.hpp"
#include "tensors/mirror.hpp"
#include "verify/unfused.hpp"

namespace regard::cli {

class BenchProblem {
 public:
  // `described` gives types, sizes and options; its tensors need no data.
  BenchProblem(const Attention& described, bool backward, const Device& device);

  const Attention& attention() const { return attention_; }
  void run_forward(const Run& run) const;
  void run_backward(const Run& run) const;
  void fetch() { mirror_.download(); }  // before the checks

  // Compares what the fetched runs wrote with float64: every output if the problem is small enough,
  // else the last rows of one head (out, lse, dq). Returns "" or what is wrong.
  std::string check_all() const;
  std::string check_last_rows() const;
  bool can_check_last_rows() const;

 private:
  WantedTypes wanted() const;

  Attention attention_;
  bool backward_ = false;
  Array q_, k_, v_, bias_, mask_, alibi_slopes_, sink_;
  Array out_, lse_, dout_, dq_, dk_, dv_, dbias_, dsink_;
  Mirror mirror_;
};

// Of all tensors of a BenchProblem.
double bytes_needed(const Attention& described, bool backward);

// The same options at a length and head count that float64 can afford.
Attention shortened(const Attention& described);

}  // namespace regard::cli
