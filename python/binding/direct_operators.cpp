#include "direct_operators.hpp"

#include <algorithm>

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Before the operators' own arguments: wanted, dout, dlse, out, lse.
constexpr std::size_t kOfBackward = 5;
constexpr std::size_t kRows = 3;  // q, k, v
constexpr std::size_t kGradients = 5;

nb::handle item(const nb::tuple& tuple, std::size_t index) {
  return PyTuple_GetItem(tuple.ptr(), static_cast<Py_ssize_t>(index));
}

// The result of a direct call; null where it is refused.
template <class Call>
nb::object unless_refused(Call&& call) {
  try {
    return call();
  } catch (const Error& error) {
    if (error.code() != Code::invalid_argument) throw;
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError)) throw;
  }
  return {};
}

bool are_false(const std::vector<nb::object>& functions) {
  return std::all_of(functions.begin(), functions.end(),
                     [](const nb::object& function) { return !nb::cast<bool>(function()); });
}

nb::object called(const nb::object& function, const nb::args& arguments, const nb::kwargs& named) {
  PyObject* const result = PyObject_Call(function.ptr(), arguments.ptr(), named.ptr());
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

// Whether a value is the one that was kept, of the same type; a list is as its tuple. Runs no code
// of Python, which could change what is kept.
bool is_same(nb::handle value, nb::handle kept) {
  if (value.is(kept)) return true;
  PyObject* const a = value.ptr();
  PyObject* const b = kept.ptr();
  if (PyList_CheckExact(a) || PyTuple_CheckExact(a)) {
    if (!PyTuple_CheckExact(b) || PySequence_Size(a) != PyTuple_Size(b)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_Size(b); ++i) {
      PyObject* const x = PyList_CheckExact(a) ? PyList_GetItem(a, i) : PyTuple_GetItem(a, i);
      if (!is_same(x, PyTuple_GetItem(b, i))) return false;
    }
    return true;
  }
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  const bool is_plain = PyLong_CheckExact(a) || PyFloat_CheckExact(a) || PyUnicode_CheckExact(a);
  return is_plain && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

// A list may change later.
nb::object unchanging(nb::handle value) {
  return PyList_CheckExact(value.ptr()) ? nb::object(nb::tuple(value)) : nb::borrow(value);
}

bool is_flags(nb::handle wanted) {
  if (!PyList_CheckExact(wanted.ptr()) && !PyTuple_CheckExact(wanted.ptr())) return false;
  std::size_t count = 0;
  for (const nb::handle flag : nb::borrow<Wanted>(wanted)) {
    if (!PyBool_Check(flag.ptr())) return false;
    ++count;
  }
  return count == kGradients;
}

}  // namespace

DirectOperators::DirectOperators(const Named& objects)
    : owner_(objects["direct"]),
      direct_(nb::cast<Direct&>(owner_)),
      options_(objects["options"]),
      forward_(objects["forward"]),
      backward_(objects["backward"]),
      names_(objects["tensors"]),
      values_(nb::cast<std::size_t>(nb::object(objects["values"]))) {
  for (nb::handle mode : nb::object(objects["modes"])) modes_.push_back(nb::borrow(mode));
}

// first: the index of q.
bool DirectOperators::is_direct(const nb::args& arguments, const nb::kwargs& named,
                                std::size_t first) const {
  const std::size_t seed = first + kRows + names_.size();
  return named.size() == 0 && arguments.size() == seed + 1 + values_ &&
         item(arguments, seed).is_none() && direct_.is_plain() && are_false(modes_);
}

Named DirectOperators::arrays_of(const nb::args& arguments, std::size_t first) const {
  Named arrays;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    const nb::handle x = item(arguments, first + kRows + i);
    if (!x.is_none()) arrays[item(names_, i)] = x;
  }
  return arrays;
}

nb::object DirectOperators::options_of(const nb::args& arguments, std::size_t first) {
  const std::size_t begin = first + kRows + names_.size() + 1;
  for (const Made& made : made_) {
    std::size_t same = 0;
    while (same < values_ && is_same(item(arguments, begin + same), item(made.values, same))) {
      ++same;
    }
    if (same == values_) return made.options;
  }
  nb::list values;
  for (std::size_t i = 0; i < values_; ++i) values.append(unchanging(item(arguments, begin + i)));
  const nb::object options = options_(*values);
  if (made_.size() == kMostMade) made_.erase(made_.begin());
  made_.push_back({.values = nb::tuple(values), .options = options});
  return options;
}

nb::object DirectOperators::forward(const nb::args& arguments, const nb::kwargs& named) {
  const nb::object result = unless_refused([&]() -> nb::object {
    if (!is_direct(arguments, named, 0)) return {};
    const nb::object options = options_of(arguments, 0);
    const Named arrays = arrays_of(arguments, 0);
    const nb::handle q = item(arguments, 0), k = item(arguments, 1), v = item(arguments, 2);
    if (direct_.records(q, k, v, arrays)) return {};
    return direct_.run(nb::cast<const DirectOptions&>(options), q, k, v, arrays, true, false);
  });
  return result.is_valid() ? result : called(forward_, arguments, named);
}

nb::object DirectOperators::backward(const nb::args& arguments, const nb::kwargs& named) {
  const nb::object result = unless_refused([&]() -> nb::object {
    if (!is_direct(arguments, named, kOfBackward) || direct_.is_grad_enabled()) return {};
    const nb::handle wanted = item(arguments, 0);
    if (!is_flags(wanted)) return {};
    const nb::object options = options_of(arguments, kOfBackward);
    Results saved(nb::make_tuple(item(arguments, 3), item(arguments, 4), item(arguments, 5),
                                 item(arguments, 6), item(arguments, 7)));
    const Results gradients = direct_.gradients(
        nb::cast<const DirectOptions&>(options), nb::borrow<Wanted>(wanted), saved,
        arrays_of(arguments, kOfBackward), item(arguments, 1), item(arguments, 2));
    nb::list found;
    for (const nb::handle gradient : gradients) {
      if (!gradient.is_none()) found.append(gradient);
    }
    return found;
  });
  return result.is_valid() ? result : called(backward_, arguments, named);
}

void bind_direct_operators(nb::module_& m) {
  nb::class_<DirectOperators>(m, "DirectOperators",
                              "PyTorch's operators of the two passes, called directly.")
      .def(nb::init<const Named&>(), "objects"_a)
      .def("forward", &DirectOperators::forward,
           nb::sig("def forward(self, *arguments: Any, **named: Any) -> Any"))
      .def("backward", &DirectOperators::backward,
           nb::sig("def backward(self, *arguments: Any, **named: Any) -> Any"));
}

}  // namespace regard::python
