// Calls on PyTorch's tensors that do not go through its dispatcher: one call of C++ for each pass.
#pragma once

#include "direct_options.hpp"
#include "dlpack_abi.hpp"
#include "torch_autograd.hpp"
#include "torch_tensor.hpp"
#include "torch_threads.hpp"

namespace regard::python {

// Whether every function returns something false.
bool are_false(const std::vector<nanobind::object>& functions);

// Each function throws Code::invalid_argument for a call that it cannot take: the operators then
// take it, or refuse it with all of their advice.
class Direct {
 public:
  // After load_torch.
  //
  // Objects of PyTorch by name: `tensor` and `parameter`, the two classes; `exchange`, DLPack's
  // capsule; `modes`, functions that return something false where a direct call is possible;
  // `is_grad_enabled`, `num_threads`, `float32`; `dense(like, size, type)`, which makes a
  // tensor for rows of `size` elements; `apply`, which records a call for autograd;
  // `torch_threads`, a TorchThreads or None; `autograd`, a TorchAutograd or None.
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
  bool is_plain() const { return are_false(modes_); }
  bool is_grad_enabled() const;
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

 private:
  class Reader;
  static constexpr std::size_t kSaved = 5;  // out, lse, q, k, v; then the arrays

  void require_plain(const char* argument, nanobind::handle x) const;
  bool wants_grad(nanobind::handle x) const;
  // memory: of the call's workspace, on a GPU.
  Run run_of(const DirectOptions& options, int device, TorchMemory& memory) const;
  nanobind::object rows_like(nanobind::handle x, const Tensor& tensor, std::int64_t size,
                             nanobind::handle type) const;
  nanobind::object lse_of(nanobind::handle q, const Attention& attention) const;

  const dlpack::ExchangeApi* exchange_ = nullptr;
  nanobind::object tensor_, parameter_, is_grad_enabled_, num_threads_, float32_;
  nanobind::object dense_, apply_, empty_like_, is_neg_, contiguous_, new_empty_, new_strided_;
  nanobind::tuple no_names_;
  std::vector<nanobind::object> modes_;
  TorchThreads* torch_threads_ = nullptr;  // both live as long as the process
  TorchAutograd* autograd_ = nullptr;
};

void bind_direct(nanobind::module_& m);

}  // namespace regard::python
