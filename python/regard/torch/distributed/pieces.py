"""Parts of the keys that one rank attends to one after another: pieces of one owner's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import call as one
from .call import Call, Tensors


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
        bias=one.columns(tensors.bias, positions), mask=one.columns(tensors.mask, positions),
        row_spans=None, sink=tensors.sink if piece.is_first else None)
    return part, one.visibility_options(call, tensors.row_spans, owner, device, piece.rows)


class BiasSums:
    """The gradient of a rank's bias, put together from those of parts of the keys.

    whole: None where it is not wanted.
    """

    def __init__(self, bias: Tensor | None, is_wanted: bool) -> None:
        self.whole: Tensor | None = None
        if bias is not None and is_wanted:  # wider where all parts add to the same elements
            wide = one.sums_type(bias) if bias.shape[-1] == 1 else bias.dtype
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
