"""The two passes of a call by its scheme, for one rank's tensors: no autograd."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from . import nested, schemes
from .call import Call, Kept, Tensors, Wanted, sums_type

GRADED = 5  # of the first tensors


def _scheme(call: Call) -> ModuleType:
    return schemes.module_of(call) if call.plan.nodes is None else nested


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs."""
    found: tuple[Tensor, Tensor, Kept] = _scheme(call).forward(call, tensors)
    return found


def backward(call: Call, kept: Kept, dout: Tensor | None, dlse: Tensor | None, wanted: Wanted,
             like: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of the first tensors, None where one is not wanted. like: q, k, v, bias and
    sink; or what has their types, and q's and v's sizes."""
    q, v = like[0], like[2]
    assert q is not None and v is not None
    if dout is None:  # the lse alone has a gradient; or neither, and other ranks wait for this one
        near = next(x for x in kept if x is not None)
        dout = near.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=call.out_type or q.dtype)
    if dlse is None and call.return_lse:  # equal on all ranks, whatever each uses
        dlse = dout.new_zeros(dout.shape[:-1], dtype=sums_type(q))
    found = _scheme(call).backward(call, kept, dout, dlse, wanted)
    dsink = found.dsink
    if dsink is not None and call.sums_sink:
        dsink = call.ranks.sum_in_order(dsink)
    gradients = (found.dq, found.dk, found.dv, found.dbias, dsink)
    return tuple(
        gradient.to(x.dtype) if gradient is not None and x is not None and is_wanted else None
        for gradient, x, is_wanted in zip(gradients, like, wanted))
