#include "direct_arrays.hpp"

#include <nanobind/stl/string.h>

#include "gil.hpp"
#include "kept_maps.hpp"
#include "python_attributes.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

// ------------------------------------------------------------------------------------------- calls

// The arrays of one call as views.
class DirectArrays::Reader {
 public:
  Reader(const DirectArrays& direct, const Device& device, bool rows_first)
      : direct_(direct), device_(device), rows_first_(rows_first) {}

  Tensor operator()(const char* argument, nb::handle x) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) != direct_.ndarray_.ptr()) {
      refuse(argument, "an object", "must be a plain array");
    }
    return direct_.viewed(argument, x, device_);
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
  const DirectArrays& direct_;
  const Device& device_;
  bool rows_first_;
};

DirectArrays::DirectArrays(const Named& framework)
    : ndarray_(framework["ndarray"]),
      empty_(framework["empty"]),
      f64_(framework["f64"]),
      f32_(framework["f32"]),
      f16_(framework["f16"]),
      boolean_(framework["boolean"]),
      i32_(framework["i32"]) {}

nb::object DirectArrays::dtype_of(Type type) const {
  if (type == Type::f64) return f64_;
  if (type == Type::f32) return f32_;
  if (type == Type::f16) return f16_;
  refuse("q", "an array", "has another element type");
}

Type DirectArrays::type_of(nb::handle dtype) const {
  static_assert(kTypeCount == 7, "a type was added: its dtype");
  if (dtype.is(f64_)) return Type::f64;
  if (dtype.is(f32_)) return Type::f32;
  if (dtype.is(f16_)) return Type::f16;
  if (dtype.is(boolean_)) return Type::boolean;
  if (dtype.is(i32_)) return Type::i32;
  return Type::none;
}

nb::object DirectArrays::forward(const DirectOptions& options, nb::handle q, nb::handle k,
                                 nb::handle v, const Named& arrays, bool return_lse) const {
  Run run = where();
  const Reader read(*this, run.device, options.rows_first);
  Attention a = described(options, read, q, k, v, arrays);
  if (is_ragged(a)) refuse("q", "an array", "is ragged");
  run.threads = options.threads;
  run.backend = options.backend;
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
  const UsedMap map(a, run);
  without_gil([&] { regard::forward(a, outputs, run); });
  return return_lse ? nb::object(nb::make_tuple(out, lse)) : out;
}

// ------------------------------------------------------------------------------------------- NumPy

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

Type type_in(const ArrayInterface& x) {
  static_assert(kTypeCount == 7, "a type was added: how NumPy names it");
  if (x.kind == 'f' && x.itemsize == 8) return Type::f64;
  if (x.kind == 'f' && x.itemsize == 4) return Type::f32;
  if (x.kind == 'f' && x.itemsize == 2) return Type::f16;
  if (x.kind == 'b' && x.itemsize == 1) return Type::boolean;
  if (x.kind == 'i' && x.itemsize == 4) return Type::i32;
  return Type::none;
}

class DirectNumPy final : public DirectArrays {
 public:
  using DirectArrays::DirectArrays;

 private:
  Run where() const override { return {}; }

  Tensor viewed(const char* argument, nb::handle array, const Device&) const override {
    static const nb::handle name = interned("__array_struct__");
    const nb::object capsule = attribute(array, name);
    const auto* found =
        static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (!found) throw nb::python_error();
    const ArrayInterface& x = *found;
    if ((x.flags & kAligned) == 0 || (x.flags & kNativeOrder) == 0 || x.rank > Tensor::kMaxRank) {
      refuse(argument, "an array", "has another layout");
    }
    Tensor tensor;
    tensor.data = x.data;
    tensor.type = type_in(x);
    if (tensor.type == Type::none) refuse(argument, "an array", "has another element type");
    tensor.rank = x.rank;
    for (int axis = 0; axis < x.rank; ++axis) {
      if (x.strides[axis] % x.itemsize != 0) refuse(argument, "an array", "has other strides");
      tensor.sizes[axis] = x.sizes[axis];
      tensor.strides[axis] = x.strides[axis] / x.itemsize;
    }
    return tensor;
  }
};

// -------------------------------------------------------------------------------------------- CuPy

// Arrays of the device that is current in CuPy, where its functions make arrays.
class DirectCuPy final : public DirectArrays {
 public:
  // Further functions of CuPy by name: `device()`, the number of the current device, and
  // `stream()`, the address of its current stream.
  explicit DirectCuPy(const Named& cupy)
      : DirectArrays(cupy), device_(cupy["device"]), stream_(cupy["stream"]) {}

 private:
  Run where() const override {
    return {.device = cuda(nb::cast<int>(device_())),
            .stream = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(stream_()))};
  }

  Tensor viewed(const char* argument, nb::handle x, const Device& device) const override {
    static const nb::handle data = interned("data"), ptr = interned("ptr"),
                            shape = interned("shape"), strides = interned("strides"),
                            dtype = interned("dtype"), device_id = interned("device_id");
    const nb::object memory = attribute(x, data);
    if (nb::cast<int>(attribute(memory, device_id)) != device.index) {
      refuse(argument, "an array", "is not on the current device");
    }
    Tensor tensor;
    tensor.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(attribute(memory, ptr)));
    tensor.type = type_of(attribute(x, dtype));
    if (tensor.type == Type::none) refuse(argument, "an array", "has another element type");
    const nb::tuple sizes(attribute(x, shape)), steps(attribute(x, strides));
    if (sizes.size() > Tensor::kMaxRank) refuse(argument, "an array", "has too many dimensions");
    tensor.rank = static_cast<int>(sizes.size());
    const auto itemsize = static_cast<std::int64_t>(size_of(tensor.type));
    for (int axis = 0; axis < tensor.rank; ++axis) {
      const auto step = nb::cast<std::int64_t>(nb::object(steps[axis]));
      if (step % itemsize != 0) refuse(argument, "an array", "has other strides");
      tensor.sizes[axis] = nb::cast<std::int64_t>(nb::object(sizes[axis]));
      tensor.strides[axis] = step / itemsize;
    }
    return tensor;
  }

  nb::object device_, stream_;
};

}  // namespace

void bind_direct_arrays(nb::module_& m) {
  nb::class_<DirectArrays>(m, "DirectArrays", "Calls on the arrays of a framework.")
      .def("forward", &DirectArrays::forward, "options"_a, "q"_a, "k"_a, "v"_a, "arrays"_a,
           "return_lse"_a);
  nb::class_<DirectNumPy, DirectArrays>(m, "DirectNumPy", "Calls on NumPy's arrays.")
      .def(nb::init<const Named&>(), "numpy"_a);
  nb::class_<DirectCuPy, DirectArrays>(m, "DirectCuPy", "Calls on CuPy's arrays.")
      .def(nb::init<const Named&>(), "cupy"_a);
}

}  // namespace regard::python
