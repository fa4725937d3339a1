"""The library's two passes as operators of PyTorch: shapes, gradients, autocast.

`regard::forward` returns out and lse, `regard::backward` those gradients that are wanted. Both
depend on their arguments alone. Kernels are registered with the dispatcher directly, because
`torch.library.custom_op` adds checks to every call that take as long as the call itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import Unsupported, refuse
from . import batching
from .direct import backward_kernel, forward_kernel, operators_calls
from .kernels import (ARGUMENTS, TENSORS, VALUES, backward_results, call_of, forward_results,
                      require_device)

_TYPES = {float: "float", type(None): "float?", bool: "bool", int: "SymInt", str: "str",
          tuple: "SymInt[2]"}
_SCHEMA = ", ".join([
    "Tensor q, Tensor k, Tensor v", *(f"Tensor? {name}" for name in [*ARGUMENTS][:TENSORS]),
    *(f"{_TYPES[type(value)]} {name}" for name, value in VALUES.items()),
    "ScalarType? out_type, int threads, str backend"])

_library: Any = torch.library.Library("regard", "DEF")  # type: ignore[no-untyped-call]
_library.define(f"forward({_SCHEMA}) -> (Tensor out, Tensor lse)",
                tags=(torch.Tag.pt2_compliant_tag,))
_library.define("backward(bool[5] wanted, Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
                f"{_SCHEMA}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
forward = torch.ops.regard.forward.default
backward = torch.ops.regard.backward.default
if all(callable(getattr(_operator, "_op", None)) for _operator in (forward, backward)):
    _calls = operators_calls(forward._op, backward._op)
    if _calls:  # now, because _op is the operators' hash
        forward._op, backward._op = _calls.forward, _calls.backward

for _device in ("CPU", "CUDA"):
    _library.impl("forward", forward_kernel, _device)
    _library.impl("backward", backward_kernel, _device)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return forward_results(call_of(q, k, v, rest), rest[-3])


def _fake_backward(wanted: Sequence[bool], dout: Tensor, dlse: Tensor | None, out: Tensor,
                   lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    require_device(q, {"dout": dout, "dlse": dlse, "out": out, "lse": lse})
    return list(backward_results(wanted, call_of(q, k, v, rest)).values())


torch.library.register_fake("regard::forward", _fake_forward, lib=_library)
torch.library.register_fake("regard::backward", _fake_backward, lib=_library)
batching.register(_library, forward, backward)


_PLAIN = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _below_autograd(operator: Any, kernel: Any, keys: Any, *arguments: Any) -> Any:
    """What the dispatcher calls next. For plain tensors that is the kernel itself: calling it in
    Python saves converting thirty arguments to C++ and back."""
    keys = keys & torch._C._after_autograd_keyset
    if keys.highestPriorityTypeId() in _PLAIN:
        return kernel(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys, *arguments)


# ---------------------------------------------------------------------------------------- autograd

class RegardAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
                sink: Tensor | None, keys: Any, rest: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        out, lse = _below_autograd(forward, forward_kernel, keys, q, k, v, bias, sink, *rest)
        more = (x.clone() if x is not None and x.is_inference() else x  # to be saved
                for x in rest[:TENSORS - 2])
        ctx.save_for_backward(out, lse, q, k, v, bias, sink, *more)
        ctx.values = rest[TENSORS - 2:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[:5]
        gradients: list[Tensor] = []
        if dout is not None or dlse is not None:
            saved = ctx.saved_tensors
            if dout is None:
                dout = saved[0].new_zeros(saved[0].shape[-1]).expand_as(saved[0])
            gradients = backward(wanted, dout, dlse, *saved, *ctx.values)
        found = iter(gradients)
        return (*(next(found, None) if is_wanted else None for is_wanted in wanted), None, None)


class RegardAttentionGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor,
                k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, wanted: list[bool],
                keys: Any, rest: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(_below_autograd(backward, backward_kernel, keys, wanted, dout, dlse, out, lse,
                                     q, k, v, bias, sink, *rest))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        installed = torch.nn.functional.scaled_dot_product_attention.__module__.startswith(__package__)
        where = ", after regard.torch.uninstall()," if installed else ""
        raise refuse("create_graph", True, "gradients of attention's gradients are not available; "
                     f"torch.nn.functional.scaled_dot_product_attention{where} under "
                     "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them", Unsupported)


_attention: Any = RegardAttention.apply
_attention_gradients: Any = RegardAttentionGradients.apply
_SLOPES = 3 + [*ARGUMENTS].index("alibi_slopes")
_unpack_dual: Any = forward_ad.unpack_dual


def _any_requires_grad(tensors: Sequence[Any]) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def refuse_tangents(given: Mapping[str, Any]) -> None:
    """Errors: Unsupported for an argument with a forward-mode derivative, by name."""
    if forward_ad._current_level < 0:
        return
    for name, x in given.items():
        if isinstance(x, Tensor) and _unpack_dual(x).tangent is not None:
            raise refuse(name, "a tensor with a tangent",
                         "attention has no forward-mode derivative", Unsupported)


def _forward_with_gradients(keys: Any, *arguments: Any) -> Any:
    refuse_tangents(dict(zip(("q", "k", "v", *ARGUMENTS), arguments)))
    if torch.is_grad_enabled():
        slopes = arguments[_SLOPES]
        if slopes is not None and slopes.requires_grad:
            raise refuse("alibi_slopes", "a tensor that requires grad",
                         "has no gradient; detach it", Unsupported)
        if _any_requires_grad(arguments[:5]):
            if torch._C._are_functorch_transforms_active():
                raise refuse("q", "a tensor inside of torch.func",
                             "has gradients by torch.autograd only", Unsupported)
            return _attention(*arguments[:5], keys, arguments[5:])
    return _below_autograd(forward, forward_kernel, keys, *arguments)


def _backward_with_gradients(keys: Any, wanted: list[bool], *arguments: Any) -> Any:
    if torch.is_grad_enabled() and _any_requires_grad(arguments[:9]):
        return list(_attention_gradients(*arguments[:9], wanted, keys, arguments[9:]))
    return _below_autograd(backward, backward_kernel, keys, wanted, *arguments)


_library.impl("forward", _forward_with_gradients, "Autograd", with_keyset=True)
_library.impl("backward", _backward_with_gradients, "Autograd", with_keyset=True)


# ---------------------------------------------------------------------------------------- autocast

def _cast(device: str, key: Any) -> Any:
    excluded = torch._C.DispatchKeySet(key)

    def cast_and_run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        """As PyTorch's own attention: q, k and v become the autocast type, except for float64. The
        bias keeps its type, which need not be q's type; sums are in float32 or wider anyway."""
        type = torch.get_autocast_dtype(device)
        q, k, v = (x.to(type) if x.is_floating_point() and x.dtype != torch.float64 else x
                   for x in (q, k, v))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return forward(q, k, v, *rest)

    return cast_and_run


_library.impl("forward", _cast("cpu", torch._C.DispatchKey.AutocastCPU), "AutocastCPU")
_library.impl("forward", _cast("cuda", torch._C.DispatchKey.AutocastCUDA), "AutocastCUDA")
