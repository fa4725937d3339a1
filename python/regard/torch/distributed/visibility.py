"""Which keys each row of the whole sequence sees, as spans: the one form of every mask of a plan.

Spans are (1 or B, 1 or Hq, S, 2 n) int32 on the CPU: begin, end, begin, end ... of visible keys,
cut to [0, S). A row that sees nothing has spans with end <= begin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ... import masks
from ...checks import causal as causal_form
from ...checks import shown
from ...checks import window as window_form
from ...errors import InvalidArgument, Unsupported, WrongType, refuse
from ...mask_value import Mask
from ...masks.band import band_of, clipped
from ...masks.library import library_of

_CPU = torch.empty(0, device="cpu")

Given = ParamSpec("Given")
Made = TypeVar("Made")


def plain(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """A function whose new tensors are ordinary ones on the CPU, also where the caller is in
    inference mode or has set a default device: plans keep them for other calls."""
    @wraps(make)
    def made(*arguments: Given.args, **more: Given.kwargs) -> Made:
        with torch.inference_mode(False), torch.device("cpu"):
            return make(*arguments, **more)

    return made


def combined(length: int, cu_seqlens: Any, causal: Any, window: Any, mask: Any) -> Mask | None:
    """What all of them show, with spans on the CPU; None if that is every pair.

    Errors: InvalidArgument, WrongType; Unsupported for a mask with key_spans or a matrix.
    """
    parts = []
    if cu_seqlens is not None:
        parts.append(masks.documents(_on_cpu(cu_seqlens), length, like=_CPU))
    aligned = causal_form("causal", causal) != "none"  # both alignments: as many rows as keys
    sides = window_form("window", window)
    if aligned or sides != (-1, -1):
        parts.append(Mask(length, length, causal="top_left" if aligned else False, window=sides))
    if mask is not None:
        parts.append(_checked(mask, length).like(_CPU))
    return reduce(lambda one, other: one & other, parts) if parts else None


def length_of(cu_seqlens: Any) -> int:
    """Where the last document ends. Errors: those of `masks.documents`."""
    return masks.documents(_on_cpu(cu_seqlens), like=_CPU).len_q


def _on_cpu(cu_seqlens: Any) -> Any:
    return cu_seqlens.cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens


def _checked(mask: Any, length: int) -> Mask:
    if not isinstance(mask, Mask):
        raise refuse("mask", shown(mask), "must be a regard.masks.Mask; a bool tensor is given to "
                     "`attention`, each rank its own rows", WrongType)
    if (mask.len_q, mask.len_k) != (length, length):
        raise refuse("mask", mask, f"must be of {length} queries and keys", InvalidArgument)
    for name in ("key_spans", "dense"):
        if getattr(mask, name) is not None:
            raise refuse("mask", mask, f"holds {name}; a plan takes row_spans, causal and window",
                         Unsupported)
    return mask


def spans_of(mask: Mask) -> Tensor:
    """The mask's spans and band as spans alone."""
    library = library_of(_CPU)
    cut: Tensor = clipped(mask.row_spans, band_of(mask), mask.len_q, mask.len_k, library)
    cut = cut.clamp(0, mask.len_k).reshape((1,) * (4 - cut.dim()) + cut.shape)
    return cut.expand(*cut.shape[:2], mask.len_q, -1).to(torch.int32)


def rows_areas(spans: Tensor | None, length: int) -> Tensor:
    """(S) float64: how many keys each row sees, the mean over batch entries and heads."""
    if spans is None:
        return torch.full((length,), float(length), dtype=torch.float64)
    begin, end = spans[..., 0::2].long(), spans[..., 1::2].long()
    begin, order = begin.sort(dim=-1)
    end = end.gather(-1, order)
    seen = torch.zeros(begin.shape[:-1], dtype=torch.int64)
    reached = torch.zeros_like(seen)
    for n in range(begin.shape[-1]):
        seen += (end[..., n] - torch.maximum(begin[..., n], reached)).clamp(min=0)
        reached = torch.maximum(reached, end[..., n])
    return seen.double().mean(dim=(0, 1))


def blocks_seen(spans: Tensor | None, ranks_of_rows: Tensor, ranks: int, length: int,
                block: int) -> Tensor:
    """(ranks, blocks) bool: whether some row of a rank sees some key of a block.

    ranks_of_rows: (S) int64, the rank that has each row.
    """
    count = -(-length // block)
    if spans is None:
        has_rows = torch.zeros(ranks, dtype=torch.bool)
        has_rows[ranks_of_rows] = True
        return has_rows[:, None].expand(ranks, count)
    begin, end = spans[..., 0::2].long(), spans[..., 1::2].long()
    shown = end > begin
    rank = ranks_of_rows[:, None].expand_as(begin)[shown]
    edges = torch.zeros(ranks, count + 1, dtype=torch.int64)
    one = torch.ones_like(rank)
    edges.index_put_((rank, begin[shown] // block), one, accumulate=True)
    edges.index_put_((rank, (end[shown] - 1) // block + 1), -one, accumulate=True)
    return edges.cumsum(1)[:, :-1] > 0


def among(spans: Tensor, keys: Tensor) -> Tensor:
    """Spans of positions as spans of the places of these positions in `keys`.

    keys: (n) int32, ascending positions. A span holds the same of these keys before and after.
    """
    return torch.searchsorted(keys, spans.contiguous(), out_int32=True)


def intersection(one: Tensor, other: Tensor) -> Tensor:
    """Spans of what both show, by the mask algebra. Errors: InvalidArgument for more than 8."""
    length = max(one.shape[-2], other.shape[-2])
    cut = Mask(length, 0, row_spans=one) & Mask(length, 0, row_spans=other)
    return cut.row_spans  # type: ignore[no-any-return]
