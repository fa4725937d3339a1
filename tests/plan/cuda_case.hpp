// Problems and plans for GPUs that need not exist.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "plan/cuda/planner.hpp"
#include "problem/describe.hpp"

namespace regard::cuda_case {

struct Shape {
  Type type = bf16;
  std::int64_t batch = 2, heads_q = 8, heads_kv = 8, len_q = 1024, len_k = 1024, dim = 64,
               dim_v = 0;  // 0 = dim
};

inline Attention attention(const Shape& s) {
  const std::int64_t dim_v = s.dim_v == 0 ? s.dim : s.dim_v;
  return {.q = Tensor(nullptr, s.type, {s.batch, s.heads_q, s.len_q, s.dim}),
          .k = Tensor(nullptr, s.type, {s.batch, s.heads_kv, s.len_k, s.dim}),
          .v = Tensor(nullptr, s.type, {s.batch, s.heads_kv, s.len_k, dim_v})};
}

inline Problem problem(const Attention& a, Pass pass = Pass::forward) {
  return describe(a, pass, NullData::allowed);
}

inline const Chip& chip(const char* name) {
  const Chip* const found = chip_named(name);
  REQUIRE(found);
  return *found;
}

inline CudaChoice choice(const std::string& name) {
  CudaChoice choice;
  std::string why_not;
  REQUIRE_MESSAGE(parse_cuda_choice(name, choice, why_not), why_not);
  return choice;
}

inline CudaPlan planned(const Problem& p, const char* chip_name = "sm_90",
                        const std::string& name = "") {
  return plan_cuda(p, chip(chip_name), choice(name), Reasons::given);
}

// The launch of a kernel; nullptr where the plan has none.
inline const CudaLaunch* launch_of(const CudaPlan& plan, Kernel kernel) {
  for (const CudaLaunch& launch : plan.launches) {
    if (launch.config.kernel == kernel && !launch.config.only_flagged) return &launch;
  }
  return nullptr;
}

// Whether a kernel makes dbias from its sums.
inline bool converts_dbias(const KernelConfig& c) {
  return c.kernel == Kernel::finish && c.dbias.how != BiasGradient::none;
}
inline bool converts_dbias(const CudaPlan& plan) {
  return std::any_of(plan.launches.begin(), plan.launches.end(),
                     [](const CudaLaunch& launch) { return converts_dbias(launch.config); });
}

inline bool says(const CudaPlan& plan, const char* words) {
  for (const std::string& reason : plan.reasons) {
    if (reason.find(words) != std::string::npos) return true;
  }
  return false;
}

// The kernels of a plan, in order: "delta backward finish"; * = of flagged rows.
std::string kernels_of(const CudaPlan&);

// Everything that holds for any plan.
void check_sound(const Problem&, const Chip&, const CudaPlan&);

}  // namespace regard::cuda_case
