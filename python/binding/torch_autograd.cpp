#include "torch_autograd.hpp"

#include <array>
#include <atomic>
#include <cstring>

#include "torch_tensor.hpp"

namespace regard::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using torch_abi::Handle;
using torch_abi::Value;

// An operator whose node of autograd is C++, on devices for which PyTorch has no kernel of it. Both
// passes begin with query, key, value and attn_bias, the backward pass after grad_out. The first
// results are output and logsumexp. Numbers are places among arguments or results.
struct Operator {
  const char* name;
  const char* backward;
  std::size_t scale;                   // an argument of the forward pass
  std::size_t options;                 // a result: philox_seed, which holds the options
  std::array<std::size_t, 4> unused;   // results: tensors that autograd need not keep
  std::array<std::size_t, 2> lengths;  // results; 0 = none
  struct {
    std::size_t out, lse, options, wanted, scale;
    std::array<std::size_t, 3> unused;
  } in_backward;  // arguments
};

// What autograd keeps of a call is less by far with the first one, but it has CUDA kernels.
constexpr Operator kOfCpu = {
    .name = "_scaled_dot_product_efficient_attention",
    .backward = "_scaled_dot_product_efficient_attention_backward",
    .scale = 7,
    .options = 2,
    .unused = {3},
    .lengths = {},
    .in_backward = {.out = 5, .lse = 6, .options = 7, .wanted = 10, .scale = 12, .unused = {8}}};
constexpr Operator kOfCuda = {
    .name = "_scaled_dot_product_fused_attention_overrideable",
    .backward = "_scaled_dot_product_fused_attention_overrideable_backward",
    .scale = 7,
    .options = 6,
    .unused = {2, 3, 7, 8},
    .lengths = {4, 5},
    .in_backward = {
        .out = 6, .lse = 7, .options = 14, .wanted = 5, .scale = 16, .unused = {8, 9, 15}}};

std::atomic<TorchThreads*> torch_threads = nullptr;

// What the operator's own arguments cannot say of the call that this thread makes.
struct Calling {
  const CallOptions* options = nullptr;
  Handle kept = nullptr;  // the same, for the backward pass
  bool ran = false;       // whether the kernel here has run
};
thread_local Calling calling;

// ------------------------------------------------------------------------------------- both passes

// The tensors of one call. Throws Code::invalid_argument where one is on another device than q.
class Views {
 public:
  Views(const CallOptions& options, TorchDevice device) : options_(options), device_(device) {}

  Tensor operator()(const char* argument, const Owned& x) const {
    if (!(device_of(x) == device_)) refuse(argument, "a tensor", "is on another device");
    return viewed(argument, x);
  }
  // As (B, H, S, D), whatever the layout. Error: the rows are not dense.
  Tensor rows(const char* argument, const Owned& x) const {
    const Tensor tensor = (*this)(argument, x);
    if (has_strided_rows(tensor)) refuse(argument, "a tensor", "has strided rows");
    return ordered(tensor);
  }
  // From PyTorch's order of axes to (B, H, S, D), or back.
  Tensor ordered(Tensor tensor) const {
    if (options_.rows_first && tensor.rank == 4) swap_rows_and_heads(tensor);
    return tensor;
  }

 private:
  const CallOptions& options_;
  TorchDevice device_;
};

Attention described(const CallOptions& options, const Views& view, const Owned& q, const Owned& k,
                    const Owned& v, const Owned& bias) {
  Attention a = options.attention;
  a.q = view.rows("q", q);
  a.k = view.rows("k", k);
  a.v = view.rows("v", v);
  if (bias.is_defined()) a.bias = view("bias", bias);
  require_direct(options, a);
  return a;
}

// memory: of the call's workspace.
Run run_on(const CallOptions& options, TorchDevice device, TorchMemory& memory) {
  Run run{.allocator = memory.allocator(), .threads = options.threads};
  if (!device.is_cpu()) {
    run.device = cuda(device.index);
    check(torch_functions.current_stream(device.index, &run.stream), "name its current stream");
  } else if (run.threads == 0) {
    run.threads = thread_count();
    if (TorchThreads* const threads = torch_threads) run.executor = threads->executor();
  }
  return run;
}

// (B, Hq, Sq)
Made lse_of(const Attention& a, TorchDevice device) {
  return dense(std::span(a.q.sizes).first(3), a.q.type == Type::f64 ? Type::f64 : Type::f32,
               device);
}

// --------------------------------------------------------------- options between the two passes

// Visits the values of a call, as objects of bytes: arrays are the operator's own arguments.
template <class Options, class Visit>
void visit_values(Options& options, Visit&& visit) {
  visit_options(options.attention, [&](const char*, auto& field) {
    if constexpr (!std::is_same_v<std::decay_t<decltype(field)>, Tensor>) visit(field);
  });
  visit(options.rows_first);
  visit(options.is_causal);
  visit(options.equal_heads);
  visit(options.threads);
}

// A tensor with its object of Python, because PyTorch would make one in each call; and another
// owner, because PyTorch takes the interpreter's lock where a tensor's object becomes its only
// owner.
struct Kept {
  Owned tensor;
  nb::object object;
};

// The values as bytes of a tensor, which autograd keeps for the backward pass, also where it packs
// saved tensors away. Made once for each combination of options, under the interpreter's lock.
Handle kept(const DirectOptions& options) {
  if (!options.kept) {
    std::string bytes;
    CallOptions copy = options;
    visit_values(copy, [&](auto& field) {
      static_assert(std::is_trivially_copyable_v<std::decay_t<decltype(field)>>);
      bytes.append(reinterpret_cast<const char*>(&field), sizeof(field));
    });
    Owned tensor = bytes_of(bytes.size(), TorchDevice::cpu());
    std::memcpy(tensor.data(), bytes.data(), bytes.size());
    nb::object object = object_of(tensor);
    options.kept = std::make_shared<Kept>(Kept{std::move(tensor), std::move(object)});
  }
  return static_cast<const Kept*>(options.kept.get())->tensor.get();
}

CallOptions options_of(const Owned& kept) {
  CallOptions options;
  std::int64_t wanted = 0, count = 0;
  visit_values(options, [&](auto& field) { wanted += sizeof(field); });
  if (kept.is_defined()) check(torch_functions.count(kept.get(), &count), "read a tensor");
  if (count != wanted || !device_of(kept).is_cpu()) {
    refuse("philox_seed", "a tensor", "must be what the forward pass has returned");
  }
  const auto* at = static_cast<const char*>(kept.data());
  visit_values(options, [&](auto& field) {
    std::memcpy(&field, at, sizeof(field));
    at += sizeof(field);
  });
  return options;
}

// ----------------------------------------------------------------------------------------- kernels

template <const Operator& op>
void forward_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  const Owned q(stack[0]), k(stack[1]), v(stack[2]), bias(taken_optional(stack[3]));
  taken_optional(stack[op.scale]);
  if (!calling.options) {
    throw Error(Code::unsupported, "query", "a tensor on this device",
                "this operator is called by regard.torch only; call regard.torch.attention");
  }
  calling.ran = true;
  const CallOptions& options = *calling.options;
  const TorchDevice device = device_of(q);
  const Views view(options, device);
  const Attention a = described(options, view, q, k, v, bias);

  Made out = rows_like(view.ordered(a.q), a.v.sizes[3], device);
  Made lse = lse_of(a, device);
  const ForwardOutputs outputs{.out = view.ordered(out.view), .lse = lse.view};

  TorchMemory memory(device);
  Run run = run_on(options, device, memory);
  run.gradients_follow = true;
  regard::forward(a, outputs, run);

  for (const std::size_t place : op.unused) {
    if (place > 0) stack[place] = Owned::undefined().released();
  }
  if (op.lengths[0] > 0) {
    stack[op.lengths[0]] = static_cast<Value>(a.q.sizes[2]);
    stack[op.lengths[1]] = static_cast<Value>(a.k.sizes[2]);
  }
  stack[0] = out.owner.released();
  stack[1] = lse.owner.released();
  stack[op.options] = Owned::shared(calling.kept).released();
}

// Results: the gradients of query, key, value and attn_bias, undefined where they are not wanted.
template <const Operator& op>
void backward_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  constexpr auto at = op.in_backward;
  const Owned q(stack[1]), k(stack[2]), v(stack[3]), bias(stack[4]), out(stack[at.out]),
      lse(stack[at.lse]), kept_options(stack[at.options]);
  Owned dout(stack[0]);
  for (const std::size_t place : at.unused) {
    if (place > 0) Owned unused(stack[place]);
  }
  taken_optional(stack[at.scale]);
  const std::array<bool, 4> wanted = taken_flags(stack[at.wanted]);

  // Nobody uses out: then no gradient is defined either.
  if (!dout.is_defined()) {
    for (std::size_t i = 0; i < wanted.size(); ++i) stack[i] = Owned::undefined().released();
    return;
  }
  if (has_strided_rows(viewed("dout", dout))) dout = contiguous(std::move(dout));  // expanded, say

  const CallOptions options = options_of(kept_options);
  const TorchDevice device = device_of(q);
  const Views view(options, device);
  const Attention a = described(options, view, q, k, v, bias);
  const BackwardInputs inputs{
      .out = view.rows("out", out), .lse = view("lse", lse), .dout = view.rows("dout", dout)};
  std::array<Owned, 4> found = {Owned::undefined(), Owned::undefined(), Owned::undefined(),
                                Owned::undefined()};
  Gradients gradients;
  const auto make = [&](std::size_t index, const Tensor& x, Tensor& field) {
    if (!wanted[index] || !x.given()) return;
    const auto rank = static_cast<std::size_t>(x.rank);
    const bool rows = index < 3;
    Made made = rows ? rows_like(view.ordered(x), x.sizes[rank - 1], device)
                     : dense(std::span(x.sizes).first(rank), x.type, device);
    found[index] = std::move(made.owner);
    field = rows ? view.ordered(made.view) : made.view;
  };
  make(0, a.q, gradients.dq);
  make(1, a.k, gradients.dk);
  make(2, a.v, gradients.dv);
  make(3, a.bias, gradients.dbias);

  TorchMemory memory(device);
  const Run run = run_on(options, device, memory);
  regard::backward(a, inputs, gradients, run);
  for (std::size_t i = 0; i < found.size(); ++i) stack[i] = found[i].released();
}

template <const Operator& op>
void implement(const char* key) {
  torch_abi::LibraryObject* library = nullptr;  // open as long as the process
  check(torch_functions.open_library("aten", key, __FILE__, __LINE__, &library), "open a library");
  check(torch_functions.implement(library, op.name, forward_kernel<op>, torch_abi::kVersion),
        "register an operator");
  check(torch_functions.implement(library, op.backward, backward_kernel<op>, torch_abi::kVersion),
        "register an operator");
}

}  // namespace

// ------------------------------------------------------------------------------------------- calls

TorchAutograd::TorchAutograd(nb::object on_cpu, nb::object on_cuda)
    : on_cpu_(std::move(on_cpu)), on_cuda_(std::move(on_cuda)) {
  implement<kOfCpu>("CPU");
  if (torch_functions.current_stream) implement<kOfCuda>("CUDA");
}

void TorchAutograd::use(TorchThreads* threads) { torch_threads = threads; }

nb::object TorchAutograd::forward(const DirectOptions& options, nb::handle q, nb::handle k,
                                  nb::handle v, nb::handle bias) const {
  struct Caller {
    explicit Caller(Calling made) { calling = made; }
    ~Caller() { calling = {}; }
  } caller({.options = &options, .kept = kept(options)});
  const std::int32_t device = device_type_of(q);
  for (const nb::handle x : {k, v, bias}) {
    // PyTorch has kernels of its own for tensors of several devices, meta among them.
    if (!x.is_none() && device_type_of(x) != device) refuse("q", "a tensor", "is elsewhere");
  }
  const bool is_cpu = device == torch_functions.cpu();
  PyObject* const results =
      is_cpu ? PyObject_CallFunctionObjArgs(on_cpu_.ptr(), q.ptr(), k.ptr(), v.ptr(), bias.ptr(),
                                            Py_True, nullptr)
             : PyObject_CallFunctionObjArgs(on_cuda_.ptr(), q.ptr(), k.ptr(), v.ptr(), bias.ptr(),
                                            nullptr);
  if (!results) {
    // Also for what the kernel refuses, and for memory that PyTorch has not: the operators say it.
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw nb::python_error();
    PyErr_Clear();
    refuse("q", "a tensor", "is not taken by the operator");
  }
  const auto found = nb::steal<nb::tuple>(results);
  if (!calling.ran) refuse("q", "a tensor", "went to another kernel");
  return nb::object(found[0]);
}

void bind_torch_autograd(nb::module_& m) {
  nb::class_<TorchAutograd>(m, "TorchAutograd", "Calls whose node of autograd is C++.")
      .def(nb::init<nb::object, nb::object>(), "on_cpu"_a, "on_cuda"_a);
}

}  // namespace regard::python
