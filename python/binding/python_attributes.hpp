// Attributes of Python objects by names that are looked up in every call.
#pragma once

#include <nanobind/nanobind.h>

namespace regard::python {

// Raises what the attribute raises.
inline nanobind::object attribute(nanobind::handle object, nanobind::handle name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (!value) throw nanobind::python_error();
  return nanobind::steal(value);
}

// A new reference, which the caller keeps for as long as the process lives.
inline nanobind::handle interned(const char* name) { return PyUnicode_InternFromString(name); }

}  // namespace regard::python
