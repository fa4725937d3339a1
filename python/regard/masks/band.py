"""Causal masks and windows as one thing: a band of diagonals."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..mask_value import Mask
from .library import Library


class Band(NamedTuple):
    """The pairs with low <= j - i <= high. None is unbounded."""

    low: int | None
    high: int | None

    def cut(self, other: Band) -> Band:
        """The pairs of both."""
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return Band(max(lows) if lows else None, min(highs) if highs else None)

    def hull(self, other: Band) -> Band:
        """The narrowest band that holds both."""
        return Band(None if self.low is None or other.low is None else min(self.low, other.low),
                    None if self.high is None or other.high is None else max(self.high, other.high))

    def turned(self) -> Band:
        """The same band with queries and keys exchanged."""
        return Band(None if self.high is None else -self.high,
                    None if self.low is None else -self.low)


EVERYTHING = Band(None, None)


def band_of(mask: Mask) -> Band:
    """What causal and window show. A bound that hides no pair is None."""
    offset = 0 if mask.causal == "top_left" else mask.len_k - mask.len_q
    left, right = mask.window
    low = None if left < 0 else offset - left
    high = offset if mask.causal != "none" else None if right < 0 else offset + right
    return Band(None if low is None or low <= 1 - mask.len_q else low,
                None if high is None or high >= mask.len_k - 1 else high)


def shared_options(a: Mask, b: Mask) -> dict[str, Any] | None:
    """causal and window of the pairs that the bands of both show, whatever the real lengths are.

    None where one band follows the diagonal of top_left, and the other one that of bottom_right.
    """
    masks = [mask for mask in (a, b) if mask.causal != "none" or mask.window != (-1, -1)]
    if len({mask.causal == "top_left" for mask in masks}) > 1:
        return None
    causals = [mask.causal for mask in masks]
    causal = next((one for one in ("top_left", "bottom_right", True) if one in causals), "none")
    # -1 is unbounded.
    left, right = (max(sizes) if -1 in sizes else min(sizes) for sizes in zip(a.window, b.window))
    return {"causal": causal, "window": (left, right if causal == "none" else -1)}


def options_of(band: Band, len_q: int, len_k: int) -> dict[str, Any] | None:
    """causal and window that show this band; None where they cannot."""
    offset = len_k - len_q
    for causal, diagonal in (("top_left", 0), ("bottom_right", offset), ("none", offset)):
        left = -1 if band.low is None else diagonal - band.low
        right = -1 if band.high is None else band.high - diagonal
        if (band.low is not None and left < 0) or (band.high is not None and right < 0):
            continue
        if causal == "none":
            return {"causal": causal, "window": (left, right)}
        if right == 0:
            return {"causal": causal, "window": (left, -1)}
    return None


def clipped(spans: Any, band: Band, length: int, others: int, library: Library) -> Any:
    """Spans (..., length, 2 n) of the part of them in the band; None stands for one span of all.

    others: how many there are of what the spans count.
    """
    i = library.order(0, length)[:, None]
    zero = i * 0
    begin, end = (zero, zero + others) if spans is None else (spans[..., 0::2], spans[..., 1::2])
    if band.low is not None:
        begin = library.xp.maximum(begin, i + band.low)
    if band.high is not None:
        end = library.xp.minimum(end, i + (band.high + 1))
    return interleaved(begin, end, library)


def interleaved(begin: Any, end: Any, library: Library) -> Any:
    """begin and end, (..., n) each, as spans (..., 2 n)."""
    pairs = library.last_of([begin, end])
    return pairs.reshape((*pairs.shape[:-2], 2 * pairs.shape[-2]))
