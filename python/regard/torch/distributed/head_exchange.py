"""The exchange before and after a local call: each rank receives all rows of some heads, and sends
the results' rows back.

Query heads are dealt unevenly where they do not divide; a rank may have none. Heads of keys that
several ranks need are sent to each, and their gradients are summed in float32 or wider, in the
order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...gradients import Gradients
from . import heads, local_pass
from .call import Call, Kept, Tensors, Wanted, sums_type
from .copies import copy

Exchange = Callable[[Call, Tensor, list[range]], Tensor]
Attend = Callable[[Tensors], tuple[Tensor, Tensor, Kept]]
Differentiate = Callable[[Tensors, Kept, Tensor, "Tensor | None"], Gradients]


def forward(call: Call, tensors: Tensors, attend: Attend) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs: the bias, tensors of own heads and all rows, and what
    `attend` keeps. attend: makes the local call; not called on a rank without heads."""
    local = of_heads(call, tensors, to_heads)
    out, lse, rest = (attend(local) if local.q.shape[1] else
                      (*local_pass.empty_results(call, local), ()))
    own_lse = (to_rows(call, lse[..., None], heads_q(call))[..., 0] if call.return_lse else
               tensors.q.new_empty(tensors.q.shape[:-1], dtype=lse.dtype))
    return to_rows(call, out, heads_q(call)), own_lse, (tensors.bias, *local, *rest)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted,
             differentiate: Differentiate) -> Gradients:
    """The gradients of this rank's rows. differentiate: makes those of the local call, of its
    tensors and of what `attend` has kept."""
    given_bias, count = kept[0], len(Tensors._fields)
    local, rest = Tensors(*kept[1:1 + count]), kept[1 + count:]  # type: ignore[arg-type]
    dout = to_heads(call, dout, heads_q(call))
    dlse = None if dlse is None else to_heads(call, dlse[..., None], heads_q(call))[..., 0]
    found = (differentiate(local, rest, dout, dlse) if local.q.shape[1] else
             empty_gradients(local, wanted))
    dq = None if found.dq is None else to_rows(call, found.dq.to(local.q.dtype), heads_q(call))
    dk, dv = (None if x is None else to_rows(call, unrepeated(call, x), heads_kv(call))
              for x in (found.dk, found.dv))
    dbias = None
    if found.dbias is not None and given_bias is not None:
        dbias = to_rows(call, found.dbias.to(sums_type(given_bias)), heads_of(call, given_bias))
        dbias = dbias.sum_to_size(given_bias.shape)
    return Gradients(dq, dk, dv, dbias, _of_all_heads(call, found.dsink))


def empty_gradients(local: Tensors, wanted: Wanted) -> Gradients:
    """To write to. Sums of keys are wide, so that adding those of several ranks loses nothing."""
    def like(x: Tensor | None, is_wanted: bool, sums: bool) -> Tensor | None:
        if x is None or not is_wanted:
            return None
        return torch.empty_like(x, dtype=sums_type(x) if sums else None)

    return Gradients(
        like(local.q, wanted.q, False), like(local.k, wanted.keys, True),
        like(local.v, wanted.keys, True), like(local.bias, wanted.bias, True),
        like(local.sink, wanted.sink, False))


# ------------------------------------------------------------------------------ heads of this rank

def heads_q(call: Call) -> list[range]:
    return heads.dealt(call.plan.sizes.heads_q, call.ranks.size)


def heads_kv(call: Call) -> list[range]:
    sizes = call.plan.sizes
    return [heads.of_keys(own, sizes.heads_q, sizes.heads_kv) for own in heads_q(call)]


def heads_of(call: Call, scores: Tensor) -> list[range]:
    """Of what broadcasts to (B, Hq, ...): the heads of each rank, or the one for all."""
    dealt = heads_q(call)
    if scores.dim() > 2 and scores.shape[-3] > 1:
        return dealt
    return [range(min(len(own), 1)) for own in dealt]


def of_heads(call: Call, tensors: Tensors, exchange: Exchange) -> Tensors:
    """All rows of this rank's heads, by `to_heads`, or without data. What broadcasts over rows is
    expanded: ranks may hold different values. What broadcasts over heads stays one head."""
    def moved(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.reshape((1,) * (4 - x.dim()) + x.shape)
        whole = x.expand(x.shape[0], x.shape[1], tensors.q.shape[2], x.shape[3])
        return exchange(call, whole, heads_of(call, x))

    own = heads_q(call)[call.ranks.rank]
    sliced = [None if x is None else x[..., own.start:own.stop].clone()
              for x in (tensors.sink, tensors.alibi_slopes)]
    return Tensors(
        exchange(call, tensors.q, heads_q(call)), exchange(call, tensors.k, heads_kv(call)),
        exchange(call, tensors.v, heads_kv(call)), moved(tensors.bias), sliced[0],
        moved(tensors.mask), moved(tensors.row_spans), sliced[1])


def _places(call: Call) -> list[int] | None:
    sizes = call.plan.sizes
    return heads.repeats(heads_q(call)[call.ranks.rank], sizes.heads_q, sizes.heads_kv)


def repeated(call: Call, local: Tensors) -> Tensors:
    """The tensors with a head of keys for each query head, where grouped heads cannot say which
    they read."""
    places = _places(call)
    return local if places is None else local._replace(k=local.k[:, places], v=local.v[:, places])


def unrepeated(call: Call, x: Tensor) -> Tensor:
    """Sums of the heads that `repeated` made of one."""
    places = _places(call)
    if places is None:
        return x
    keys = heads_kv(call)[call.ranks.rank]
    total = x.new_zeros((x.shape[0], len(keys), *x.shape[2:]))
    for head, place in enumerate(places):
        total[:, place] += x[:, head]
    return total


def _of_all_heads(call: Call, dsink: Tensor | None) -> Tensor | None:
    """(Hq), this rank's heads among zeros."""
    if dsink is None:
        return None
    own = heads_q(call)[call.ranks.rank]
    whole = dsink.new_zeros(call.plan.sizes.heads_q)
    whole[own.start:own.stop] = dsink
    return whole


# ----------------------------------------------------------------------------------- communication

def to_heads(call: Call, x: Tensor, dealt: list[range]) -> Tensor:
    """(B, h, S, D) of this rank's heads, from (B, H, rows, D) on each rank."""
    plan, ranks = call.plan, call.ranks
    rows = x.permute(2, 0, 1, 3)
    batch, width = x.shape[0], x.shape[3]
    parts = [rows[:, :, own.start:own.stop] for own in dealt]
    sizes = [part.numel() for part in parts]
    sent = x.new_empty(sum(sizes))
    for part, to in zip(parts, torch.split(sent, sizes)):
        copy(to.view(part.shape), part)
    per_row = batch * len(dealt[ranks.rank]) * width
    counts = [plan.rows(rank) * per_row for rank in range(ranks.size)]
    came: Tensor = ranks.all_to_all(sent[:, None], sizes, counts)
    # Rows are contiguous with this scheme: the order of ranks is the order of the sequence.
    whole = came.reshape(plan.sizes.length, batch, len(dealt[ranks.rank]), width)
    return whole.permute(1, 2, 0, 3)


def to_rows(call: Call, x: Tensor, dealt: list[range]) -> Tensor:
    """(B, H, rows, D) of this rank's rows, from (B, h, S, D) on each rank: the adjoint of
    `to_heads`, which adds what several ranks have for one head, in the order of ranks."""
    plan, ranks = call.plan, call.ranks
    batch, count, _, width = x.shape
    given = [plan.rows(rank) * batch * count * width for rank in range(ranks.size)]
    own_rows = plan.rows(ranks.rank)
    taken = [own_rows * batch * len(own) * width for own in dealt]
    sent = x.new_empty((x.shape[2], batch, count, width))
    copy(sent, x.permute(2, 0, 1, 3))
    came = ranks.all_to_all(sent.view(-1, 1), given, taken)
    parts = [part.view(own_rows, batch, len(own), width)
             for own, part in zip(dealt, torch.split(came[:, 0], taken))]
    most = max(own.stop for own in dealt)
    if sum(map(len, dealt)) == most:  # each head is one rank's
        rows = x.new_empty((own_rows, batch, most, width))
        for own, part in zip(dealt, parts):
            copy(rows[:, :, own.start:own.stop], part)
        return rows.permute(1, 2, 0, 3)
    total = x.new_zeros((own_rows, batch, most, width))
    for own, part in zip(dealt, parts):
        total[:, :, own.start:own.stop] += part
    return total.permute(1, 2, 0, 3)
