// Calls on the arrays of frameworks without autograd: one call of C++ for each pass.
#pragma once

#include "direct_options.hpp"

namespace regard::python {

// What the frameworks share. Objects of a framework by name: `ndarray`, the class of arrays;
// `empty(shape, dtype)` and `zeros(shape, dtype)`, which make one; and the dtypes `f64`, `f32`,
// `f16`, `boolean` and `i32`.
//
// A pass throws Code::invalid_argument for a call that it cannot take: the general path then takes
// it, or refuses it with all of its advice.
class DirectArrays {
 public:
  explicit DirectArrays(const Named& framework);
  virtual ~DirectArrays() = default;

  // out, or (out, lse). out, lse: arrays to write to; None for a new one.
  nanobind::object forward(const DirectOptions& options, nanobind::handle q, nanobind::handle k,
                           nanobind::handle v, const Named& arrays, nanobind::object out,
                           nanobind::object lse, bool return_lse, bool continue_from) const;

  // dq, dk, dv, dbias and dsink. `wanted` has an entry for each, which is None where that gradient
  // is not asked for. With `into`, the others are arrays to write to; else new ones are made.
  Results backward(const DirectOptions& options, nanobind::handle q, nanobind::handle k,
                   nanobind::handle v, const Named& arrays, nanobind::handle dout,
                   nanobind::handle out, nanobind::handle lse, nanobind::handle dlse,
                   nanobind::handle delta, const Results& wanted, bool into, bool accumulate) const;

 protected:
  enum class Access : unsigned char { read, write };

  // Where to run a call: all but its threads and backend.
  virtual Run where() const = 0;
  // A view of an array of the class. Throws Code::invalid_argument for one of another device, and
  // for one that must not be written to.
  virtual Tensor viewed(const char* argument, nanobind::handle x, const Device& device,
                        Access access) const = 0;

  nanobind::object dtype_of(Type type) const;
  // Type::none for another dtype.
  Type type_of(nanobind::handle dtype) const;

 private:
  class Reader;

  Run run_of(const DirectOptions& options) const;
  // A new array with the sizes of `like`; dtype: None for its type. Rows outside of every sequence
  // of `a`, which the library does not write, are 0.
  nanobind::object made(const Attention& a, const Tensor& like,
                        const nanobind::object& dtype) const;
  // The same for lse, where such rows are -inf.
  nanobind::object made_lse(const Attention& a) const;

  nanobind::object ndarray_, empty_, zeros_, f64_, f32_, f16_, boolean_, i32_;
};

void bind_direct_arrays(nanobind::module_& m);

}  // namespace regard::python
