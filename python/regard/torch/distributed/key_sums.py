"""The gradients of own keys: the sums of a rank's call, and then those of others in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import direct
from . import call_keys, others
from .call import Call, Pair


class _Piece(NamedTuple):
    """Neighbouring own rows whose sums are neighbours too, wherever they come from.

    own: the first one's place among the keys of the call; None where it has no such keys. of_others:
    ranks that bring sums for these rows, and the first one's place among all that they bring.
    """

    first: int
    rows: int
    own: int | None
    of_others: tuple[tuple[int, int], ...]


def write_sums(call: Call, name: str, into: Pair, sums: Pair, came: Sequence[Pair | None]) -> None:
    """Writes the gradients of own keys and values. name: of the call's keys. sums: of its call, which
    change. came: of each rank those for the keys that it needs."""
    pieces = call.kept(("pieces of sums", name), lambda: _pieces(call, name))
    for which, to in enumerate(into):
        parts = [None if pair is None else pair[which] for pair in came]
        if len(pieces) <= others.MOST_PIECES:
            _write_pieces(pieces, to, sums[which], parts)
        else:
            _write_rows(call, name, to, sums[which], parts)


def _write_pieces(pieces: Sequence[_Piece], to: Tensor, sums: Tensor, came: Sequence[Tensor | None]
                  ) -> None:
    for first, rows, own, of_others in pieces:
        terms = [] if own is None else [sums[:, :, own:own + rows]]
        for rank, place in of_others:
            part = came[rank]
            assert part is not None
            terms.append(part[:, :, place:place + rows])
        piece = to[:, :, first:first + rows]
        for term in terms[1:-1]:
            terms[0] += term
        if not terms:
            piece.zero_()
        elif len(terms) == 1:
            piece.copy_(terms[0])
        else:
            direct.add_rows(terms[0], terms[-1], piece)


def _write_rows(call: Call, name: str, to: Tensor, sums: Tensor, came: Sequence[Tensor | None]
                ) -> None:
    """The same for many pieces."""
    own, places = others.own_places(call, name, sums.device)
    total = sums.new_zeros(to.shape).index_copy_(2, own, sums.index_select(2, places))
    others.add_sums(call, total, came, 2)
    if name == call_keys.SHARED:  # other calls have the other rows
        to.index_copy_(2, own, total.index_select(2, own).to(to.dtype))
    else:
        to.copy_(total)


def _pieces(call: Call, name: str) -> list[_Piece]:
    plan, rank = call.plan, call.ranks.rank
    places = torch.full((1 + plan.world_size, plan.rows(rank)), -1)
    own, at = others.own_places(call, name, "cpu")
    places[0, own] = at
    for other in range(plan.world_size):
        if other != rank:
            needed = plan.needed.rows(other, rank)
            places[1 + other, needed] = torch.arange(len(needed))
    before, after = places[:, :-1], places[:, 1:]
    goes_on = ((before >= 0) & (after == before + 1)) | ((before < 0) & (after < 0))
    cuts = [0, *((~goes_on.all(0)).nonzero()[:, 0] + 1).tolist(), plan.rows(rank)]
    found: list[_Piece] = []
    for begin, end in zip(cuts, cuts[1:]) if plan.rows(rank) else ():
        mine, *of_others = places[:, begin].tolist()
        if mine >= 0 or name != call_keys.SHARED:  # other calls have the other rows
            found.append(_Piece(begin, end - begin, None if mine < 0 else mine, tuple(
                (other, place) for other, place in enumerate(of_others) if place >= 0)))
    return found
