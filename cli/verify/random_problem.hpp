// A random attention problem, which depends on (seed, index) alone.
#pragma once

#include <deque>

#include "tensors/geometry.hpp"
#include "tensors/slab.hpp"
#include "verify/unfused.hpp"

namespace regard::cli {

struct ProblemLimits {
  Type type = Type::none;  // none = any
  Index max_len = 4000;
};

struct RandomProblem {
  Attention attention;
  Slab* out = nullptr;
  Slab* lse = nullptr;
  Slab* dout = nullptr;  // null: forward only
  Slab* dlse = nullptr;
  Slab* dq = nullptr;
  Slab* dk = nullptr;
  Slab* dv = nullptr;
  Slab* dbias = nullptr;
  Slab* dsink = nullptr;
  bool accumulate = false;
  int threads = 0;
  std::string description;
  std::deque<Slab> slabs;  // owns the memory; addresses are stable

  Shape shape() const { return shape_of(attention); }
  WantedTypes wanted() const;
  ForwardOutputs forward_outputs() const;
  BackwardInputs backward_inputs() const;
  Gradients gradients() const;
};

RandomProblem random_problem(std::uint64_t seed, std::uint64_t index, const ProblemLimits& limits);

}  // namespace regard::cli
