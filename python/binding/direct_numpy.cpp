#include "direct_numpy.hpp"

#include <nanobind/stl/string.h>

#include "gil.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// NumPy's array interface: https://numpy.org/doc/stable/reference/arrays.interface.html. An array's
// attribute __array_struct__ is a capsule of one.
struct ArrayInterface {
  int two = 0;  // says that this is the struct
  int rank = 0;
  char kind = 0;
  int itemsize = 0;
  int flags = 0;
  Py_intptr_t* sizes = nullptr;
  Py_intptr_t* strides = nullptr;  // bytes
  void* data = nullptr;
};
constexpr int kAligned = 0x100, kNativeOrder = 0x200;

Type type_of(const ArrayInterface& x) {
  static_assert(kTypeCount == 7, "a type was added: how NumPy names it");
  if (x.kind == 'f' && x.itemsize == 8) return Type::f64;
  if (x.kind == 'f' && x.itemsize == 4) return Type::f32;
  if (x.kind == 'f' && x.itemsize == 2) return Type::f16;
  if (x.kind == 'b' && x.itemsize == 1) return Type::boolean;
  if (x.kind == 'i' && x.itemsize == 4) return Type::i32;
  return Type::none;
}

}  // namespace

// The arrays of one call as views.
class DirectNumPy::Reader {
 public:
  Reader(const DirectNumPy& direct, bool rows_first) : direct_(direct), rows_first_(rows_first) {}

  Tensor operator()(const char* argument, nb::handle x) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) != direct_.ndarray_.ptr()) {
      refuse(argument, "an object", "must be a plain array");
    }
    static const nb::handle name = PyUnicode_InternFromString("__array_struct__");
    const nb::object capsule = nb::steal(PyObject_GetAttr(x.ptr(), name.ptr()));
    if (!capsule.is_valid()) throw nb::python_error();
    const auto* found =
        static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (!found) throw nb::python_error();
    return viewed(argument, *found);
  }

  Tensor rows(const char* argument, nb::handle x) const {
    const Tensor tensor = (*this)(argument, x);
    if (has_strided_rows(tensor)) refuse(argument, "an array", "has strided rows");
    return ordered(tensor);
  }

  // (B, H, S, D), whatever the layout; and back.
  Tensor ordered(Tensor tensor) const {
    if (rows_first_ && tensor.rank == 4) swap_rows_and_heads(tensor);
    return tensor;
  }

 private:
  static Tensor viewed(const char* argument, const ArrayInterface& x) {
    if ((x.flags & kAligned) == 0 || (x.flags & kNativeOrder) == 0 || x.rank > Tensor::kMaxRank) {
      refuse(argument, "an array", "has another layout");
    }
    Tensor tensor;
    tensor.data = x.data;
    tensor.type = type_of(x);
    if (tensor.type == Type::none) refuse(argument, "an array", "has another element type");
    tensor.rank = x.rank;
    for (int axis = 0; axis < x.rank; ++axis) {
      if (x.strides[axis] % x.itemsize != 0) refuse(argument, "an array", "has other strides");
      tensor.sizes[axis] = x.sizes[axis];
      tensor.strides[axis] = x.strides[axis] / x.itemsize;
    }
    return tensor;
  }

  const DirectNumPy& direct_;
  bool rows_first_;
};

DirectNumPy::DirectNumPy(const Named& numpy)
    : ndarray_(numpy["ndarray"]),
      empty_(numpy["empty"]),
      f64_(numpy["f64"]),
      f32_(numpy["f32"]),
      f16_(numpy["f16"]) {}

nb::object DirectNumPy::dtype_of(Type type) const {
  if (type == Type::f64) return f64_;
  if (type == Type::f32) return f32_;
  if (type == Type::f16) return f16_;
  refuse("q", "an array", "has another element type");
}

nb::object DirectNumPy::forward(const DirectOptions& options, nb::handle q, nb::handle k,
                                nb::handle v, const Named& arrays, bool return_lse) const {
  const Reader read(*this, options.rows_first);
  const Attention a = described(options, read, q, k, v, arrays);
  if (is_ragged(a)) refuse("q", "an array", "is ragged");
  const Tensor given = read.ordered(a.q);
  const nb::object type = options.out_type.is_none() ? dtype_of(a.q.type) : options.out_type;
  const nb::object out =
      empty_(nb::make_tuple(given.sizes[0], given.sizes[1], given.sizes[2], a.v.sizes[3]), type);
  ForwardOutputs outputs{.out = read.rows("out", out)};
  nb::object lse;
  if (return_lse) {
    lse = empty_(nb::make_tuple(a.q.sizes[0], a.q.sizes[1], a.q.sizes[2]),
                 a.q.type == Type::f64 ? f64_ : f32_);
    outputs.lse = read("lse", lse);
  }
  const Run run{.threads = options.threads, .backend = options.backend};
  without_gil([&] { regard::forward(a, outputs, run); });
  return return_lse ? nb::object(nb::make_tuple(out, lse)) : out;
}

void bind_direct_numpy(nb::module_& m) {
  nb::class_<DirectNumPy>(m, "DirectNumPy", "Calls on NumPy's arrays.")
      .def(nb::init<const Named&>(), "numpy"_a)
      .def("forward", &DirectNumPy::forward, "options"_a, "q"_a, "k"_a, "v"_a, "arrays"_a,
           "return_lse"_a);
}

}  // namespace regard::python
