"""Keys and values pass from rank to rank; each rank attends to one part at a time, its own first.

Each part continues the result of the parts before it, in float32 or wider. In backward each part is
called with the final out and lse; its sums for dk and dv travel with it in float32 or wider, and
are home after a full turn.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...gradients import Gradients
from . import key_rows, local_pass
from .call import Call, Kept, Tensors, Wanted
from .pieces import PartialGradients, Piece, attend, finished
from .ranks import completing


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs."""
    held, size = key_rows.packed(tensors.k, tensors.v), tensors.k.shape[-1]
    out, lse = local_pass.empty_merged(tensors)
    for step, owner, following in _turn(call):
        coming = _begin_pass(call, held, following)
        with completing([coming]):
            for piece in _pieces(call, step, owner):
                attend(call, tensors, *key_rows.unpacked(held, size), piece, out, lse)
        held = coming()
    return finished(call, tensors, out, lse)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    made = PartialGradients(call, kept, dout, dlse, wanted)
    tensors = made.tensors
    held, size = key_rows.packed(tensors.k, tensors.v), tensors.k.shape[-1]
    sums = made.empty_sums(len(held))
    for step, owner, following in _turn(call):
        coming = _begin_pass(call, held, following)
        with completing([coming]):
            for piece in _pieces(call, step, owner):
                made.add_piece(*key_rows.unpacked(held, size), sums, piece)
            if sums is not None:
                rows = call.plan.rows(call.ranks.rank) if following is None else following
                sums = call.ranks.begin_pass(sums, rows)()
        held = coming()
    return made.with_sums(sums)


def _begin_pass(call: Call, held: Tensor, following: int | None) -> Callable[[], Tensor]:
    """Sends the keys that are here to the next rank; the result waits for those that come. None is
    the last step, at which none do."""
    return (lambda: held) if following is None else call.ranks.begin_pass(held, following)


def _turn(call: Call) -> list[tuple[int, int, int | None]]:
    """For each step: its number, the owner of the keys that are here, and how many keys come for
    the next step; None at the last one."""
    rank, size = call.ranks.rank, call.ranks.size
    owners = [(rank - step) % size for step in range(size)]
    following = [call.plan.rows(owner) for owner in owners[1:]]
    return list(zip(range(size), owners, [*following, None]))


def _pieces(call: Call, step: int, owner: int) -> list[Piece]:
    """All keys of the owner, or none if no row sees them. Where positions count, keys that do not
    follow each other are apart. The first piece is always there."""
    rank = call.ranks.rank
    if step > 0 and not (call.plan.rows(rank) and call.plan.needed.sees_rank(rank, owner)):
        return []
    runs = call.plan.dealt.runs(owner) if call.by_position else [slice(0, call.plan.rows(owner))]
    return [Piece(owner, run, step == 0 and number == 0) for number, run in enumerate(runs)]
