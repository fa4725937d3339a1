#include "direct_options.hpp"

#include <nanobind/stl/string.h>

#include "python_attributes.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

const std::vector<nb::handle>& option_names() {
  static const auto& names = *new std::vector<nb::handle>([] {
    std::vector<nb::handle> all;
    Attention attention;
    visit_options(attention, [&](const char* name, auto&) { all.push_back(interned(name)); });
    return all;
  }());
  return names;
}

void refuse(const char* argument, const char* value, const char* reason) {
  throw Error(Code::invalid_argument, argument, value, reason);
}

bool is_ragged(const Attention& a) {
  return a.cu_seqlens_q.given() || a.seqused_q.given() || a.seqused_k.given();
}

bool has_strided_rows(const Tensor& tensor) {
  const int last = tensor.rank - 1;
  return last >= 0 && tensor.strides[last] != 1 && tensor.sizes[last] > 1;
}

void swap_rows_and_heads(Tensor& tensor) {
  std::swap(tensor.sizes[1], tensor.sizes[2]);
  std::swap(tensor.strides[1], tensor.strides[2]);
}

void require_direct(const CallOptions& options, const Attention& a) {
  const bool packed = a.cu_seqlens_q.given();
  for (const Tensor* tensor : {&a.q, &a.k, &a.v}) {
    if (tensor->rank != (packed ? 3 : 4)) refuse("q", "a tensor", "has another rank");
    for (int axis = 0; axis < tensor->rank; ++axis) {
      if (tensor->sizes[axis] == 0) refuse("q", "a tensor", "is empty");
    }
  }
  if (options.equal_heads && (a.q.sizes[1] != a.k.sizes[1] || a.q.sizes[1] != a.v.sizes[1])) {
    refuse("key", "a tensor", "has other heads");
  }
  if (packed && (a.max_seqlen_q == 0 || a.max_seqlen_k == 0)) {
    refuse("max_seqlen_q", "0", "is needed with cu_seqlens_q");
  }
  const bool same = packed ? a.max_seqlen_q == a.max_seqlen_k : a.q.sizes[2] == a.k.sizes[2];
  const bool same_used = a.seqused_q.given() == a.seqused_k.given();
  if (options.is_causal && !(same && same_used)) refuse("causal", "True", "needs equal lengths");
}

DirectOptions direct_options(const Named& given, bool rows_first, bool equal_heads, int threads,
                             std::string backend, nb::object out_type) {
  DirectOptions options;
  options.rows_first = rows_first;
  options.equal_heads = equal_heads;
  options.threads = threads;
  options.backend = std::move(backend);
  options.out_type = std::move(out_type);
  Named values = given;  // the same dict, which Python made for this call
  if (values.contains("causal") && nb::object(values["causal"]).ptr() == Py_True) {
    options.is_causal = true;
    values["causal"] = "bottom_right";
  }
  options.attention = problem_of({}, {}, {}, values).attention;
  return options;
}

void bind_direct_options(nb::module_& m) {
  nb::class_<DirectOptions>(m, "DirectOptions", "The options of a call: all but its tensors.")
      .def(
          "__init__",
          [](DirectOptions* self, const Named& values, bool rows_first, bool equal_heads,
             int threads, std::string backend, nb::object out_type) {
            new (self) DirectOptions(direct_options(values, rows_first, equal_heads, threads,
                                                    std::move(backend), std::move(out_type)));
          },
          "values"_a, "rows_first"_a, "equal_heads"_a, "threads"_a, "backend"_a,
          "out_type"_a.none());
}

}  // namespace regard::python
