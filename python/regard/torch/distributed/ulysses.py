"""Each rank receives all rows of some heads, attends to them, and sends the results' rows back.

The local call is ordinary: it has the whole sequence, in order, with the mask's own causal, window
and spans. Query heads are dealt unevenly where they do not divide; a rank may have none. Heads of
keys that several ranks need are sent to each, and their gradients are summed in float32 or wider,
in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...gradients import Gradients
from ..kernels import dense
from . import call as one
from . import heads
from .call import Call, Kept, Tensors, Wanted
from .copies import copy
from .visibility import intersection

Exchange = Callable[[Call, Tensor, list[range]], Tensor]


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs: tensors of own heads and all rows."""
    local = of_heads(call, tensors, to_heads)
    if local.q.shape[1]:
        out, lse = one.forward(call, repeated(call, local), _options(call, local), call.out_type)
    else:
        out = local.q.new_empty((*local.q.shape[:-1], local.v.shape[-1]), dtype=call.out_type)
        lse = local.q.new_empty(local.q.shape[:-1], dtype=one.sums_type(local.q))
    own_out = to_rows(call, out, heads_q(call))
    own_lse = (to_rows(call, lse[..., None], heads_q(call))[..., 0] if call.return_lse else
               tensors.q.new_empty(tensors.q.shape[:-1], dtype=lse.dtype))
    return own_out, own_lse, (out, lse, *local, tensors.bias)


def without_data(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """Tensors of the shapes and strides that `forward` returns, for the compiler."""
    def empty(call: Call, x: Tensor, dealt: list[range]) -> Tensor:
        rows = x.new_empty(call.plan.sizes.length, x.shape[0], len(dealt[call.ranks.rank]),
                           x.shape[3])
        return rows.permute(1, 2, 0, 3)

    def by_rows(count: int, width: int, dtype: torch.dtype | None) -> Tensor:
        rows = tensors.q.new_empty((tensors.q.shape[2], len(tensors.q), count, width), dtype=dtype)
        return rows.permute(1, 2, 0, 3)

    local, sums = of_heads(call, tensors, empty), one.sums_type(tensors.q)
    count, width = tensors.q.shape[1], tensors.v.shape[-1]
    out = (dense(local.q, width, call.out_type) if local.q.shape[1] else
           local.q.new_empty((*local.q.shape[:-1], width), dtype=call.out_type))
    lse = local.q.new_empty(local.q.shape[:-1], dtype=sums)
    own_lse = (by_rows(count, 1, sums)[..., 0] if call.return_lse else
               tensors.q.new_empty(tensors.q.shape[:-1], dtype=sums))
    return by_rows(count, width, out.dtype), own_lse, (out, lse, *local, tensors.bias)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    out, lse, *rest = kept
    local, given_bias = Tensors(*rest[:-1]), rest[-1]  # type: ignore[arg-type]
    dout = to_heads(call, dout, heads_q(call))
    dlse = None if dlse is None else to_heads(call, dlse[..., None], heads_q(call))[..., 0]
    into = _empty_gradients(call, local, wanted)
    if local.q.shape[1]:
        one.backward(call, repeated(call, local), _options(call, local), (dout, dlse, out, lse), into)
    dq = None if into.dq is None else to_rows(call, into.dq, heads_q(call))
    dk, dv = (None if x is None else to_rows(call, unrepeated(call, x), heads_kv(call))
              for x in (into.dk, into.dv))
    dbias = None
    if into.dbias is not None and given_bias is not None:
        dbias = to_rows(call, into.dbias, heads_of(call, given_bias))
        dbias = dbias.sum_to_size(given_bias.shape)
    return Gradients(dq, dk, dv, dbias, of_all_heads(call, into.dsink))


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
    """Tensors of a local call: its spans are among the options, and keys have a head for each query
    head where grouped heads cannot say which they read."""
    places = _places(call)
    if places is not None:
        local = local._replace(k=local.k[:, places], v=local.v[:, places])
    return local._replace(row_spans=None)


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


def _options(call: Call, local: Tensors) -> dict[str, Any]:
    """The plan's mask and the caller's spans, as options of a call over the whole sequence."""
    mask, own = call.plan.mask, heads_q(call)[call.ranks.rank]
    options: dict[str, Any] = {"head_begin": own.start}  # where dropout counts heads
    spans = local.row_spans
    if mask is not None:
        options |= {"causal": mask.causal, "window": mask.window}
        planned = mask.row_spans
        if planned is not None:
            if planned.dim() > 2 and planned.shape[-3] > 1:
                planned = planned[..., own.start:own.stop, :, :]
            planned = call.plan.kept(("ulysses spans", call.ranks.rank), local.q.device,
                                     planned.contiguous)
            spans = planned if spans is None else intersection(planned, spans)
    return options if spans is None else options | {"row_spans": spans}


def _empty_gradients(call: Call, local: Tensors, wanted: Wanted) -> Gradients:
    """To write to. Sums of keys are wide, so that adding those of several ranks loses nothing."""
    def like(x: Tensor | None, is_wanted: bool, sums: bool) -> Tensor | None:
        if x is None or not is_wanted:
            return None
        return torch.empty_like(x, dtype=one.sums_type(x) if sums else None)

    keyed = repeated(call, local)
    return Gradients(
        like(local.q, wanted.q, False), like(keyed.k, wanted.keys, True),
        like(keyed.v, wanted.keys, True), like(local.bias, wanted.bias, True),
        like(local.sink, wanted.sink, False))


def of_all_heads(call: Call, dsink: Tensor | None) -> Tensor | None:
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
