"""Keys and values pass from rank to rank; each rank attends to one part at a time, its own first.

Each part continues the result of the parts before it, in float32 or wider. In backward each part is called with the final out
and lse; its sums for dk and dv travel with it in float32 or wider, and are home after a full turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gradients import Gradients
from . import call as one
from .call import Call, Tensors, Wanted

Kept = tuple[Tensor | None, ...]


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs."""
    held = one.packed(tensors.k, tensors.v)
    sums = one.sums_type(tensors.q)
    out = tensors.q.new_empty((*tensors.q.shape[:-1], tensors.v.shape[-1]), dtype=sums)
    lse = tensors.q.new_empty(tensors.q.shape[:-1], dtype=sums)
    for step, owner, following in _turn(call):
        with _passed(call, held, following) as coming:
            for piece in _pieces(call, step, owner):
                part, more = _part(call, tensors, held, owner, piece)
                one.forward_into(call, part, more, out, lse, continue_from=not piece.is_first)
            held = coming()
    out = out.to(call.out_type or tensors.q.dtype)
    return out, lse, (out, lse, *tensors)


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
        with _passed(call, held, following) as coming:
            for piece in _pieces(call, step, owner):
                part, more = _part(call, tensors, held, owner, piece)
                dk, dv = (None, None) if sums is None else one.unpacked(
                    sums[piece.rows], tensors.k.shape[-1])
                dpart = None if dbias is None or part.bias is None else torch.zeros_like(
                    part.bias, dtype=dbias.dtype)
                into = Gradients(dq, dk, dv, dpart, dsink if piece.is_first else None)
                one.backward(call, part, more, (dout, dlse, out, lse), into, accumulate=True)
                _add_bias(call, dbias, dpart, owner, piece)
            if sums is not None:
                rows = call.plan.rows(call.ranks.rank) if following is None else following
                sums = call.ranks.begin_pass(sums, rows)()
            held = coming()
    dk, dv = (None, None) if sums is None else one.unpacked(sums, tensors.k.shape[-1])
    return Gradients(dq, dk, dv, dbias, dsink)


@contextmanager
def _passed(call: Call, held: Tensor, following: int | None) -> Iterator[Callable[[], Tensor]]:
    """Sends the keys that are here to the next rank while the block computes with them. The block
    calls what it is given, for those that come; None is the last step, at which none do.

    Where the block raises, what is on its way is waited for: ranks that all raise can use the
    group afterwards.
    """
    if following is None:
        yield lambda: held
        return
    coming = call.ranks.begin_pass(held, following)
    try:
        yield coming
    except Exception:
        coming()
        raise


def _turn(call: Call) -> list[tuple[int, int, int | None]]:
    """For each step: its number, the owner of the keys that are here, and how many keys come for
    the next step; None at the last one."""
    rank, size = call.ranks.rank, call.ranks.size
    owners = [(rank - step) % size for step in range(size)]
    following = [call.plan.rows(owner) for owner in owners[1:]]
    return list(zip(range(size), owners, [*following, None]))


class _Piece(NamedTuple):
    """Keys of one owner that are attended to together: rows of its own. The first piece of a turn
    counts the sink."""

    rows: slice
    is_first: bool


def _pieces(call: Call, step: int, owner: int) -> list[_Piece]:
    """All keys of the owner, or none if no row sees them. Where positions count, keys that do not
    follow each other are apart. The first piece is always there."""
    rank = call.ranks.rank
    if step > 0 and not (call.plan.rows(rank) and call.plan.sees_rank(rank, owner)):
        return []
    runs = call.plan.runs(owner) if call.by_position else [slice(0, call.plan.rows(owner))]
    return [_Piece(run, step == 0 and number == 0) for number, run in enumerate(runs)]


def _part(call: Call, tensors: Tensors, held: Tensor, owner: int, piece: _Piece
          ) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a call over a piece of the owner's keys, and its options."""
    k, v = one.unpacked(held[piece.rows], tensors.k.shape[-1])
    keys = call.plan.positions(owner, held.device)[piece.rows]
    part = tensors._replace(
        k=k, v=v, bias=one.columns(tensors.bias, keys), mask=one.columns(tensors.mask, keys),
        row_spans=None, sink=tensors.sink if piece.is_first else None)
    more = one.spans_option(call, tensors.row_spans, owner, held.device)
    if "row_spans" in more and piece.rows.start:
        more["row_spans"] = more["row_spans"] - piece.rows.start  # ends outside of the piece are cut
    first = int(call.plan.positions(owner)[piece.rows.start]) if len(keys) else 0
    return part, more | one.position_options(call, first, held.device)


def _empty_bias(bias: Tensor | None) -> Tensor | None:
    """Zeros like the bias, wider where all parts add to the same elements."""
    if bias is None:
        return None
    return torch.zeros_like(bias, dtype=one.sums_type(bias) if bias.shape[-1] == 1 else bias.dtype)


def _add_bias(call: Call, dbias: Tensor | None, part: Tensor | None, owner: int, piece: _Piece
              ) -> None:
    if dbias is None or part is None:
        return
    if dbias.shape[-1] == 1:
        dbias += part
    else:
        dbias.index_copy_(-1, call.plan.positions(owner, dbias.device)[piece.rows], part)
