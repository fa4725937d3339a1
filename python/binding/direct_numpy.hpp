// Calls on NumPy's arrays: one call of C++ for the forward pass.
#pragma once

#include "direct_options.hpp"

namespace regard::python {

class DirectNumPy {
 public:
  // Objects of NumPy by name: `ndarray`, the class; `empty`, the function; and the dtypes `f64`,
  // `f32` and `f16`.
  explicit DirectNumPy(const Named& numpy);

  // out, or (out, lse). Throws Code::invalid_argument for a call that it cannot take: the general
  // path then takes it, or refuses it with all of its advice.
  nanobind::object forward(const DirectOptions& options, nanobind::handle q, nanobind::handle k,
                           nanobind::handle v, const Named& arrays, bool return_lse) const;

 private:
  class Reader;

  nanobind::object dtype_of(Type type) const;

  nanobind::object ndarray_, empty_, f64_, f32_, f16_;
};

void bind_direct_numpy(nanobind::module_& m);

}  // namespace regard::python
