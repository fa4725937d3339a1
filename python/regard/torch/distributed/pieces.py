"""Parts of the keys that one rank attends to one after another: pieces of one owner's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gradients import Gradients
from . import key_rows, local_pass
from .call import Call, Kept, Tensors, Wanted, sums_type


class Piece(NamedTuple):
    """Keys of one owner that are attended to together: rows of its own. The first piece of a pass
    counts the sink."""

    owner: int
    rows: slice
    is_first: bool


def part_of(call: Call, tensors: Tensors, keys: Tensor, values: Tensor, piece: Piece
            ) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a call over a piece of its owner's keys and values, and its options."""
    owner, device = piece.owner, keys.device
    positions = call.plan.positions(owner, device)[piece.rows]
    part = tensors._replace(
        k=keys[:, :, piece.rows], v=values[:, :, piece.rows],
        bias=key_rows.columns(tensors.bias, positions), mask=key_rows.columns(tensors.mask, positions),
        row_spans=None, sink=tensors.sink if piece.is_first else None)
    return part, local_pass.visibility_options(call, tensors.row_spans, owner, device, piece.rows)


def attend(call: Call, tensors: Tensors, keys: Tensor, values: Tensor, piece: Piece, out: Tensor,
           lse: Tensor) -> None:
    """Writes out and lse, or continues what the pieces before have written."""
    part, more = part_of(call, tensors, keys, values, piece)
    local_pass.forward_into(call, part, more, out, lse, continue_from=not piece.is_first)


def finished(call: Call, tensors: Tensors, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what PartialGradients needs."""
    out = out.to(call.out_type or tensors.q.dtype)
    return out, lse, (out, lse, *tensors)


class PartialGradients:
    """Gradients of one rank's rows, to which parts of the keys add one after another.

    dq, dbias, dsink: as far as they are wanted. kept: of `finished`.
    """

    def __init__(self, call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
                 ) -> None:
        out, lse, *rest = kept
        self.tensors = tensors = Tensors(*rest)  # type: ignore[arg-type]
        self.call, self.results, self.wanted = call, (dout, dlse, out, lse), wanted
        self.dq = torch.zeros_like(tensors.q, dtype=sums_type(tensors.q)) if wanted.q else None
        self.dbias = BiasSums(tensors.bias, wanted.bias)
        self.dsink = (torch.zeros_like(tensors.sink)
                      if wanted.sink and tensors.sink is not None else None)

    def empty_sums(self, rows: int) -> Tensor | None:
        """Zeros for dk and dv of so many keys, (rows, B, Hkv, D + Dv)."""
        k, v = self.tensors.k, self.tensors.v
        return (k.new_zeros(key_rows.packed_shape(rows, k, v), dtype=sums_type(k))
                if self.wanted.keys else None)

    def add_piece(self, keys: Tensor, values: Tensor, sums: Tensor | None, piece: Piece) -> None:
        """keys, values and sums: of all rows of the piece's owner."""
        part, more = part_of(self.call, self.tensors, keys, values, piece)
        positions = self.call.plan.positions(piece.owner, keys.device)[piece.rows]
        self.add(part, more, None if sums is None else sums[piece.rows], positions,
                 self.dsink if piece.is_first else None)

    def add(self, part: Tensors, more: dict[str, Any], sums: Tensor | None, positions: Tensor,
            dsink: Tensor | None = None) -> None:
        """part, more, sums and positions: the tensors and options of a call over some keys, their
        sums, and where they are in the sequence."""
        dk, dv = (None, None) if sums is None else key_rows.unpacked(sums, part.k.shape[-1])
        dbias = self.dbias.of_part(part.bias)
        local_pass.backward(self.call, part, more, self.results, Gradients(self.dq, dk, dv, dbias, dsink),
                     accumulate=True)
        self.dbias.add(dbias, positions)

    def with_sums(self, sums: Tensor | None) -> Gradients:
        """All gradients, where these are the sums for the rank's own keys."""
        dk, dv = ((None, None) if sums is None else
                  key_rows.unpacked(sums, self.tensors.k.shape[-1]))
        return Gradients(self.dq, dk, dv, self.dbias.whole, self.dsink)


class BiasSums:
    """The gradient of a rank's bias, put together from those of parts of the keys.

    whole: None where it is not wanted.
    """

    def __init__(self, bias: Tensor | None, is_wanted: bool) -> None:
        self.whole: Tensor | None = None
        if bias is not None and is_wanted:  # wider where all parts add to the same elements
            wide = sums_type(bias) if bias.shape[-1] == 1 else bias.dtype
            self.whole = torch.zeros_like(bias, dtype=wide)

    def of_part(self, bias: Tensor | None) -> Tensor | None:
        """Zeros for the gradient of one part."""
        if self.whole is None or bias is None:
            return None
        return torch.zeros_like(bias, dtype=self.whole.dtype)

    def add(self, part: Tensor | None, positions: Tensor) -> None:
        """positions: of the part's keys in the sequence."""
        if self.whole is None or part is None:
            return
        if self.whole.shape[-1] == 1:
            self.whole += part
        else:
            self.whole.index_copy_(-1, positions, part)
