"""Each rank receives the keys that its rows see, in the order of the sequence, and makes one call.

dq is local and complete. dk and dv are computed for all of these keys in float32 or wider, sent to
the keys' owners, and summed there in the order of ranks: gradients repeat to the bit. Keys are
received again for the backward pass, so that no rank keeps more than its own between the two.
"Halo" is the same code with contiguous rows, where few ranks have to send.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...gradients import Gradients
from . import call as one
from .call import Call, Tensors, Wanted
from .plan_value import Plan

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
        dk, dv = one.unpacked(_to_owners(call, sums), tensors.k.shape[-1])
    return Gradients(into.dq, dk, dv, _whole_bias(into.dbias, tensors.bias, keys), into.dsink)


def _options(call: Call, tensors: Tensors) -> dict[str, Any]:
    return one.visibility_options(call, tensors.row_spans, None, tensors.q.device)


def _row_shape(tensors: Tensors) -> tuple[int, int, int]:
    return (*tensors.k.shape[:2], tensors.k.shape[-1] + tensors.v.shape[-1])


def _with_keys(call: Call, tensors: Tensors) -> tuple[Tensors, Tensor | None]:
    """The tensors with received keys, values and their part of bias and mask, without the caller's
    spans; and the positions of these keys, None for the whole sequence."""
    plan, own = call.plan, one.packed(tensors.k, tensors.v)
    keys = plan.part(call.ranks.rank, None, tensors.k.device, call.by_position)
    rows = plan.gathered(call.ranks, own) if keys is None else _received(call, own, len(keys))
    k, v = one.unpacked(rows, tensors.k.shape[-1])
    return tensors._replace(k=k, v=v, bias=one.columns(tensors.bias, keys),
                            mask=one.columns(tensors.mask, keys), row_spans=None), keys


def _counts(call: Call) -> tuple[list[int], list[int]]:
    """How many own rows each rank needs, and how many rows of each rank this one needs."""
    counts, rank = call.plan.needed_counts, call.ranks.rank
    return counts[:, rank].tolist(), counts[rank].tolist()


def _received(call: Call, own: Tensor, count: int) -> Tensor:
    """(keys, ...) of own rows (rows, ...), in the order of the sequence; zeros between them."""
    plan, rank = call.plan, call.ranks.rank
    given, taken = _counts(call)
    sent = plan.kept(("sent", rank), own.device, lambda: torch.cat(
        [plan.needed_rows(other, rank) for other in range(plan.world_size)]))
    came = call.ranks.all_to_all(own.index_select(0, sent), given, taken)
    whole = own.new_zeros((count, *own.shape[1:]))
    whole[_places(call, own.device)] = came
    return whole


def _places(call: Call, device: Any) -> Tensor:
    """For each received key, in the order of owners, its place among this rank's keys."""
    plan, rank = call.plan, call.ranks.rank

    def found() -> Tensor:
        came = torch.cat([plan.positions(other)[plan.needed_rows(rank, other)]
                          for other in range(plan.world_size)])
        keys = plan.part(rank, None, "cpu", call.by_position)
        return came if keys is None else torch.searchsorted(keys, came)

    return plan.kept(("places", rank, call.by_position), device, found)


def _to_owners(call: Call, sums: Tensor) -> Tensor:
    """(rows, ...), the sum over all ranks, in their order, of what each has for these keys.

    sums: (keys, ...), this rank's part for all of its keys."""
    plan, rank = call.plan, call.ranks.rank
    given, taken = _counts(call)
    by_owner = sums.index_select(0, _places(call, sums.device))
    came = call.ranks.all_to_all(by_owner, taken, given)
    total = sums.new_zeros((plan.rows(rank), *sums.shape[1:]))
    for other, part in enumerate(torch.split(came, given)):
        add_needed(total, part, plan, other, rank)
    return total


def add_needed(total: Tensor, part: Tensor, plan: Plan, other: int, rank: int) -> None:
    """Adds what another rank has for those own rows that it needs, in their order."""
    if len(part) == len(total):
        total += part
    elif len(part):
        total.index_add_(0, plan.needed_rows(other, rank, total.device), part)


def _whole_bias(dbias: Tensor | None, bias: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """The gradient over all keys; keys that are not here have none."""
    if dbias is None or bias is None or keys is None or bias.shape[-1] == 1:
        return dbias
    return torch.zeros_like(bias).index_copy_(-1, keys, dbias)
