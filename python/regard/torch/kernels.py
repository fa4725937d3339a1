"""The library's two passes on the memory of PyTorch's tensors, and the room for their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import _core
from ..element_types import allowed_types, wrong_element_type
from ..errors import InvalidArgument, Unsupported, refuse
from ..gradients import GRADIENTS
from ..repair import advised
from ..settings import TYPE_NAMES

TYPES = {getattr(torch, name): short for name, short in TYPE_NAMES.items()}


class Options(NamedTuple):
    """The operators' arguments beside q, k, v, bias and sink, in the schema's order."""

    mask: Optional[Tensor] = None
    alibi_slopes: Optional[Tensor] = None
    cu_seqlens_q: Optional[Tensor] = None
    cu_seqlens_k: Optional[Tensor] = None
    seqused_q: Optional[Tensor] = None
    seqused_k: Optional[Tensor] = None
    drawn_seed: Optional[Tensor] = None  # 0-dim int64 on the CPU; stands before dropout_seed
    scale: Optional[float] = None
    softcap: float = 0.0
    causal: str = "none"
    window: Sequence[int] = (-1, -1)
    dropout_p: float = 0.0
    dropout_seed: int = 0  # this and the offset: 64 bits, as a signed number
    dropout_offset: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    layout: str = "bhsd"
    precision: str = "full"
    deterministic: bool = False
    out_type: Optional[torch.dtype] = None
    threads: int = 0
    backend: str = ""


TENSOR_OPTIONS = Options._fields.index("scale")  # so many of them, the first ones


# ------------------------------------------------------------------------------ memory and shapes

def _array(x: Tensor, argument: str) -> _core.Array:
    type = TYPES.get(x.dtype)
    if type is None or type not in allowed_types(argument):
        raise wrong_element_type(x, argument)
    return _core.Array.at(x.data_ptr(), type, x.shape, x.stride(), x.get_device(), x)


def _with_unit_stride(x: Tensor) -> Tensor:
    """Only what steps through a row by more than one element is copied."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _rows(x: Tensor, argument: str, options: Options) -> _core.Array:
    """q, k, v, out and their gradients."""
    array = _array(_with_unit_stride(x), argument)
    return array.swapped(1, 2) if options.layout == "bshd" and x.dim() == 4 else array


def _dense(like: Tensor, size: int, type: torch.dtype | None) -> Tensor:
    """Room for rows of `size`, dense, in the order of memory that `like` has. PyTorch's own fused
    attention lays out its results so: what was transposed before is dense when transposed back."""
    if like.shape[-1] == size and like.stride(-1) == 1:
        return torch.empty_like(like, dtype=type)
    order = sorted(range(like.dim() - 1), key=like.stride, reverse=True)
    made = like.new_empty([*(like.shape[axis] for axis in order), size], dtype=type)
    return made.permute(*(order.index(axis) for axis in range(like.dim() - 1)), like.dim() - 1)


def forward_results(q: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    out = _dense(q, v.shape[-1], options.out_type)
    if q.dim() == 3:
        shape = [q.shape[1], q.shape[0]]
    else:
        shape = [q.shape[0], q.shape[1], q.shape[2]]
        if options.layout == "bshd":
            shape[1], shape[2] = shape[2], shape[1]
    return out, q.new_empty(shape, dtype=torch.float64 if q.dtype == torch.float64
                            else torch.float32)


def backward_results(wanted: Sequence[bool], q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
                     sink: Tensor | None) -> dict[str, Tensor]:
    results = {name: _dense(x, x.shape[-1], None) for name, x, is_wanted
               in zip(GRADIENTS, (q, k, v), wanted) if is_wanted}
    for name, x, is_wanted in zip(GRADIENTS[3:], (bias, sink), wanted[3:]):
        if is_wanted and x is not None:
            results[name] = x.new_empty(x.shape)
    return results


def _is_ragged(options: Options) -> bool:
    """Whether rows may lie outside of every sequence: the library does not write them."""
    return (options.cu_seqlens_q is not None or options.seqused_q is not None
            or options.seqused_k is not None)


# ---------------------------------------------------------------------------------------- kernels

def _seed(q: Tensor, options: Options) -> int:
    if options.drawn_seed is None:
        return _unsigned(options.dropout_seed)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise refuse("dropout_seed", None, "is drawn on the CPU, so that a captured graph would "
                     "drop the same weights at each replay; give a number if it may", Unsupported)
    return _unsigned(int(options.drawn_seed))


def _unsigned(number: int) -> int:
    return number & (1 << 64) - 1


def _problem(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None,
             options: Options) -> _core.Problem:
    tensors: tuple[Any, ...] = options[:TENSOR_OPTIONS - 1]  # all but drawn_seed
    arrays = {name: _array(x, name) for name, x in zip(Options._fields, tensors) if x is not None}
    if bias is not None:
        arrays["bias"] = _array(bias, "bias")
    if sink is not None:
        arrays["sink"] = _array(sink, "sink")
    return _core.Problem(
        _rows(q, "q", options), _rows(k, "k", options), _rows(v, "v", options), arrays,
        scale=options.scale, softcap=options.softcap, causal=options.causal,
        window=(options.window[0], options.window[1]), dropout_p=options.dropout_p,
        dropout_seed=_seed(q, options) if options.dropout_p > 0 else 0,
        dropout_offset=_unsigned(options.dropout_offset), max_seqlen_q=options.max_seqlen_q,
        max_seqlen_k=options.max_seqlen_k, precision=options.precision,
        deterministic=options.deterministic)


def _where(q: Tensor, options: Options) -> dict[str, Any]:
    """Keywords of a pass. A GPU's workspace comes from PyTorch's own pool: freed when the call has
    returned, it is given out again only to what follows on the stream."""
    if not q.is_cuda:
        return {"threads": options.threads or torch.get_num_threads(), "backend": options.backend}
    held = []

    def allocate(size: int) -> int:
        held.append(q.new_empty(size, dtype=torch.uint8))
        return held[0].data_ptr()

    return {"stream": torch.cuda.current_stream(q.device).cuda_stream, "backend": options.backend,
            "allocate": allocate}


def run_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None,
                *rest: Any) -> tuple[Tensor, Tensor]:
    options = Options(*rest)
    try:
        problem = _problem(q, k, v, bias, sink, options)
        out, lse = forward_results(q, v, options)
        if _is_ragged(options):
            out.zero_()
            lse.fill_(-torch.inf)
        problem.forward(_rows(out, "out", options), _array(lse, "lse"), **_where(q, options))
    except InvalidArgument as error:
        shapes = {name: x.shape for name, x in (("bias", bias), ("mask", options.mask))
                  if x is not None}
        raise advised(error, q.shape, k.shape, v.shape, options.layout, shapes,
                      "{}.contiguous()") from None
    return out, lse


def run_backward(wanted: Sequence[bool], dout: Tensor, dlse: Tensor | None, out: Tensor,
                 lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
                 sink: Tensor | None, *rest: Any) -> list[Tensor]:
    options = Options(*rest)
    problem = _problem(q, k, v, bias, sink, options)
    results = backward_results(wanted, q, k, v, bias, sink)
    arrays: dict[str, Any] = {
        name: _rows(x, name, options) if name in GRADIENTS[:3] else _array(x, name)
        for name, x in results.items()}
    if _is_ragged(options):
        for name in results.keys() & set(GRADIENTS[:3]):
            results[name].zero_()
    problem.backward(_rows(out, "out", options), _array(lse, "lse"), _rows(dout, "dout", options),
                     None if dlse is None else _array(dlse, "dlse"), **arrays, **_where(q, options))
    return list(results.values())
