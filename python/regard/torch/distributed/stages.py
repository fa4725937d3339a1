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
from . import key_rows, local_pass, others
from .call import Call, Kept, Tensors, Wanted
from .dealt_rows import BLOCK
from .needed_keys import OTHERS
from .pieces import PartialGradients, Piece, attend, finished
from .ranks import completing


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs."""
    coming = _begin_keys(call, tensors)
    out, lse = local_pass.empty_merged(tensors)
    rank = call.ranks.rank
    own = Piece(rank, slice(0, call.plan.rows(rank)), True)
    with completing([coming]):
        attend(call, tensors, tensors.k, tensors.v, own, out, lse)
    far, more = _others(call, tensors, coming())
    if far.k.shape[2]:
        local_pass.forward_into(call, far, more, out, lse, continue_from=True)
    return finished(call, tensors, out, lse)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    made = PartialGradients(call, kept, dout, dlse, wanted)
    tensors = made.tensors
    sums = made.empty_sums(tensors.k.shape[2])
    coming = _begin_keys(call, tensors)
    first, second = _halves(call)
    with completing([coming]):
        made.add_piece(tensors.k, tensors.v, sums, first)
    returning = _begin_sums(call, _sums_of_others(made, coming()))
    with completing([returning]):
        made.add_piece(tensors.k, tensors.v, sums, second)
    came = returning()
    if came is not None and sums is not None:
        others.add_sums(call, sums, others.by_rank(call, came))
    return made.with_sums(sums)


def _sums_of_others(made: PartialGradients, rows: Tensor) -> Tensor | None:
    """Sums for the keys of others, whose rows these are."""
    part, more = _others(made.call, made.tensors, rows)
    sums = made.empty_sums(len(rows))
    if len(rows):
        made.add(part, more, sums, _keys_of_others(made.call, rows.device))
    return sums


def _halves(call: Call) -> tuple[Piece, Piece]:
    """Own keys in two pieces: zigzag's two chunks, or about as many blocks."""
    rank = call.ranks.rank
    rows, runs = call.plan.rows(rank), call.plan.dealt.runs(rank)
    middle = runs[0].stop if len(runs) == 2 else min(rows, -(-rows // (2 * BLOCK)) * BLOCK)
    return Piece(rank, slice(0, middle), True), Piece(rank, slice(middle, rows), False)


# ----------------------------------------------------------------------------------- keys of others

def _keys_of_others(call: Call, device: Any) -> Tensor:
    found = call.plan.needed.part(call.ranks.rank, OTHERS, device)
    assert found is not None
    return found


def _others(call: Call, tensors: Tensors, rows: Tensor) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a call over the keys of others, and its options."""
    keys = _keys_of_others(call, rows.device)
    k, v = key_rows.unpacked(rows, tensors.k.shape[-1])
    part = tensors._replace(k=k, v=v, bias=key_rows.columns(tensors.bias, keys),
                            mask=key_rows.columns(tensors.mask, keys), row_spans=None, sink=None)
    return part, local_pass.visibility_options(call, tensors.row_spans, OTHERS, rows.device)


def _begin_keys(call: Call, tensors: Tensors) -> Callable[[], Tensor]:
    """Sends own keys and values; the result waits for those of others, (keys, B, Hkv, D + Dv)."""
    if call.plan.moves_all:
        return call.plan.begin_gathered(call.ranks, key_rows.packed(tensors.k, tensors.v),
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
