#include "problem.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

namespace regard::python {

namespace nb = nanobind;

namespace {

// Sets an option from a value of Python. Error for a value of another type.
struct SetOption {
  Problem& problem;
  const char* name;
  nb::handle value;

  template <class Value>
  Value as() const {
    Value result{};
    require(nb::try_cast(value, result));
    return result;
  }
  void require(bool is_right) const {
    if (is_right) return;
    throw Error(Code::invalid_argument, name, nb::repr(value).c_str(), "has the wrong type");
  }

  void operator()(Tensor& field) const {
    require(nb::isinstance<Array>(value));
    field = problem.keep(name, nb::cast<const Array&>(value));
  }
  // A seed in memory is an Array of its two words.
  void operator()(std::uint64_t& field) const {
    Dropout& dropout = problem.attention.dropout;
    if (&field == &dropout.seed && nb::isinstance<Array>(value)) {
      const Tensor words = problem.keep(name, nb::cast<const Array&>(value));
      require(words.type == i32 && words.rank == 1 && words.sizes[0] == 2 && words.strides[0] == 1);
      dropout.seed_words = static_cast<const std::uint32_t*>(words.data);
      return;
    }
    require(nb::isinstance<nb::int_>(value));
    field = PyLong_AsUnsignedLongLongMask(value.ptr());
  }
  void operator()(std::optional<double>& field) const { field = as<double>(); }
  void operator()(Window& field) const {
    const auto [left, right] = as<std::pair<std::int64_t, std::int64_t>>();
    field = {.left = left, .right = right};
  }
  template <class Field>
  void operator()(Field& field) const {
    if constexpr (std::is_enum_v<Field>) {
      set_named(name, as<std::string>(), field);
    } else {
      field = as<Field>();
    }
  }
};

template <class Value>
nb::object to_python(const Value& value) {
  if constexpr (std::is_enum_v<Value>) return nb::str(words(value)[static_cast<int>(value)]);
  if constexpr (std::is_arithmetic_v<Value>) return nb::cast(value);
  if constexpr (std::is_same_v<Value, Window>) return nb::make_tuple(value.left, value.right);
  return nb::none();
}

}  // namespace

Tensor Problem::place(const char* argument, const Array* array) const {
  if (!array || !array->tensor.given()) return {};
  if (array->device != device) {
    throw Error(Code::invalid_argument, argument, "an array on " + device_name(array->device),
                "must be on " + device_name(device) + ", where q is");
  }
  return array->tensor;
}

Tensor Problem::keep(const char* argument, const Array& array) {
  if (array.owner.is_valid()) owners.push_back(array.owner);
  return place(argument, &array);
}

Problem problem_of(const Array& q, const Array& k, const Array& v) {
  Problem problem{.device = q.device};
  problem.attention.q = problem.keep("q", q);
  problem.attention.k = problem.keep("k", k);
  problem.attention.v = problem.keep("v", v);
  return problem;
}

Problem problem_of(const Array& q, const Array& k, const Array& v, const nb::dict& options) {
  static const nb::dict& known = *new nb::dict(option_defaults());
  static const nb::list& names = *new nb::list(known.keys());
  Problem problem = problem_of(q, k, v);
  std::size_t row = 0, found = 0;
  visit_options(problem.attention, [&](const char* name, auto& field) {
    PyObject* key = PyList_GetItem(names.ptr(), static_cast<Py_ssize_t>(row++));
    const nb::handle value = PyDict_GetItemWithError(options.ptr(), key);
    found += value.is_valid();
    if (value.is_valid() && !value.is_none()) SetOption{problem, name, value}(field);
  });
  if (found == options.size()) return problem;
  for (const auto [key, value] : options) {
    if (known.contains(key)) continue;
    throw Error(Code::invalid_argument, nb::str(key).c_str(), nb::repr(value).c_str(),
                "is no option of the library");
  }
  return problem;
}

nb::typed<nb::dict, nb::str, nb::any> option_defaults() {
  nb::dict all;
  Attention attention;
  visit_options(attention, [&](const char* name, auto& field) {
    all[nb::steal(PyUnicode_InternFromString(name))] = to_python(field);
  });
  return all;
}

Run run_of(const Problem& problem, const std::string& device, std::uintptr_t stream, int threads,
           const std::string& backend) {
  Run run{.stream = reinterpret_cast<void*>(stream), .threads = threads, .backend = backend};
  if (device.empty()) {
    if (problem.device != Array::kHost) run.device = cuda(problem.device);
  } else if (device.rfind("cuda:", 0) == 0 && device.size() < 9 &&
             device.find_first_not_of("0123456789", 5) == std::string::npos && device.size() > 5) {
    run.device = cuda(std::stoi(device.substr(5)));
  } else if (device != "cpu") {
    run.device = chip(device);
  }
  return run;
}

}  // namespace regard::python
