// One call of the library, put together from Python arguments: what to compute, and where.
#pragma once

#include <string>
#include <vector>

#include "array.hpp"

namespace regard::python {

// Keeps the arrays that it names alive.
struct Problem {
  Attention attention{};
  int device = Array::kHost;
  std::vector<nanobind::object> owners{};

  // Refuses an array on another device than q's; a null one is "not given".
  Tensor place(const char* argument, const Array* array) const;
  // The same, and keeps its memory alive.
  Tensor keep(const char* argument, const Array& array);
};

// Every option of a call: its name in Python, and its field. What _core.Problem and XLA's calls
// take, and the names and defaults that Python's table is compared with, follow from these rows.
template <class Visit>
void visit_options(Attention& a, Visit&& visit) {
  visit("bias", a.bias);
  visit("mask", a.mask);
  visit("row_spans", a.row_spans);
  visit("key_spans", a.key_spans);
  visit("alibi_slopes", a.alibi_slopes);
  visit("sink", a.sink);
  visit("cu_seqlens_q", a.cu_seqlens_q);
  visit("cu_seqlens_k", a.cu_seqlens_k);
  visit("seqused_q", a.seqused_q);
  visit("seqused_k", a.seqused_k);
  visit("max_seqlen_q", a.max_seqlen_q);
  visit("max_seqlen_k", a.max_seqlen_k);
  visit("q_positions", a.q_positions);
  visit("k_position", a.k_position);
  visit("batch_begin", a.batch_begin);
  visit("head_begin", a.head_begin);
  visit("scale", a.scale);
  visit("softcap", a.softcap);
  visit("causal", a.causal);
  visit("window", a.window);
  visit("dropout_p", a.dropout.p);
  visit("dropout_seed", a.dropout.seed);
  visit("dropout_offset", a.dropout.offset);
  visit("precision", a.precision);
  visit("deterministic", a.deterministic);
}

// The words for an enumeration's values, in their order.
using Words = std::array<const char*, 3>;
constexpr Words words(Causal) { return {"none", "top_left", "bottom_right"}; }
constexpr Words words(Precision) { return {"full", "tf32", "bf16"}; }

// Error for another word.
template <class Enum>
void set_named(const char* argument, const std::string& word, Enum& value) {
  const Words all = words(value);
  const auto found = std::find(all.begin(), all.end(), word);
  if (found == all.end()) {
    throw Error(Code::invalid_argument, argument, "'" + word + "'",
                std::string("must be one of ") + all[0] + ", " + all[1] + ", " + all[2]);
  }
  value = static_cast<Enum>(found - all.begin());
}

// q, k and v of a call, without options.
Problem problem_of(const Array& q, const Array& k, const Array& v);
// options: an Array or a value by name; None is the default. Seeds and offsets are 64 bits, whether
// the integer is signed or not; a seed may be an Array of two i32, the low word first.
Problem problem_of(const Array& q, const Array& k, const Array& v, const nanobind::dict& options);
// The default of each option; None for an array.
nanobind::typed<nanobind::dict, nanobind::str, nanobind::any> option_defaults();

// device: "" = where q is; "sm_80" = a chip, for explanations.
Run run_of(const Problem& problem, const std::string& device, std::uintptr_t stream, int threads,
           const std::string& backend);

}  // namespace regard::python
