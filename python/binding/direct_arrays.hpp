// Calls on the arrays of frameworks without autograd: one call of C++ for the forward pass.
#pragma once

#include "direct_options.hpp"

namespace regard::python {

// What the frameworks share. Objects of a framework by name: `ndarray`, the class of arrays;
// `empty(shape, dtype)`, which makes one; and the dtypes `f64`, `f32`, `f16`, `boolean` and `i32`.
class DirectArrays {
 public:
  explicit DirectArrays(const Named& framework);
  virtual ~DirectArrays() = default;

  // out, or (out, lse). Throws Code::invalid_argument for a call that it cannot take: the general
  // path then takes it, or refuses it with all of its advice.
  nanobind::object forward(const DirectOptions& options, nanobind::handle q, nanobind::handle k,
                           nanobind::handle v, const Named& arrays, bool return_lse) const;

 protected:
  // Where to run a call: all but its threads and backend.
  virtual Run where() const = 0;
  // A view of an array of the class. Throws Code::invalid_argument for one of another device.
  virtual Tensor viewed(const char* argument, nanobind::handle x, const Device& device) const = 0;

  nanobind::object dtype_of(Type type) const;
  // Type::none for another dtype.
  Type type_of(nanobind::handle dtype) const;

 private:
  class Reader;

  nanobind::object ndarray_, empty_, f64_, f32_, f16_, boolean_, i32_;
};

void bind_direct_arrays(nanobind::module_& m);

}  // namespace regard::python
