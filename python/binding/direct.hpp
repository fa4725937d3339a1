// Calls on PyTorch's tensors that do not go through its dispatcher: one call of C++ for each pass.
#pragma once

#include "direct_options.hpp"
#include "dlpack_abi.hpp"
#include "torch_autograd.hpp"
#include "torch_tensor.hpp"
#include "torch_threads.hpp"

namespace regard::python {

// Each function throws Code::invalid_argument for a call that it cannot take: the operators then
// take it, or refuse it with all of their advice.
class Direct {
 public:
  // After load_torch.
  //
  // Objects of PyTorch by name: `tensor` and `parameter`, the two classes; `exchange`, DLPack's
  // capsule; `autocast` and `transforms`, the dispatch keys of autocast and of torch.func, as bits;
  // `dense(like, size, type)`, which makes a tensor for rows of `size` elements; `apply`, which
  // records a call for autograd; `torch_threads`, a TorchThreads or None; `autograd`, a
  // TorchAutograd or None; `hooks(True)`, the hooks for saved tensors or None.
  explicit Direct(const Named& torch);

  // out, or (out, lse); with a gradient through `autograd` or `apply`. None where a mode is active.
  nanobind::object forward(const nanobind::object& options, nanobind::handle q, nanobind::handle k,
                           nanobind::handle v, const Named& arrays, bool return_lse);

  // The forward pass of the autograd function: what `forward` returns. `ctx` keeps the call.
  nanobind::object record(nanobind::handle ctx, nanobind::handle q, nanobind::handle k,
                          nanobind::handle v, nanobind::handle bias, nanobind::handle sink,
                          const nanobind::object& options, const Named& arrays, bool return_lse);

  // A gradient for each argument of `record` after ctx, None where it has none. `saved` are the
  // tensors that `record` saved. None where a mode is active or gradients are recorded.
  nanobind::object backward(nanobind::handle ctx, const Results& saved, nanobind::handle dout,
                            nanobind::handle dlse);

  // What the operators ask before they run a pass: whether no mode is active, whether gradients are
  // recorded at all, and whether any is of this call.
  bool is_plain() const;
  bool is_grad_enabled() const { return torch_functions.is_grad_enabled(); }
  bool records(nanobind::handle q, nanobind::handle k, nanobind::handle v,
               const Named& arrays) const;

  // The two passes alone: no mode is asked for, and nothing is recorded for autograd.
  //
  // run: (out, lse), or (out, None). gradients_follow: as Run's.
  Results run(const DirectOptions& options, nanobind::handle q, nanobind::handle k,
              nanobind::handle v, const Named& arrays, bool wants_lse, bool gradients_follow);
  // gradients: of q, k, v, bias and sink, None where `wanted` says False. `saved` begins with out,
  // lse, q, k, v.
  Results gradients(const DirectOptions& options, const Wanted& wanted, const Results& saved,
                    const Named& arrays, nanobind::handle dout, nanobind::handle dlse);

  // Likewise into tensors of the caller. gradients: by name, "dq" and so on; not those of a mask.
  void run_into(const DirectOptions& options, nanobind::handle q, nanobind::handle k,
                nanobind::handle v, const Named& arrays, nanobind::handle out, nanobind::handle lse,
                bool continue_from) const;
  void gradients_into(const DirectOptions& options, const Results& saved, const Named& arrays,
                      nanobind::handle dout, nanobind::handle dlse, const Named& gradients,
                      bool accumulate) const;
  // to = first + second, of rank 4, on a GPU: cuda_memory::add_rows on PyTorch's current stream.
  void add_rows(nanobind::handle first, nanobind::handle second, nanobind::handle to) const;

 private:
  class Reader;
  static constexpr std::size_t kSaved = 5;  // out, lse, q, k, v; then the arrays

  void require_plain(const char* argument, nanobind::handle x) const;
  bool wants_grad(nanobind::handle x) const;
  // memory: of the call's workspace.
  Run run_of(const DirectOptions& options, int device, TorchMemory& memory) const;
  const dlpack::ExchangeApi* exchange_ = nullptr;
  nanobind::object tensor_, parameter_, dense_, apply_, contiguous_, hooks_;
  nanobind::tuple no_names_;
  std::uint64_t autocast_ = 0, transforms_ = 0;  // sets of dispatch keys
  TorchThreads* torch_threads_ = nullptr;        // both live as long as the process
  TorchAutograd* autograd_ = nullptr;
};

void bind_direct(nanobind::module_& m);

}  // namespace regard::python
