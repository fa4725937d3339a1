"""Keys and values pass from rank to rank; each rank attends to one part at a time, its own first.

Partial results are merged in float32 or wider. In backward each part is called with the final out
and lse; its sums for dk and dv travel with it in float32 or wider, and are home after a full turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...gradients import Gradients
from . import call as one
from .call import Call, Tensors, Wanted

Kept = tuple[Tensor | None, ...]


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs."""
    held = one.packed(tensors.k, tensors.v)
    out = lse = torch.empty(0)
    for step, owner, following in _turn(call):
        coming = None if following is None else call.ranks.begin_pass(held, following)
        if _is_seen(call, step, owner):
            part, more = _part(call, tensors, held, step, owner)
            found = one.forward(call, part, more, one.sums_type(tensors.q))
            out, lse = found if step == 0 else merged((out, lse), found)
        held = held if coming is None else coming()
    out = out.to(call.out_type or tensors.q.dtype)
    return out, lse, (out, lse, *tensors)


def merged(one_part: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse over two sets of keys, from those over each. An lse of -inf is an empty set."""
    lse = torch.logaddexp(one_part[1], other[1])

    def weighted(out: Tensor, own: Tensor) -> Tensor:
        weight = torch.where(own == -torch.inf, 0, torch.exp(own - lse))
        return out * weight[..., None]

    return weighted(*one_part) + weighted(*other), lse


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    out, lse, *rest = kept
    tensors = Tensors(*rest)  # type: ignore[arg-type]
    held = one.packed(tensors.k, tensors.v)
    sums = torch.zeros_like(held, dtype=one.sums_type(held)) if wanted.keys else None
    dq = torch.zeros_like(tensors.q, dtype=one.sums_type(tensors.q)) if wanted.q else None
    dbias = _empty_bias(tensors.bias) if wanted.bias else None
    dsink = torch.zeros_like(tensors.sink) if wanted.sink and tensors.sink is not None else None
    for step, owner, following in _turn(call):
        coming = None if following is None else call.ranks.begin_pass(held, following)
        if _is_seen(call, step, owner):
            part, more = _part(call, tensors, held, step, owner)
            dk, dv = (None, None) if sums is None else one.unpacked(sums, tensors.k.shape[-1])
            dpart = None if dbias is None or part.bias is None else torch.zeros_like(
                part.bias, dtype=dbias.dtype)
            into = Gradients(dq, dk, dv, dpart, dsink if step == 0 else None)
            one.backward(call, part, more, (dout, dlse, out, lse), into, accumulate=True)
            _add_bias(call, dbias, dpart, owner)
        if sums is not None:
            rows = call.plan.rows(call.ranks.rank) if following is None else following
            sums = call.ranks.begin_pass(sums, rows)()
        held = held if coming is None else coming()
    dk, dv = (None, None) if sums is None else one.unpacked(sums, tensors.k.shape[-1])
    return Gradients(dq, dk, dv, dbias, dsink)


def _turn(call: Call) -> list[tuple[int, int, int | None]]:
    """For each step: its number, the owner of the keys that are here, and how many keys come for
    the next step; None at the last one."""
    rank, size = call.ranks.rank, call.ranks.size
    owners = [(rank - step) % size for step in range(size)]
    following = [call.plan.rows(owner) for owner in owners[1:]]
    return list(zip(range(size), owners, [*following, None]))


def _is_seen(call: Call, step: int, owner: int) -> bool:
    """The first part is always called: it counts the sink."""
    rank = call.ranks.rank
    return step == 0 or bool(call.plan.rows(rank)) and call.plan.sees_rank(rank, owner)


def _part(call: Call, tensors: Tensors, held: Tensor, step: int, owner: int
          ) -> tuple[Tensors, dict[str, Tensor]]:
    """The tensors of a call over the keys of one owner, and its options."""
    k, v = one.unpacked(held, tensors.k.shape[-1])
    keys = call.plan.positions(owner, held.device)
    part = tensors._replace(
        k=k, v=v, bias=one.columns(tensors.bias, keys), mask=one.columns(tensors.mask, keys),
        row_spans=None, sink=tensors.sink if step == 0 else None)
    return part, one.spans_option(call, tensors.row_spans, owner, held.device)


def _empty_bias(bias: Tensor | None) -> Tensor | None:
    """Zeros like the bias, wider where all parts add to the same elements."""
    if bias is None:
        return None
    return torch.zeros_like(bias, dtype=one.sums_type(bias) if bias.shape[-1] == 1 else bias.dtype)


def _add_bias(call: Call, dbias: Tensor | None, part: Tensor | None, owner: int) -> None:
    if dbias is None or part is None:
        return
    if dbias.shape[-1] == 1:
        dbias += part
    else:
        dbias.index_copy_(-1, call.plan.positions(owner, dbias.device), part)
