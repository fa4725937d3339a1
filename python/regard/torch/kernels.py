"""The library's two passes on PyTorch's tensors, and the tensors for their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .. import _core
from ..call import Call
from ..element_types import TYPE_NAMES, allowed_types, result_type, wrong_element_type
from ..errors import InvalidArgument, Unsupported, refuse
from ..gradients import GRADIENTS
from ..options import ARRAYS, DEFAULTS
from .threads import on_threads

TYPES = {getattr(torch, name): short for name, short in TYPE_NAMES.items()}
_OF_ANY_STRIDES = {"bias", "mask", "dbias"}

# What the operators take after q, k and v, and the defaults: tensors (those with a gradient first),
# values, and how to run. seed_tensor stands in for dropout_seed.
_TENSORS = sorted(ARRAYS, key=lambda name: f"d{name}" not in GRADIENTS)
VALUES = {name: value for name, value in DEFAULTS.items() if name not in ARRAYS}
ARGUMENTS: dict[str, Any] = {**dict.fromkeys([*_TENSORS, "seed_tensor"]), **VALUES,
                             "out_type": None, "threads": 0, "backend": ""}
TENSORS = len(_TENSORS) + 1
_NAMES = [*ARGUMENTS][:-3]  # of options
# The same, made anew: a compiled program checks in each call every value of a dict that it was
# traced with, but of a function its code alone.
arguments: Callable[[], dict[str, Any]] = eval(compile(f"lambda: {ARGUMENTS}", __file__, "eval"))


# ------------------------------------------------------------------------------ memory and shapes

def array_of(x: Tensor, argument: str) -> _core.Array:
    """For the library. Errors: WrongType for a type that the argument does not take."""
    type = TYPES.get(x.dtype)
    if type is None or type not in allowed_types(argument):
        raise wrong_element_type(x, argument)
    if argument not in _OF_ANY_STRIDES and x.dim() > 0 and x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()  # only what steps through a row by more than one element is copied
    return _core.Array.at(argument, x.data_ptr(), type, x.shape, x.stride(), x.get_device(), x)


def dense(like: Tensor, size: int, type: torch.dtype | None) -> Tensor:
    """A dense tensor for rows of `size`, with its axes in memory in the order of `like`, expanded
    ones last, as the binding makes it. PyTorch's own fused attention lays out its results so."""
    strides = like.stride()
    # empty_like has an order of its own for expanded axes, and for those of equal strides.
    is_plain = strides[-1] == 1 and 0 not in strides and not any(
        a == b for a, b in combinations(strides[:-1], 2))
    if is_plain and like.shape[-1] == size:
        return torch.empty_like(like, dtype=type)
    order = sorted(range(like.dim() - 1), key=like.stride, reverse=True)
    made = like.new_empty([*(like.shape[axis] for axis in order), size], dtype=type)
    return made.permute(*(order.index(axis) for axis in range(like.dim() - 1)), like.dim() - 1)


def require_device(q: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
    """Errors: InvalidArgument for a tensor on another device than q. The dispatcher takes a call for
    shapes alone where one of its tensors is on meta, and all need not be."""
    for name, x in tensors.items():
        if x is not None and x.device != q.device:
            raise refuse(name, f"a tensor on {x.device}", f"must be on {q.device}, as q")


def call_of(q: Tensor, k: Tensor, v: Tensor, rest: Sequence[Any]) -> Call:
    """rest: the values of ARGUMENTS, in their order. Errors: InvalidArgument for a tensor on another
    device than q. A seed may be on the CPU."""
    options = dict(zip(_NAMES, rest))
    require_device(q, {"k": k, "v": v, **{name: options[name] for name in _TENSORS}})
    seed = options["seed_tensor"]
    if seed is not None and not seed.is_cpu:
        require_device(q, {"dropout_seed": seed})
    return Call(q, k, v, options, options.pop("layout"), array_of)


def forward_results(call: Call, out_type: torch.dtype | None) -> tuple[Tensor, Tensor]:
    q: Tensor = call.q
    return dense(q, call.v.shape[-1], out_type), q.new_empty(
        call.lse_shape(), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def backward_results(wanted: Sequence[bool], call: Call) -> dict[str, Tensor]:
    results = {name: dense(x, x.shape[-1], None) for name, x, is_wanted
               in zip(GRADIENTS, (call.q, call.k, call.v), wanted) if is_wanted}
    for name, is_wanted in zip(GRADIENTS[3:], wanted[3:]):
        x = call.options[name[1:]]
        if is_wanted and x is not None:
            results[name] = x.new_empty(x.shape)
    return results


# ---------------------------------------------------------------------------------------- kernels

def _problem(call: Call) -> _core.Problem:
    seed = call.options.pop("seed_tensor")
    if seed is not None:
        if seed.is_cpu and call.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise refuse("dropout_seed", "a tensor on the CPU", "is read once, so that a captured "
                         "graph would drop the same weights at each replay; give a tensor on the "
                         "GPU, or a number if it may", Unsupported)
        call.options["dropout_seed"] = seed
    return call.problem()


def where_of(q: Tensor, threads: int, backend: str) -> dict[str, Any]:
    """Keywords of a pass. A GPU's workspace comes from PyTorch's own pool. It is freed when the
    call has returned; the pool then reuses it only for later work on the same stream."""
    if not q.is_cuda:
        return on_threads(threads) | {"backend": backend}
    held = []

    def allocate(size: int) -> int:
        held.append(q.new_empty(size, dtype=torch.uint8))
        return held[0].data_ptr()

    return {"stream": torch.cuda.current_stream(q.device).cuda_stream, "backend": backend,
            "allocate": allocate}


def run_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call = call_of(q, k, v, rest)
    out_type, threads, backend = rest[-3:]
    try:
        problem = _problem(call)
        if out_type is not None:
            result_type("out_type", out_type, "q", problem.type)
        out, lse = forward_results(call, out_type)
        if call.is_ragged():
            out.zero_()
            lse.fill_(-torch.inf)
        problem.forward(call.rows(array_of(out, "out")), array_of(lse, "lse"),
                        **where_of(q, threads, backend))
    except InvalidArgument as error:
        raise call.advised(error, "{}.contiguous()") from None
    return out, lse


def run_backward(wanted: Sequence[bool], dout: Tensor, dlse: Tensor | None, out: Tensor,
                 lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    call = call_of(q, k, v, rest)
    problem = _problem(call)
    results = backward_results(wanted, call)
    arrays = {name: array_of(x, name) for name, x in results.items()}
    for name in arrays.keys() & set(GRADIENTS[:3]):
        arrays[name] = call.rows(arrays[name])
        if call.is_ragged():
            results[name].zero_()
    more: dict[str, Any] = arrays | where_of(q, *rest[-2:])
    problem.backward(call.rows(array_of(out, "out")), array_of(lse, "lse"),
                     call.rows(array_of(dout, "dout")),
                     None if dlse is None else array_of(dlse, "dlse"), **more)
    return list(results.values())
