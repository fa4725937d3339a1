// Rule: when and how a family of kernels is the main one of a plan.
#pragma once

#include <optional>

#include "plan/cuda/chip.hpp"
#include "plan/cuda/choice.hpp"
#include "plan/cuda/plan.hpp"
#include "plan/cuda/reasons.hpp"
#include "plan/cuda/refusal.hpp"
#include "plan/cuda/tiling.hpp"

namespace regard {

// What rules ask about.
struct Facts {
  Facts(const Problem&, const Chip&, int level, bool is_limited);

  // The problem as kernels see it that load by TMA: with copies of what TMA cannot load.
  const Problem& loaded() const { return copied_ ? *copied_ : problem; }
  // What a tiling is chosen for, without limits.
  TilingRequest request(bool pack_gqa) const;

  const Problem& problem;
  const Chip& chip;
  int level;        // of the instructions that may be used
  bool is_limited;  // kernels may not occupy all multiprocessors
  InputSet copies;  // the inputs that TMA cannot load where they are
  bool copies_fit;  // into any memory

 private:
  std::optional<Problem> copied_;
};

struct Rule {
  Family family;
  bool forward = true;  // the passes that it is about
  bool backward = true;
  Refusal (*why_not)(const Facts&) = nullptr;  // why the family's kernels cannot do it
  // Why the next family should, where the caller leaves the choice.
  Refusal (*why_rather_next)(const Facts&) = nullptr;
  KernelConfig (*config)(const Facts&);  // of the main kernel, without tiling and head sizes
  Fit (*choose_tiling)(KernelConfig&, const TilingRequest&);
  const char* no_tiling;  // the refusal where none fits
};

// What every step of planning reads, and the plan that it adds to.
struct Draft {
  // Why the planner refuses from here on.
  void refuse(const Refusal& refusal) {
    plan.refusal = refusal.why;
    plan.too_large = refusal.too_large;
  }
  // What a kernel's tiling is chosen for.
  TilingRequest request(const KernelConfig&, bool is_main) const;

  const Facts& facts;
  const Problem& p;
  const CudaChoice& choice;
  SharedLimits limits;
  CudaPlan& plan;
  Because because;
  KernelConfig main{};
};

}  // namespace regard
