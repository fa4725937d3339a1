#include "direct.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "gil.hpp"
#include "kept_maps.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

nb::object attribute(nb::handle object, nb::handle name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

// A name that is looked up in every call.
nb::handle interned(const char* name) { return PyUnicode_InternFromString(name); }

void set_attribute(nb::handle object, nb::handle name, nb::handle value) {
  if (PyObject_SetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
}

nb::object called(const nb::object& function) {
  PyObject* const result = PyObject_CallNoArgs(function.ptr());
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

bool is_true(const nb::object& value) { return value.ptr() == Py_True; }

bool is_false(const nb::object& value) {
  return value.ptr() == Py_False || value.is_none() || PyObject_IsTrue(value.ptr()) == 0;
}

// Whether the operator with a node in C++ can say the call: at most a bias next to q, k and v.
bool takes_autograd(const DirectOptions& options, const Named& arrays) {
  if (!options.backend.empty() || !options.out_type.is_none()) return false;
  return arrays.size() == 0 || (arrays.size() == 1 && arrays.contains("bias"));
}

TorchMemory memory_of(int device) {
  return TorchMemory(device == Array::kHost ? TorchDevice::cpu() : TorchDevice::cuda(device));
}

nb::tuple tuple_of(const std::array<std::int64_t, 3>& numbers, int rank) {
  return rank == 2 ? nb::make_tuple(numbers[0], numbers[1])
                   : nb::make_tuple(numbers[0], numbers[1], numbers[2]);
}

}  // namespace

bool are_false(const std::vector<nb::object>& functions) {
  return std::all_of(functions.begin(), functions.end(),
                     [](const nb::object& function) { return is_false(called(function)); });
}

// ------------------------------------------------------------------------------- reading tensors

// The tensors of one call: views, and whatever keeps them alive.
class Direct::Reader {
 public:
  Reader(const Direct& direct, bool rows_first) : direct_(direct), rows_first_(rows_first) {}

  int device() const { return device_; }

  // A tensor that a caller gave. Errors: no plain tensor, or on another device than the first.
  Tensor operator()(const char* argument, nb::handle x) {
    direct_.require_plain(argument, x);
    if (is_true(direct_.is_neg_(x))) refuse(argument, "a tensor", "is negated lazily");
    return made(argument, x);
  }

  // A tensor with rows of vectors, as (B, H, S, D). Errors: also where a row is not dense.
  Tensor rows(const char* argument, nb::handle x) {
    const Tensor tensor = (*this)(argument, x);
    if (has_strided_rows(tensor)) refuse(argument, "a tensor", "has strided rows");
    return ordered(tensor);
  }

  // The same; strided rows are copied. A gradient is often one number that is expanded.
  Tensor copied_rows(const char* argument, nb::handle x) {
    Tensor tensor = (*this)(argument, x);
    if (has_strided_rows(tensor)) {
      copy_ = direct_.contiguous_(x);
      tensor = made(argument, copy_);
    }
    return ordered(tensor);
  }

  // A tensor that the framework has just made.
  Tensor made(const char* argument, nb::handle x) {
    dlpack::View view;
    if (direct_.exchange_->view_of_object(x.ptr(), &view) != 0) {
      PyErr_Clear();
      refuse(argument, "a tensor", "cannot be read");
    }
    const int device = device_of_dlpack(view.device.type, view.device.index, argument);
    if (device_ == kNone) device_ = device;
    if (device != device_) refuse(argument, "a tensor", "is on another device");
    if (view.rank > Tensor::kMaxRank) refuse(argument, "a tensor", "has too many dimensions");
    Tensor tensor;
    tensor.data = static_cast<char*>(view.data) + view.byte_offset;
    tensor.type = type_of_dlpack(view.type.code, view.type.bits, view.type.lanes);
    if (tensor.type == Type::none) refuse(argument, "a tensor", "has another element type");
    tensor.rank = view.rank;
    std::copy_n(view.sizes, view.rank, tensor.sizes.begin());
    std::copy_n(view.strides, view.rank, tensor.strides.begin());
    return tensor;
  }

  // (B, H, S, D), whatever the layout.
  Tensor ordered(Tensor tensor) const {
    if (rows_first_ && tensor.rank == 4) swap_rows_and_heads(tensor);
    return tensor;
  }

 private:
  static constexpr int kNone = -2;

  const Direct& direct_;
  bool rows_first_;
  int device_ = kNone;
  nb::object copy_;
};

Direct::Direct(const Named& torch)
    : tensor_(torch["tensor"]),
      parameter_(torch["parameter"]),
      is_grad_enabled_(torch["is_grad_enabled"]),
      num_threads_(torch["num_threads"]),
      float32_(torch["float32"]),
      dense_(torch["dense"]),
      apply_(torch["apply"]),
      empty_like_(torch["empty_like"]),
      is_neg_(tensor_.attr("is_neg")),
      contiguous_(tensor_.attr("contiguous")),
      new_empty_(tensor_.attr("new_empty")),
      new_strided_(tensor_.attr("new_empty_strided")),
      torch_threads_(nb::cast<TorchThreads*>(nb::object(torch["torch_threads"]))),
      autograd_(nb::cast<TorchAutograd*>(nb::object(torch["autograd"]))) {
  if (autograd_) autograd_->use(torch_threads_);
  for (nb::handle mode : nb::object(torch["modes"])) modes_.push_back(nb::borrow(mode));
  void* const api = PyCapsule_GetPointer(nb::object(torch["exchange"]).ptr(), dlpack::kCapsule);
  if (!api) throw nb::python_error();
  exchange_ = static_cast<const dlpack::ExchangeApi*>(api);
  if (exchange_->version.major != dlpack::kMajorVersion || !exchange_->view_of_object) {
    refuse("exchange", "an interface of DLPack", "has another version");
  }
}

void Direct::require_plain(const char* argument, nb::handle x) const {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(x.ptr()));
  if (type != tensor_.ptr() && type != parameter_.ptr()) {
    refuse(argument, "an object", "must be a plain tensor");
  }
}

bool Direct::wants_grad(nb::handle x) const {
  static const nb::handle name = interned("requires_grad");
  require_plain("q", x);
  return is_true(attribute(x, name));
}

bool Direct::is_grad_enabled() const { return is_true(called(is_grad_enabled_)); }

bool Direct::records(nb::handle q, nb::handle k, nb::handle v, const Named& arrays) const {
  if (!is_grad_enabled()) return false;
  bool found = wants_grad(q) || wants_grad(k) || wants_grad(v);
  for (const auto [name, x] : arrays) {
    if (!wants_grad(x)) continue;
    found = true;
    const std::string argument = nb::cast<std::string>(name);
    if (argument != "bias" && argument != "sink") refuse(argument.c_str(), "a tensor", "no grad");
  }
  return found;
}

// ----------------------------------------------------------------------------------------- a pass

Run Direct::run_of(const DirectOptions& options, int device, TorchMemory& memory) const {
  Run run{.threads = options.threads, .backend = options.backend};
  if (device == Array::kHost) {
    if (run.threads == 0) {
      run.threads = nb::cast<int>(called(num_threads_));
      if (torch_threads_) run.executor = torch_threads_->executor();
    }
    return run;
  }
  run.device = cuda(device);
  run.allocator = memory.allocator();
  if (exchange_->current_stream(nb::device::cuda::value, device, &run.stream) != 0) {
    throw nb::python_error();
  }
  return run;
}

nb::object Direct::rows_like(nb::handle x, const Tensor& tensor, std::int64_t size,
                             nb::handle type) const {
  const int last = tensor.rank - 1;
  if (type.is_none() && tensor.sizes[last] == size && tensor.strides[last] == 1) {
    return empty_like_(x);
  }
  return dense_(x, size, type);
}

nb::object Direct::lse_of(nb::handle q, const Attention& a) const {
  // (B, Hq, Sq); packed (Hq, total_q)
  const bool packed = a.q.rank == 3;
  const std::array<std::int64_t, 3> sizes =
      packed ? std::array{a.q.sizes[1], a.q.sizes[0], std::int64_t{1}}
             : std::array{a.q.sizes[0], a.q.sizes[1], a.q.sizes[2]};
  const nb::tuple strides = tuple_of({sizes[1] * sizes[2], sizes[2], 1}, packed ? 2 : 3);
  const nb::tuple shape = tuple_of(sizes, packed ? 2 : 3);
  if (a.q.type == Type::f32 || a.q.type == Type::f64) return new_strided_(q, shape, strides);
  return new_strided_(q, shape, strides, "dtype"_a = float32_);
}

nb::object Direct::forward(const nb::object& options, nb::handle q, nb::handle k, nb::handle v,
                           const Named& arrays, bool return_lse) {
  if (!is_plain()) return nb::none();
  const auto& values = nb::cast<const DirectOptions&>(options);
  if (!records(q, k, v, arrays)) {
    Results results = run(values, q, k, v, arrays, return_lse, false);
    return return_lse ? nb::object(results) : nb::object(results[0]);
  }
  const auto given = [&](const char* name) {
    return nb::object(arrays.size() > 0 ? arrays.attr("get")(name) : nb::none());
  };
  if (autograd_ && !return_lse && takes_autograd(values, arrays)) {
    return autograd_->forward(values, q, k, v, given("bias"));
  }
  return apply_(q, k, v, given("bias"), given("sink"), options, arrays, return_lse);
}

nb::object Direct::record(nb::handle ctx, nb::handle q, nb::handle k, nb::handle v, nb::handle,
                          nb::handle, const nb::object& options, const Named& arrays,
                          bool return_lse) {
  static const nb::handle options_name = interned("options"), names_name = interned("names"),
                          save = interned("save_for_backward"),
                          materialize = interned("set_materialize_grads");
  Results results = run(nb::cast<const DirectOptions&>(options), q, k, v, arrays, true, true);
  nb::object saved = nb::make_tuple(results[0], results[1], q, k, v);
  nb::object names = no_names_;
  if (arrays.size() > 0) {
    names = nb::tuple(arrays.keys());
    saved = saved + nb::tuple(arrays.values());
  }
  attribute(ctx, save)(*saved);
  attribute(ctx, materialize)(false);
  set_attribute(ctx, options_name, options);
  set_attribute(ctx, names_name, names);
  return return_lse ? nb::object(results) : nb::object(results[0]);
}

Results Direct::run(const DirectOptions& options, nb::handle q, nb::handle k, nb::handle v,
                    const Named& arrays, bool wants_lse, bool gradients_follow) {
  Reader read(*this, options.rows_first);
  Attention a = described(options, read, q, k, v, arrays);
  const nb::object out =
      rows_like(q, a.q, a.v.sizes[static_cast<std::size_t>(a.v.rank - 1)], options.out_type);
  const nb::object lse = wants_lse ? lse_of(q, a) : nb::none();
  if (is_ragged(a)) {
    out.attr("zero_")();
    if (wants_lse) lse.attr("fill_")(-std::numeric_limits<double>::infinity());
  }
  ForwardOutputs outputs{.out = read.ordered(read.made("out", out))};
  if (wants_lse) outputs.lse = read.made("lse", lse);
  TorchMemory memory = memory_of(read.device());
  Run run = run_of(options, read.device(), memory);
  run.gradients_follow = gradients_follow;
  const UsedMap map(a, run);
  without_gil([&] { regard::forward(a, outputs, run); });
  return Results(nb::make_tuple(out, lse));
}

nb::object Direct::backward(nb::handle ctx, const Results& saved, nb::handle dout,
                            nb::handle dlse) {
  static const nb::handle options_name = interned("options"), names_name = interned("names"),
                          wanted_name = interned("needs_input_grad");
  if (is_grad_enabled() || !is_plain()) return nb::none();
  const nb::object options = attribute(ctx, options_name);
  const nb::tuple names(attribute(ctx, names_name));
  Named arrays;
  for (std::size_t i = 0; i < names.size(); ++i) arrays[names[i]] = saved[kSaved + i];
  const Results found =
      gradients(nb::cast<const DirectOptions&>(options),
                nb::borrow<Wanted>(attribute(ctx, wanted_name)), saved, arrays, dout, dlse);
  return found + nb::make_tuple(nb::none(), nb::none(), nb::none());
}

Results Direct::gradients(const DirectOptions& options, const Wanted& wanted, const Results& saved,
                          const Named& arrays, nb::handle dout, nb::handle dlse) {
  const nb::object out = saved[0], lse = saved[1], q = saved[2], k = saved[3], v = saved[4];
  Reader read(*this, options.rows_first);
  Attention a = described(options, read, q, k, v, arrays);
  const BackwardInputs inputs{.out = read.rows("out", out),
                              .lse = read("lse", lse),
                              .dout = read.copied_rows("dout", dout),
                              .dlse = dlse.is_none() ? Tensor{} : read("dlse", dlse)};
  Gradients gradients;
  std::array<nb::object, 5> found;
  found.fill(nb::none());
  const auto make = [&](int index, Tensor& field, nb::handle x, const Tensor& tensor) {
    if (!is_true(nb::object(wanted[index]))) return;
    const bool rows = index < 3;
    found[index] = rows ? rows_like(x, tensor, tensor.sizes[tensor.rank - 1], nb::none())
                        : new_empty_(x, x.attr("shape"));
    if (rows && is_ragged(a)) found[index].attr("zero_")();
    field = read.made("gradient", found[index]);
    if (rows) field = read.ordered(field);
  };
  make(0, gradients.dq, q, a.q);
  make(1, gradients.dk, k, a.k);
  make(2, gradients.dv, v, a.v);
  if (a.bias.given()) make(3, gradients.dbias, nb::object(arrays["bias"]), a.bias);
  if (a.sink.given()) make(4, gradients.dsink, nb::object(arrays["sink"]), a.sink);
  TorchMemory memory = memory_of(read.device());
  const Run run = run_of(options, read.device(), memory);
  const UsedMap map(a, run);
  without_gil([&] { regard::backward(a, inputs, gradients, run); });
  return Results(nb::make_tuple(found[0], found[1], found[2], found[3], found[4]));
}

void bind_direct(nb::module_& m) {
  nb::class_<Direct>(m, "Direct", "Calls on PyTorch's tensors, without its dispatcher.")
      .def(nb::init<const Named&>(), "torch"_a)
      .def("forward", &Direct::forward, "options"_a, "q"_a, "k"_a, "v"_a, "arrays"_a,
           "return_lse"_a)
      .def("record", &Direct::record, "ctx"_a, "q"_a, "k"_a, "v"_a, "bias"_a.none(),
           "sink"_a.none(), "options"_a, "arrays"_a, "return_lse"_a)
      .def("backward", &Direct::backward, "ctx"_a, "saved"_a, "dout"_a, "dlse"_a.none())
      .def(
          "results",
          [](Direct& self, const DirectOptions& options, nb::handle q, nb::handle k, nb::handle v,
             const Named& arrays) { return self.run(options, q, k, v, arrays, true, false); },
          "options"_a, "q"_a, "k"_a, "v"_a, "arrays"_a)
      .def("gradients", &Direct::gradients, "options"_a, "wanted"_a, "saved"_a, "arrays"_a,
           "dout"_a, "dlse"_a.none());
}

}  // namespace regard::python
