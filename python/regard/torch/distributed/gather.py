"""Each rank receives the keys that its rows see, in the order of the sequence, and makes one call.

dq is local and complete. dk and dv are computed for all of these keys in float32 or wider, sent to
the keys' owners, and summed there in a fixed order: gradients repeat to the bit. Keys are
received again for the backward pass, so that no rank keeps more than its own between the two.
"Halo" is the same code with contiguous rows, where few ranks have to send.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...gradients import Gradients
from . import call as one
from . import others
from .call import Call, Tensors, Wanted
from .ranks import completing

Kept = tuple[Tensor | None, ...]


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs."""
    local, _ = _with_keys(call, tensors)
    out, lse = one.forward(call, local, _options(call, tensors), call.out_type)
    return out, lse, (out, lse, *tensors)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    out, lse, *rest = kept
    tensors = Tensors(*rest)  # type: ignore[arg-type]
    local, keys = _with_keys(call, tensors)
    sums = torch.empty((local.k.shape[2], *_row_shape(tensors)), dtype=one.sums_type(tensors.k),
                       device=tensors.k.device) if wanted.keys else None
    dk, dv = (None, None) if sums is None else one.unpacked(sums, tensors.k.shape[-1])
    into = Gradients(
        dq=torch.empty_like(tensors.q) if wanted.q else None, dk=dk, dv=dv,
        dbias=torch.empty_like(local.bias) if wanted.bias and local.bias is not None else None,
        dsink=torch.empty_like(tensors.sink) if wanted.sink and tensors.sink is not None else None)
    one.backward(call, local, _options(call, tensors), (dout, dlse, out, lse), into)
    if sums is not None:
        total = _to_owners(call, sums, keys)
        if total.dtype == tensors.k.dtype and len(total) < len(sums):
            total = total.clone()  # gradients are views of it, and would hold all sums
        dk, dv = one.unpacked(total, tensors.k.shape[-1])
    return Gradients(into.dq, dk, dv, _whole_bias(into.dbias, tensors.bias, keys), into.dsink)


def _options(call: Call, tensors: Tensors) -> dict[str, Any]:
    return one.visibility_options(call, tensors.row_spans, None, tensors.q.device)


def _row_shape(tensors: Tensors) -> tuple[int, int, int]:
    return (*tensors.k.shape[:2], tensors.k.shape[-1] + tensors.v.shape[-1])


def _with_keys(call: Call, tensors: Tensors) -> tuple[Tensors, Tensor | None]:
    """The tensors with received keys, values and their part of bias and mask, without the caller's
    spans; and the positions of these keys, None for the whole sequence."""
    plan, device = call.plan, tensors.k.device
    keys = plan.part(call.ranks.rank, None, device, call.by_position)
    rows = (plan.gathered(call.ranks, one.packed(tensors.k, tensors.v)) if keys is None else
            _arranged(call, tensors, keys))
    k, v = one.unpacked(rows, tensors.k.shape[-1])
    return tensors._replace(k=k, v=v, bias=one.columns(tensors.bias, keys),
                            mask=one.columns(tensors.mask, keys), row_spans=None), keys


def _arranged(call: Call, tensors: Tensors, keys: Tensor) -> Tensor:
    """(keys, ...) in the order of the sequence; zeros between those that some row sees."""
    coming = others.begin_keys(call, tensors)
    make = tensors.k.new_zeros if call.by_position else tensors.k.new_empty
    rows: Tensor = make((len(keys), *_row_shape(tensors)))
    with completing(coming):
        others.put_own(call, tensors, rows, keys, _name(call))
    came = coming()
    return rows.index_copy_(0, others.places(call, keys, _name(call), rows.device), came)


def _name(call: Call) -> str:
    """Of the keys of a call."""
    return "filled" if call.by_position else "all"


def _to_owners(call: Call, sums: Tensor, keys: Tensor | None) -> Tensor:
    """(rows, ...), the sum over all ranks of what each has for these keys: this one's, then the
    others' in their order.

    sums: (keys, ...), this rank's part for all of its keys."""
    coming = others.begin_sums(call, sums, keys, _name(call))
    with completing(coming):
        total = others.own_sums(call, sums, keys, _name(call))
    return others.add_sums(call, total, coming())


def _whole_bias(dbias: Tensor | None, bias: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """The gradient over all keys; keys that are not here have none."""
    if dbias is None or bias is None or keys is None or bias.shape[-1] == 1:
        return dbias
    return torch.zeros_like(bias).index_copy_(-1, keys, dbias)
