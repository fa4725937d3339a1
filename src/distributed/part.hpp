// One rank's part of a call: what the caller gave, checked, whatever the scheme.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "distributed/memory.hpp"
#include "distributed/plan_contents.hpp"
#include "regard/distributed.hpp"

namespace regard::distributed {

// What a backward pass sums over ranks.
struct Summed {
  bool dk = false;
  bool dv = false;
  bool dsink = false;
  bool keys() const { return dk || dv; }
};

class Part {
 public:
  // Errors name the argument. Nothing is read or written yet.
  Part(const Attention&, const ForwardOutputs&, const Plan&, int rank, const Run&);
  Part(const Attention&, const BackwardInputs&, const Gradients&, const Plan&, int rank,
       const Run&);

  Pass pass() const { return pass_; }
  // As given; what the pass does not have is empty.
  const Attention& attention() const { return a_; }
  const ForwardOutputs& outputs() const { return outputs_; }
  const BackwardInputs& inputs() const { return inputs_; }
  const Gradients& gradients() const { return gradients_; }
  const Run& run() const { return run_; }

  const PlanContents& plan() const { return plan_; }
  const WholeSequence& whole() const { return plan_.whole; }
  int rank() const { return rank_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t batch() const { return a_.q.sizes[0]; }
  Type type() const { return a_.q.type; }
  Type sum_type() const { return type() == Type::f64 ? Type::f64 : Type::f32; }
  Summed summed() const;

  // What has to be equal on all ranks.
  std::string facts() const;
  // An Error unless the call's device reaches every tensor.
  void require_reachable(Memory&) const;

  // The bytes that a call of Regard needs, of this pass; and how it runs in so many of them.
  std::int64_t workspace_of(const Attention&, const ForwardOutputs&) const;
  std::int64_t workspace_of(const Attention&, const BackwardInputs&, const Gradients&) const;
  Run run_in(std::byte* memory, std::int64_t bytes) const;

 private:
  Part(Pass, const Attention&, const Plan&, int rank, const Run&);
  void check_options() const;
  void check_rows() const;
  Attention checked_locally() const;

  const Pass pass_;
  const Attention a_;
  ForwardOutputs outputs_{};
  BackwardInputs inputs_{};
  Gradients gradients_{};
  const PlanContents& plan_;
  const int rank_;
  const Run& run_;
  const std::int64_t rows_;
};

}  // namespace regard::distributed
