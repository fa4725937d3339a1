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

constexpr const char* kForward = "_scaled_dot_product_fused_attention_overrideable";
constexpr const char* kBackward = "_scaled_dot_product_fused_attention_overrideable_backward";

std::atomic<TorchThreads*> torch_threads = nullptr;

// What the operator's own arguments cannot say of the call that this thread makes.
struct Calling {
  const CallOptions* options = nullptr;
  Handle kept = nullptr;  // the same, for the backward pass
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
    Tensor tensor = (*this)(argument, x);
    if (has_strided_rows(tensor)) refuse(argument, "a tensor", "has strided rows");
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

// memory: of the call's workspace, on a GPU.
Run run_on(const CallOptions& options, TorchDevice device, TorchMemory& memory) {
  Run run{.threads = options.threads};
  if (!device.is_cpu()) {
    run.device = cuda(device.index);
    run.allocator = memory.allocator();
    check(torch_functions.current_stream(device.index, &run.stream), "name its current stream");
  } else if (run.threads == 0) {
    std::uint32_t count = 0;
    check(torch_functions.num_threads(&count), "count its threads");
    run.threads = static_cast<int>(count);
    if (TorchThreads* const threads = torch_threads) run.executor = threads->executor();
  }
  return run;
}

// Memory of a GPU for one call; the caching allocator reuses it for later work on the stream only.
std::optional<Owned> with_workspace(std::size_t size, TorchDevice device, Run& run) {
  if (size == 0) return std::nullopt;
  Owned memory = bytes_of(size, device);
  run.workspace = {.data = memory.data(), .size = size};
  return memory;
}

// (B, Hq, Sq)
Owned lse_of(const Attention& a, TorchDevice device) {
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

// The values as bytes of a tensor, which autograd keeps for the backward pass, also where it packs
// saved tensors away. Made once for each combination of options, under the interpreter's lock.
const Owned& kept(const DirectOptions& options) {
  if (!options.kept) {
    std::string bytes;
    CallOptions copy = options;
    visit_values(copy, [&](auto& field) {
      static_assert(std::is_trivially_copyable_v<std::decay_t<decltype(field)>>);
      bytes.append(reinterpret_cast<const char*>(&field), sizeof(field));
    });
    auto tensor = std::make_shared<Owned>(bytes_of(bytes.size(), TorchDevice::cpu()));
    std::memcpy(tensor->data(), bytes.data(), bytes.size());
    options.kept = std::move(tensor);
  }
  return *static_cast<const Owned*>(options.kept.get());
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

// Arguments: query, key, value, attn_bias?, dropout_p, is_causal, return_debug_mask, scale?.
// Results: output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset,
// debug_attn_mask. philox_seed holds the options; what autograd need not keep is undefined.
void forward_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  const Owned q(stack[0]), k(stack[1]), v(stack[2]), bias(taken_optional(stack[3]));
  taken_optional(stack[7]);
  if (!calling.options) {
    throw Error(Code::unsupported, "query", "a tensor on this device",
                "this operator is called by regard.torch only; call regard.torch.attention");
  }
  const CallOptions& options = *calling.options;
  const TorchDevice device = device_of(q);
  const Views view(options, device);
  const Attention a = described(options, view, q, k, v, bias);

  Owned out = rows_like(viewed("q", q), a.v.sizes[3], device);
  Owned lse = lse_of(a, device);
  const ForwardOutputs outputs{.out = view.rows("out", out), .lse = viewed("lse", lse)};

  TorchMemory memory(device);
  Run run = run_on(options, device, memory);
  run.gradients_follow = true;
  regard::forward(a, outputs, run);

  std::array<Owned, 4> unused = {Owned::undefined(), Owned::undefined(), Owned::undefined(),
                                 Owned::undefined()};
  stack[0] = out.released();
  stack[1] = lse.released();
  stack[2] = unused[0].released();
  stack[3] = unused[1].released();
  stack[4] = static_cast<Value>(a.q.sizes[2]);
  stack[5] = static_cast<Value>(a.k.sizes[2]);
  stack[6] = Owned::shared(calling.kept).released();
  stack[7] = unused[2].released();
  stack[8] = unused[3].released();
}

// Arguments: grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q,
// cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale?. Results: the
// gradients of query, key, value and attn_bias, undefined where grad_input_mask says so.
void backward_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  const Owned q(stack[1]), k(stack[2]), v(stack[3]), bias(stack[4]), out(stack[6]), lse(stack[7]);
  const Owned cum_seq_q(stack[8]), cum_seq_k(stack[9]), seed(stack[14]), offset(stack[15]);
  Owned dout(stack[0]);
  taken_optional(stack[16]);
  const std::array<bool, 4> wanted = taken_flags(stack[5]);

  if (has_strided_rows(viewed("dout", dout))) dout = contiguous(std::move(dout));  // expanded, say

  const CallOptions options = options_of(seed);
  const TorchDevice device = device_of(q);
  const Views view(options, device);
  const Attention a = described(options, view, q, k, v, bias);
  const BackwardInputs inputs{
      .out = view.rows("out", out), .lse = view("lse", lse), .dout = view.rows("dout", dout)};
  std::array<Owned, 4> found = {Owned::undefined(), Owned::undefined(), Owned::undefined(),
                                Owned::undefined()};
  Gradients gradients;
  const auto make = [&](std::size_t index, const char* name, const Owned& x, Tensor& field) {
    if (!wanted[index] || !x.is_defined()) return;
    const Tensor like = viewed(name, x);
    const auto rank = static_cast<std::size_t>(like.rank);
    const bool rows = index < 3;
    found[index] = rows ? rows_like(like, like.sizes[rank - 1], device)
                        : dense(std::span(like.sizes).first(rank), like.type, device);
    field = rows ? view.rows(name, found[index]) : viewed(name, found[index]);
  };
  make(0, "dq", q, gradients.dq);
  make(1, "dk", k, gradients.dk);
  make(2, "dv", v, gradients.dv);
  make(3, "dbias", bias, gradients.dbias);

  TorchMemory memory(device);
  const Run run = run_on(options, device, memory);
  regard::backward(a, inputs, gradients, run);
  for (std::size_t i = 0; i < found.size(); ++i) stack[i] = found[i].released();
}

void implement(const char* key) {
  torch_abi::LibraryObject* library = nullptr;  // open as long as the process
  check(torch_functions.open_library("aten", key, __FILE__, __LINE__, &library), "open a library");
  check(torch_functions.implement(library, kForward, forward_kernel, torch_abi::kVersion),
        "register an operator");
  check(torch_functions.implement(library, kBackward, backward_kernel, torch_abi::kVersion),
        "register an operator");
}

}  // namespace

// ------------------------------------------------------------------------------------------- calls

TorchAutograd::TorchAutograd(nb::object op) : op_(std::move(op)) {
  implement("CPU");
  if (torch_functions.current_stream) implement("CUDA");
}

void TorchAutograd::use(TorchThreads* threads) { torch_threads = threads; }

nb::object TorchAutograd::forward(const DirectOptions& options, nb::handle q, nb::handle k,
                                  nb::handle v, nb::handle bias) const {
  struct Caller {
    explicit Caller(Calling made) { calling = made; }
    ~Caller() { calling = {}; }
  } caller({&options, kept(options).get()});
  PyObject* const results =
      bias.is_none()
          ? PyObject_CallFunctionObjArgs(op_.ptr(), q.ptr(), k.ptr(), v.ptr(), nullptr)
          : PyObject_CallFunctionObjArgs(op_.ptr(), q.ptr(), k.ptr(), v.ptr(), bias.ptr(), nullptr);
  if (!results) {
    // Also for what the kernel refuses, and for memory that PyTorch has not: the operators say it.
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw nb::python_error();
    PyErr_Clear();
    refuse("q", "a tensor", "is not taken by the operator");
  }
  return nb::object(nb::steal<nb::tuple>(results)[0]);
}

void bind_torch_autograd(nb::module_& m) {
  nb::class_<TorchAutograd>(m, "TorchAutograd", "Calls whose node of autograd is C++.")
      .def(nb::init<nb::object>(), "op"_a);
}

}  // namespace regard::python
