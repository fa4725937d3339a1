"""Gather and halo in stages: a rank attends to its own keys while those of others arrive.

Forward continues the result over own keys with the others' keys, which come in the order of the
sequence. Backward attends to half of its own keys while the others' arrive, then to these, and to
the other half while its sums for them travel to their owners. Partial results are in float32 or
wider, and sums are added in a fixed order, as gather.py does it in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...gradients import Gradients
from . import call as one
from . import others
from .call import Call, Tensors, Wanted
from .pieces import BiasSums, Piece, part_of
from .plan_value import BLOCK, OTHERS
from .ranks import completing

Kept = tuple[Tensor | None, ...]


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs."""
    coming = _begin_keys(call, tensors)
    out, lse = one.empty_results(tensors)
    rank = call.ranks.rank
    own = Piece(rank, slice(0, call.plan.rows(rank)), True)
    with completing([coming]):
        part, more = part_of(call, tensors, tensors.k, tensors.v, own)
        one.forward_into(call, part, more, out, lse, continue_from=False)
    far, more = _others(call, tensors, coming())
    if far.k.shape[2]:
        one.forward_into(call, far, more, out, lse, continue_from=True)
    out = out.to(call.out_type or tensors.q.dtype)
    return out, lse, (out, lse, *tensors)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    out, lse, *rest = kept
    tensors = Tensors(*rest)  # type: ignore[arg-type]
    made = _Backward(call, tensors, (dout, dlse, out, lse), wanted)
    coming = _begin_keys(call, tensors)
    first, second = _halves(call)
    with completing([coming]):
        made.add_own(first)
    sums = made.of_others(coming())
    returning = _begin_sums(call, sums)
    with completing([returning]):
        made.add_own(second)
    came, total = returning(), made.sums
    if came is not None and total is not None:
        total = others.add_sums(call, total, others.by_rank(call, came))
    dk, dv = (None, None) if total is None else one.unpacked(total, tensors.k.shape[-1])
    return Gradients(made.dq, dk, dv, made.dbias.whole, made.dsink)


class _Backward:
    """Gradients of one rank's rows, and sums for its own keys, to which parts of the keys add."""

    def __init__(self, call: Call, tensors: Tensors, results: tuple[Tensor | None, ...],
                 wanted: Wanted) -> None:
        self.call, self.tensors, self.results, self.wanted = call, tensors, results, wanted
        self.dq = torch.zeros_like(tensors.q, dtype=one.sums_type(tensors.q)) if wanted.q else None
        self.dbias = BiasSums(tensors.bias, wanted.bias)
        self.dsink = (torch.zeros_like(tensors.sink)
                      if wanted.sink and tensors.sink is not None else None)
        self.sums = self._sums(tensors.k.shape[2])

    def add_own(self, piece: Piece) -> None:
        part, more = part_of(self.call, self.tensors, self.tensors.k, self.tensors.v, piece)
        positions = self.call.plan.positions(piece.owner, part.k.device)[piece.rows]
        sums = None if self.sums is None else self.sums[piece.rows]
        self._add(part, more, sums, positions, self.dsink if piece.is_first else None)

    def of_others(self, rows: Tensor) -> Tensor | None:
        """Sums for the keys of others, whose rows these are."""
        part, more = _others(self.call, self.tensors, rows)
        sums = self._sums(len(rows))
        if len(rows):
            self._add(part, more, sums, _keys_of_others(self.call, rows.device), None)
        return sums

    def _add(self, part: Tensors, more: dict[str, Any], sums: Tensor | None, positions: Tensor,
             dsink: Tensor | None) -> None:
        dk, dv = (None, None) if sums is None else one.unpacked(sums, part.k.shape[-1])
        dbias = self.dbias.of_part(part.bias)
        one.backward(self.call, part, more, self.results, Gradients(self.dq, dk, dv, dbias, dsink),
                     accumulate=True)
        self.dbias.add(dbias, positions)

    def _sums(self, count: int) -> Tensor | None:
        """(count, B, Hkv, D + Dv) zeros."""
        k, v = self.tensors.k, self.tensors.v
        return torch.zeros((count, *k.shape[:2], k.shape[-1] + v.shape[-1]),
                           dtype=one.sums_type(k), device=k.device) if self.wanted.keys else None


def _halves(call: Call) -> tuple[Piece, Piece]:
    """Own keys in two pieces: zigzag's two chunks, or about as many blocks."""
    rank = call.ranks.rank
    rows, runs = call.plan.rows(rank), call.plan.runs(rank)
    middle = runs[0].stop if len(runs) == 2 else min(rows, -(-rows // (2 * BLOCK)) * BLOCK)
    return Piece(rank, slice(0, middle), True), Piece(rank, slice(middle, rows), False)


# ----------------------------------------------------------------------------------- keys of others

def _keys_of_others(call: Call, device: Any) -> Tensor:
    found = call.plan.part(call.ranks.rank, OTHERS, device)
    assert found is not None
    return found


def _others(call: Call, tensors: Tensors, rows: Tensor) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a call over the keys of others, and its options."""
    keys = _keys_of_others(call, rows.device)
    k, v = one.unpacked(rows, tensors.k.shape[-1])
    part = tensors._replace(k=k, v=v, bias=one.columns(tensors.bias, keys),
                            mask=one.columns(tensors.mask, keys), row_spans=None, sink=None)
    return part, one.visibility_options(call, tensors.row_spans, OTHERS, rows.device)


def _begin_keys(call: Call, tensors: Tensors) -> Callable[[], Tensor]:
    """Sends own keys and values; the result waits for those of others, (keys, B, Hkv, D + Dv)."""
    if call.plan.moves_all:
        return call.plan.begin_gathered(call.ranks, one.packed(tensors.k, tensors.v),
                                        _keys_of_others(call, tensors.k.device))
    coming = others.begin_keys(call, tensors)

    def wait() -> Tensor:
        came = coming()
        places = others.places(call, _keys_of_others(call, "cpu"), "others", came.device)
        return torch.empty_like(came).index_copy_(0, places, came)

    return wait


# --------------------------------------------------------------------------------------------- sums

def _begin_sums(call: Call, sums: Tensor | None) -> Callable[[], Tensor | None]:
    """Sends sums for keys of others to their owners; the result waits for those for own keys."""
    if sums is None:
        return lambda: None
    return others.begin_sums(call, sums, _keys_of_others(call, "cpu"), "others")
