#include "direct_arrays.hpp"

#include <nanobind/stl/string.h>

#include <limits>

#include "gil.hpp"
#include "kept_maps.hpp"
#include "python_attributes.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// What results look like: their sizes and types.
Tensor out_like(const Attention& a) {
  Tensor like = a.q;
  like.sizes[like.rank - 1] = a.v.sizes[like.rank - 1];
  return like;
}

// (B, Hq, Sq); packed (Hq, total_q).
Tensor lse_like(const Attention& a) {
  Tensor like = a.q;
  like.rank = a.q.rank - 1;
  if (a.q.rank == 3) std::swap(like.sizes[0], like.sizes[1]);
  like.type = a.q.type == Type::f64 ? Type::f64 : Type::f32;
  return like;
}

}  // namespace

// ------------------------------------------------------------------------------------------- calls

// The arrays of one call as views.
class DirectArrays::Reader {
 public:
  Reader(const DirectArrays& direct, const Device& device, bool rows_first)
      : direct_(direct), device_(device), rows_first_(rows_first) {}

  Tensor operator()(const char* argument, nb::handle x, Access access = Access::read) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) != direct_.ndarray_.ptr()) {
      refuse(argument, "an object", "must be a plain array");
    }
    return direct_.viewed(argument, x, device_, access);
  }

  // As (B, H, S, D), or packed.
  Tensor rows(const char* argument, nb::handle x, Access access = Access::read) const {
    const Tensor tensor = (*this)(argument, x, access);
    if (has_strided_rows(tensor)) refuse(argument, "an array", "has strided rows");
    return ordered(tensor);
  }

  Tensor optional(const char* argument, nb::handle x) const {
    return x.is_none() ? Tensor{} : (*this)(argument, x);
  }

  Tensor optional_rows(const char* argument, nb::handle x) const {
    return x.is_none() ? Tensor{} : rows(argument, x);
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
      zeros_(framework["zeros"]),
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

Run DirectArrays::run_of(const DirectOptions& options) const {
  Run run = where();
  run.threads = options.threads;
  run.backend = options.backend;
  return run;
}

nb::object DirectArrays::made(const Attention& a, const Tensor& like,
                              const nb::object& dtype) const {
  const auto shape = nb::steal<nb::tuple>(PyTuple_New(like.rank));
  for (int axis = 0; axis < like.rank; ++axis) {
    PyTuple_SetItem(shape.ptr(), axis, nb::int_(like.sizes[axis]).release().ptr());
  }
  const nb::object& make = is_ragged(a) ? zeros_ : empty_;
  return make(shape, dtype.is_none() ? dtype_of(like.type) : dtype);
}

nb::object DirectArrays::made_lse(const Attention& a) const {
  static const nb::handle fill = interned("fill");
  nb::object lse = made(a, lse_like(a), nb::none());
  if (is_ragged(a)) attribute(lse, fill)(-std::numeric_limits<double>::infinity());
  return lse;
}

nb::object DirectArrays::forward(const DirectOptions& options, nb::handle q, nb::handle k,
                                 nb::handle v, const Named& arrays, nb::object out, nb::object lse,
                                 bool return_lse, bool continue_from) const {
  const bool has_out = !out.is_none(), has_lse = !lse.is_none();
  if (continue_from && !(has_out && has_lse)) refuse("continue_from", "True", "needs results");
  if (has_out && !options.out_type.is_none()) refuse("out_type", "a type", "is that of out");
  const Run run = run_of(options);
  const Reader read(*this, run.device, options.rows_first);
  Attention a = described(options, read, q, k, v, arrays);
  a.continue_from = continue_from;
  if (!has_out) out = made(a, read.ordered(out_like(a)), options.out_type);
  if (!has_lse && return_lse) lse = made_lse(a);
  ForwardOutputs outputs{.out = read.rows("out", out, Access::write)};
  if (!lse.is_none()) outputs.lse = read("lse", lse, Access::write);
  const UsedMap map(a, run);
  without_gil([&] { regard::forward(a, outputs, run); });
  return return_lse ? nb::object(nb::make_tuple(out, lse)) : out;
}

Results DirectArrays::backward(const DirectOptions& options, nb::handle q, nb::handle k,
                               nb::handle v, const Named& arrays, nb::handle dout, nb::handle out,
                               nb::handle lse, nb::handle dlse, nb::handle delta,
                               const Results& wanted, bool into, bool accumulate) const {
  if (accumulate && !into) refuse("accumulate", "True", "needs arrays to add to");
  if (into && !options.out_type.is_none()) refuse("gradient_type", "a type", "is that of into");
  const Run run = run_of(options);
  const Reader read(*this, run.device, options.rows_first);
  Attention a = described(options, read, q, k, v, arrays);
  const BackwardInputs inputs{.out = read.optional_rows("out", out),
                              .lse = read("lse", lse),
                              .dout = read.rows("dout", dout),
                              .dlse = read.optional("dlse", dlse),
                              .delta = read.optional("delta", delta)};
  Gradients gradients{.accumulate = accumulate};
  std::array<nb::object, 5> found;
  // The array for one gradient, if it is wanted; and a view of it.
  const auto take = [&](std::size_t index, const Tensor& like, const nb::object& dtype) {
    nb::object& to = found[index] = wanted[index];
    if (to.is_none()) return Tensor{};
    if (!into) to = made(a, like, dtype);
    return read("a gradient", to, Access::write);
  };
  const auto take_rows = [&](std::size_t index, const Tensor& like) {
    return read.ordered(take(index, read.ordered(like), options.out_type));
  };
  gradients.dq = take_rows(0, a.q);
  gradients.dk = take_rows(1, a.k);
  gradients.dv = take_rows(2, a.v);
  gradients.dbias = take(3, a.bias, options.out_type);
  gradients.dsink = take(4, a.sink, nb::none());  // f32, whatever the type of the others
  const UsedMap map(a, run);
  without_gil([&] { regard::backward(a, inputs, gradients, run); });
  return Results(nb::make_tuple(found[0], found[1], found[2], found[3], found[4]));
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
constexpr int kAligned = 0x100, kNativeOrder = 0x200, kWritable = 0x400;

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

  Tensor viewed(const char* argument, nb::handle array, const Device&,
                Access access) const override {
    static const nb::handle name = interned("__array_struct__");
    const nb::object capsule = attribute(array, name);
    const auto* found =
        static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (!found) throw nb::python_error();
    const ArrayInterface& x = *found;
    if ((x.flags & kAligned) == 0 || (x.flags & kNativeOrder) == 0 || x.rank > Tensor::kMaxRank) {
      refuse(argument, "an array", "has another layout");
    }
    if (access == Access::write && (x.flags & kWritable) == 0) {
      refuse(argument, "an array", "must be writable");
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

  Tensor viewed(const char* argument, nb::handle x, const Device& device, Access) const override {
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
           "out"_a.none(), "lse"_a.none(), "return_lse"_a, "continue_from"_a)
      .def("backward", &DirectArrays::backward, "options"_a, "q"_a, "k"_a, "v"_a, "arrays"_a,
           "dout"_a, "out"_a.none(), "lse"_a, "dlse"_a.none(), "delta"_a.none(), "wanted"_a,
           "into"_a, "accumulate"_a);
  nb::class_<DirectNumPy, DirectArrays>(m, "DirectNumPy", "Calls on NumPy's arrays.")
      .def(nb::init<const Named&>(), "numpy"_a);
  nb::class_<DirectCuPy, DirectArrays>(m, "DirectCuPy", "Calls on CuPy's arrays.")
      .def(nb::init<const Named&>(), "cupy"_a);
}

}  // namespace regard::python
