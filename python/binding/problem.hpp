// One call of the library, put together from Python arguments: what to compute, and where.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "array.hpp"

namespace regard::python {

// Keeps the arrays that it names alive.
struct Problem {
  Attention attention{};
  int device = Array::kHost;
  std::vector<nanobind::object> owners{};

  // Refuses an array on another device than q's; a null one is "not given".
  Tensor place(const char* argument, const Array* array) const;
};

// The arrays of an Attention by the names of its fields; null: not given.
using Arrays = std::map<std::string, const Array*>;

struct Settings {
  std::optional<double> scale;
  double softcap = 0;
  std::string causal = "none";  // "top_left", "bottom_right"
  std::pair<std::int64_t, std::int64_t> window{-1, -1};
  double dropout_p = 0;
  std::uint64_t dropout_seed = 0;
  std::uint64_t dropout_offset = 0;
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
  std::string precision = "full";  // "tf32", "bf16"
  bool deterministic = false;
};

Problem problem_of(const Array& q, const Array& k, const Array& v, const Arrays& more,
                   const Settings& settings);

// device: "" = where q is; "sm_80" = a chip, for explanations.
Run run_of(const Problem& problem, const std::string& device, std::uintptr_t stream, int threads,
           const std::string& backend);

}  // namespace regard::python
