#include "direct.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <regard/cuda.hpp>

#include "gil.hpp"
#include "kept_maps.hpp"
#include "python_attributes.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

void set_attribute(nb::handle object, nb::handle name, nb::handle value) {
  if (PyObject_SetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
}

bool is_true(const nb::object& value) { return value.ptr() == Py_True; }

// Whether the operator with a node in C++ can say the call: at most a bias next to q, k and v.
bool takes_autograd(const DirectOptions& options, const Named& arrays) {
  if (!options.backend.empty() || !options.out_type.is_none()) return false;
  return arrays.size() == 0 || (arrays.size() == 1 && arrays.contains("bias"));
}

TorchDevice torch_device(int device) {
  return device == Array::kHost ? TorchDevice::cpu() : TorchDevice::cuda(device);
}

// A new tensor for lse: (B, Hq, Sq); packed (Hq, total_q).
Made lse_of(const Attention& a, TorchDevice device) {
  const Type type = a.q.type == Type::f64 ? Type::f64 : Type::f32;
  if (a.q.rank == 3) return dense(std::array{a.q.sizes[1], a.q.sizes[0]}, type, device);
  return dense(std::span(a.q.sizes).first(3), type, device);
}

std::int64_t row_size(const Tensor& tensor) {
  return tensor.sizes[static_cast<std::size_t>(tensor.rank - 1)];
}

}  // namespace

// ------------------------------------------------------------------------------- reading tensors

// The tensors of one call: views, and whatever keeps them alive.
class Direct::Reader {
 public:
  Reader(const Direct& direct, bool rows_first) : direct_(direct), rows_first_(rows_first) {}

  int device() const { return device_; }

  // A tensor that a caller gave. Errors: no plain tensor, or on another device than the first.
  Tensor operator()(const char* argument, nb::handle x) {
    direct_.require_plain(argument, x);
    if (is_neg(x)) refuse(argument, "a tensor", "is negated lazily");
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

  // A tensor of the framework, whatever it is.
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

  // What backward reads next to the call's tensors. `saved` begins with out, lse.
  BackwardInputs inputs(const Results& saved, nb::handle dout, nb::handle dlse) {
    return {.out = rows("out", nb::object(saved[0])),
            .lse = (*this)("lse", nb::object(saved[1])),
            .dout = copied_rows("dout", dout),
            .dlse = dlse.is_none() ? Tensor{} : (*this)("dlse", dlse)};
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
      dense_(torch["dense"]),
      apply_(torch["apply"]),
      contiguous_(tensor_.attr("contiguous")),
      hooks_(torch["hooks"]),
      autocast_(nb::cast<std::uint64_t>(nb::object(torch["autocast"]))),
      transforms_(nb::cast<std::uint64_t>(nb::object(torch["transforms"]))),
      torch_threads_(nb::cast<TorchThreads*>(nb::object(torch["torch_threads"]))),
      autograd_(nb::cast<TorchAutograd*>(nb::object(torch["autograd"]))) {
  if (autograd_) autograd_->use(torch_threads_);
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

bool Direct::is_plain() const {
  const torch_abi::Functions& f = torch_functions;
  return f.count_function_modes() == 0 && f.count_dispatch_modes() == 0 &&
         f.keys_are_excluded(autocast_) && !f.keys_are_included(transforms_) && !*f.tracing();
}

bool Direct::wants_grad(nb::handle x) const {
  require_plain("q", x);
  return requires_grad(x);
}

bool Direct::records(nb::handle q, nb::handle k, nb::handle v, const Named& arrays) const {
  if (!is_grad_enabled()) return false;
  bool found = false;
  for (const nb::handle x : {q, k, v}) found = wants_grad(x) || found;
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
  Run run{.allocator = memory.allocator(), .threads = options.threads, .backend = options.backend};
  if (device == Array::kHost) {
    if (run.threads == 0) {
      run.threads = thread_count();
      if (torch_threads_) run.executor = torch_threads_->executor();
    }
    return run;
  }
  run.device = cuda(device);
  if (exchange_->current_stream(nb::device::cuda::value, device, &run.stream) != 0) {
    throw nb::python_error();
  }
  return run;
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
  // Hooks may belong to a checkpoint, which runs a call again, perhaps where a mode is active: what
  // it saves is then what the operators save, in their order.
  const auto has_hooks = [&] { return !hooks_(true).is_none(); };
  if (autograd_ && !return_lse && takes_autograd(values, arrays) && !has_hooks()) {
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
  const TorchDevice device = torch_device(read.device());
  ForwardOutputs outputs;
  nb::object out, lse = nb::none();
  if (options.out_type.is_none()) {
    const Made made = rows_like(read.ordered(a.q), row_size(a.v), device);
    out = object_of(made.owner);
    outputs.out = read.ordered(made.view);
  } else {
    out = dense_(q, row_size(a.v), options.out_type);
    outputs.out = read.ordered(read.made("out", out));
  }
  if (wants_lse) {
    const Made made = lse_of(a, device);
    lse = object_of(made.owner);
    outputs.lse = made.view;
  }
  if (is_ragged(a)) {
    out.attr("zero_")();
    if (wants_lse) lse.attr("fill_")(-std::numeric_limits<double>::infinity());
  }
  TorchMemory memory(device);
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
  const nb::object q = saved[2], k = saved[3], v = saved[4];
  Reader read(*this, options.rows_first);
  Attention a = described(options, read, q, k, v, arrays);
  const BackwardInputs inputs = read.inputs(saved, dout, dlse);
  Gradients gradients;
  std::array<nb::object, 5> found;
  found.fill(nb::none());
  const TorchDevice device = torch_device(read.device());
  const auto make = [&](int index, Tensor& field, const Tensor& like) {
    if (!is_true(nb::object(wanted[index]))) return;
    const bool rows = index < 3;
    const Made made = rows ? rows_like(read.ordered(like), row_size(like), device)
                           : dense(std::span(like.sizes).first(static_cast<std::size_t>(like.rank)),
                                   like.type, device);
    found[index] = object_of(made.owner);
    if (rows && is_ragged(a)) found[index].attr("zero_")();
    field = rows ? read.ordered(made.view) : made.view;
  };
  make(0, gradients.dq, a.q);
  make(1, gradients.dk, a.k);
  make(2, gradients.dv, a.v);
  if (a.bias.given()) make(3, gradients.dbias, a.bias);
  if (a.sink.given()) make(4, gradients.dsink, a.sink);
  TorchMemory memory(device);
  const Run run = run_of(options, read.device(), memory);
  const UsedMap map(a, run);
  without_gil([&] { regard::backward(a, inputs, gradients, run); });
  return Results(nb::make_tuple(found[0], found[1], found[2], found[3], found[4]));
}

void Direct::run_into(const DirectOptions& options, nb::handle q, nb::handle k, nb::handle v,
                      const Named& arrays, nb::handle out, nb::handle lse,
                      bool continue_from) const {
  Reader read(*this, options.rows_first);
  Attention a = described(options, read, q, k, v, arrays);
  a.continue_from = continue_from;
  const ForwardOutputs outputs{.out = read.rows("out", out), .lse = read("lse", lse)};
  TorchMemory memory(torch_device(read.device()));
  const Run run = run_of(options, read.device(), memory);
  const UsedMap map(a, run);
  without_gil([&] { regard::forward(a, outputs, run); });
}

void Direct::gradients_into(const DirectOptions& options, const Results& saved, const Named& arrays,
                            nb::handle dout, nb::handle dlse, const Named& gradients,
                            bool accumulate) const {
  const nb::object q = saved[2], k = saved[3], v = saved[4];
  Reader read(*this, options.rows_first);
  Attention a = described(options, read, q, k, v, arrays);
  const BackwardInputs inputs = read.inputs(saved, dout, dlse);
  Gradients into{.accumulate = accumulate};
  std::size_t found = 0;
  const auto take = [&](const char* name, Tensor& field, bool has_rows) {
    PyObject* const x = PyDict_GetItemString(gradients.ptr(), name);
    if (x) field = has_rows ? read.rows(name, x) : read(name, x), ++found;
  };
  take("dq", into.dq, true);
  take("dk", into.dk, true);
  take("dv", into.dv, true);
  take("dbias", into.dbias, false);
  take("dsink", into.dsink, false);
  if (found != gradients.size()) refuse("gradients", "a name", "is no gradient");
  TorchMemory memory(torch_device(read.device()));
  const Run run = run_of(options, read.device(), memory);
  const UsedMap map(a, run);
  without_gil([&] { regard::backward(a, inputs, into, run); });
}

void Direct::add_rows(nb::handle first, nb::handle second, nb::handle to) const {
  Reader read(*this, false);
  const Tensor a = read("first", first), b = read("second", second), sum = read("to", to);
  if (read.device() == Array::kHost) refuse("to", "a tensor", "must be on a GPU");
  void* stream = nullptr;
  if (exchange_->current_stream(nb::device::cuda::value, read.device(), &stream) != 0) {
    throw nb::python_error();
  }
  without_gil([&] { cuda_memory::add_rows(read.device(), a, b, sum, stream); });
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
           "dout"_a, "dlse"_a.none())
      .def("results_into", &Direct::run_into, "options"_a, "q"_a, "k"_a, "v"_a, "arrays"_a, "out"_a,
           "lse"_a, "continue_from"_a)
      .def("gradients_into", &Direct::gradients_into, "options"_a, "saved"_a, "arrays"_a, "dout"_a,
           "dlse"_a.none(), "gradients"_a, "accumulate"_a)
      .def("add_rows", &Direct::add_rows, "first"_a, "second"_a, "to"_a);
}

}  // namespace regard::python
