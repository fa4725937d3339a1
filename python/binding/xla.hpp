// The library's calls as functions that XLA puts into its programs.
#pragma once

#include <nanobind/nanobind.h>

namespace regard::python {

// {(name, platform): capsule} for jax.ffi.register_ffi_target; the names are "regard_forward" and
// "regard_backward", the platforms "cpu" and "CUDA".
//
// A call names its operands and results in two attributes, "operands" and "results": a list such as
// "q k v bias" of the fields of Attention, BackwardInputs, ForwardOutputs and Gradients. Options
// that are no arrays are attributes of their own: 64-bit integers, float64 or text, the window as
// "window_left" and "window_right"; a scale that is absent is the default. So are "layout",
// "threads" and "backend". "dropout_seed" may be an operand of two uint32, low and high, instead.
// Operands named "zeros" are the initial values of results, and are not read.
nanobind::typed<nanobind::dict, nanobind::any, nanobind::any> xla_handlers();

}  // namespace regard::python
