// The options of a direct call, which Python parses once for each combination; and the call's
// description from them and the tensors.
#pragma once

#include <memory>

#include "problem.hpp"

namespace regard::python {

// What both passes of a call need except tensors.
struct CallOptions {
  Attention attention{};     // values, no tensors
  bool rows_first = false;   // q is (B, S, H, D), except for packed sequences
  bool is_causal = false;    // causal=True, for which the lengths must be equal
  bool equal_heads = false;  // q, k and v have as many heads
  int threads = 0;           // 0 = as many as PyTorch uses
};

// A call without its tensors. Python makes one for each combination of options and keeps it.
struct DirectOptions : CallOptions {
  std::string backend{};
  nanobind::object out_type{};                 // the results' dtype, or None for the inputs'
  mutable std::shared_ptr<const void> kept{};  // as torch_autograd.cpp keeps them
};

using Named = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;
using Wanted = nanobind::typed<nanobind::sequence, bool>;  // a gradient each
using Results = nanobind::typed<nanobind::tuple, nanobind::any, nanobind::ellipsis>;

// values: options as the binding takes them; causal may be True as well.
DirectOptions direct_options(const Named& values, bool rows_first, bool equal_heads, int threads,
                             std::string backend, nanobind::object out_type);

// Every option's name, interned, in the order of visit_options.
const std::vector<nanobind::handle>& option_names();

// What a direct path does not take.
[[noreturn]] void refuse(const char* argument, const char* value, const char* reason);

// Rows may lie outside of every sequence. The library does not write these.
bool is_ragged(const Attention& a);
bool has_strided_rows(const Tensor& tensor);
// (B, S, H, D) as (B, H, S, D), and back.
void swap_rows_and_heads(Tensor& tensor);
// Throws Code::invalid_argument for tensors that a direct path does not take.
void require_direct(const CallOptions& options, const Attention& a);

// Reader: read(argument, array) is a Tensor, and read.rows(argument, array) one of shape
// (B, H, S, D). Both throw Code::invalid_argument for an array that a direct path does not take.
template <class Reader>
Attention described(const DirectOptions& options, Reader&& read, nanobind::handle q,
                    nanobind::handle k, nanobind::handle v, const Named& arrays) {
  Attention a = options.attention;
  a.q = read.rows("q", q);
  a.k = read.rows("k", k);
  a.v = read.rows("v", v);
  if (arrays.size() > 0) {
    std::size_t row = 0, found = 0;
    visit_options(a, [&](const char* name, auto& field) {
      const nanobind::handle key = option_names()[row++];
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, Tensor>) {
        PyObject* const x = PyDict_GetItemWithError(arrays.ptr(), key.ptr());
        if (x) field = read(name, x), ++found;
      }
    });
    if (found != arrays.size()) refuse("arrays", "an option", "is no array");
  }
  require_direct(options, a);
  return a;
}

void bind_direct_options(nanobind::module_& m);

}  // namespace regard::python
