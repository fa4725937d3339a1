"""What a mask shows of the whole sequence. All plans of one mask share it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...mask_value import Mask
from ...masks.band import band_of, options_of
from .dealt_rows import BLOCK
from .visibility import plain, rows_areas, spans_of


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """Which keys the rows see. Tensors that it returns are its own, and not to be changed.

    Attributes:
        mask: a Mask with row_spans, causal and window; None shows every pair.
        length: of the sequence.
    """

    mask: Mask | None
    length: int

    @cached_property
    @plain
    def spans(self) -> Tensor | None:
        """(1 or B, 1 or Hq, S, 2 n) int32: the keys that each row sees; None is every key."""
        return None if self.mask is None else spans_of(self.mask)

    @cached_property
    @plain
    def row_areas(self) -> Tensor:
        """(S) float64: how many keys each row sees, the mean over batch entries and heads."""
        return rows_areas(self.spans, self.length)

    @cached_property
    @plain
    def block_areas(self) -> list[float]:
        """How many pairs are visible to the rows of each block."""
        padded = torch.zeros(-(-self.length // BLOCK) * BLOCK, dtype=torch.float64)
        padded[:self.length] = self.row_areas
        found: list[float] = padded.reshape(-1, BLOCK).sum(1).tolist()
        return found

    @cached_property
    @plain
    def documents(self) -> list[int] | None:
        """For each block the first key that its last row sees, the length where it sees none; where
        neighbouring blocks mostly share it, as those of a packed document do; else None."""
        if self.spans is None or self.spans.shape[:2] != (1, 1):
            return None
        last = torch.arange(BLOCK, self.length + BLOCK, BLOCK).clamp(max=self.length) - 1
        spans = self.spans[0, 0, last]
        first = spans[:, 0].where(spans[:, 0] < spans[:, 1], self.length)
        if 2 * int((first.diff() != 0).sum()) >= len(first):
            return None
        labels: list[int] = first.tolist()
        return labels

    @cached_property
    def band(self) -> dict[str, Any] | None:
        """causal and window of a mask that is nothing else; None for another mask, and for none."""
        if self.mask is None or self.mask.row_spans is not None:
            return None
        return options_of(band_of(self.mask), self.length, self.length)
