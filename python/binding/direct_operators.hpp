// Direct calls for PyTorch's operators regard::forward and regard::backward, as compiled programs
// call them: with every argument, and mostly with plain tensors.
#pragma once

#include <vector>

#include "direct.hpp"

namespace regard::python {

// Each function takes the arguments of its operator. What is no direct call goes to PyTorch's
// dispatcher: other tensors, modes, gradients to record, and whatever breaks a rule.
class DirectOperators {
 public:
  // Objects by name: `direct`, a Direct; `tensors`, the names of the tensors after v, which a seed
  // follows; `values`, how many values follow the seed; `options`, which makes DirectOptions of
  // these values; `modes`, functions that return True where the dispatcher must take every call;
  // `forward` and `backward`, which enter the dispatcher.
  explicit DirectOperators(const Named& objects);

  nanobind::object forward(const nanobind::args& arguments, const nanobind::kwargs& named);
  nanobind::object backward(const nanobind::args& arguments, const nanobind::kwargs& named);

 private:
  // Values among the arguments, and what was made of them.
  struct Made {
    nanobind::tuple values;
    nanobind::object options;
  };
  static constexpr std::size_t kMostMade = 32;

  bool is_direct(const nanobind::args& arguments, const nanobind::kwargs& named,
                 std::size_t first) const;
  Named arrays_of(const nanobind::args& arguments, std::size_t first) const;
  nanobind::object options_of(const nanobind::args& arguments, std::size_t first);

  nanobind::object owner_;
  Direct& direct_;
  nanobind::object options_, forward_, backward_;
  nanobind::tuple names_;
  std::size_t values_ = 0;
  std::vector<nanobind::object> modes_;
  std::vector<Made> made_;
};

void bind_direct_operators(nanobind::module_& m);

}  // namespace regard::python
