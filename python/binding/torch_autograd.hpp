// The two passes as kernels of an operator of PyTorch whose node of autograd is C++, so that a call
// with gradients enters no Python: aten::_scaled_dot_product_fused_attention_overrideable, which
// PyTorch keeps for attention from outside, and which has no kernel of its own.
#pragma once

#include "direct_options.hpp"
#include "torch_threads.hpp"

namespace regard::python {

class TorchAutograd {
 public:
  // Registers the kernels for CPUs, and for CUDA where this PyTorch has it. For one object in a
  // process, after load_torch. Arguments: functions of Python that call the two operators.
  TorchAutograd(nanobind::object on_cpu, nanobind::object on_cuda);

  // The threads of calls on the CPU; null for the library's own.
  void use(TorchThreads* threads);

  // out; with the gradients of q, k, v and bias recorded. bias may be None. Throws
  // Code::invalid_argument for a call that the operator cannot take.
  nanobind::object forward(const DirectOptions& options, nanobind::handle q, nanobind::handle k,
                           nanobind::handle v, nanobind::handle bias) const;

 private:
  nanobind::object on_cpu_, on_cuda_;
};

void bind_torch_autograd(nanobind::module_& m);

}  // namespace regard::python
