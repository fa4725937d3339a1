"""Which pairs a mask shows: as a matrix, as a share, as tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..checks import integer
from ..mask_value import Mask
from .band import Band, band_of
from .library import Library, is_concrete, library_of, to_numpy

_PAIRS_AT_ONCE = 2**22
_QUICK = 2**22  # numbers or pairs that __repr__ looks at
_AT_MOST = 2**28  # that `summary` does


class Tiles(NamedTuple):
    """How many tiles of a mask hide all of their pairs, show some, and show all."""

    hidden: int
    partial: int
    full: int


def to_dense(mask: Mask) -> Any:
    """(Sq, Sk) bool; or (B or 1, Hq or 1, Sq, Sk) where the mask has a batch or heads."""
    library = library_of(*mask.arrays().values())
    entries = [rows_of(mask, 0, mask.len_q, b, h, library) for b, h in _entries(mask)]
    if not entries:
        return library.full((mask.batch, mask.heads, mask.len_q, mask.len_k), 0) != 0
    if len(entries) == 1:
        return entries[0]
    return library.xp.stack(entries).reshape(mask.batch, mask.heads, mask.len_q, mask.len_k)


def rows_of(mask: Mask, begin: int, end: int, batch: int, head: int, library: Library) -> Any:
    """(end - begin, Sk) bool: the pairs that these rows of one head show."""
    i = library.order(begin, end)[:, None]
    j = library.order(0, mask.len_k)[None, :]
    seen = (i >= 0) & (j >= 0)
    band = band_of(mask)
    if band.low is not None:
        seen = seen & (j >= i + band.low)
    if band.high is not None:
        seen = seen & (j <= i + band.high)
    if mask.row_spans is not None:
        spans = _part(mask.row_spans, batch, head)
        spans = spans[begin:end] if spans.shape[0] > 1 else spans
        seen = seen & _within(spans, j)
    if mask.key_spans is not None:
        seen = seen & _within(_part(mask.key_spans, batch, head), i.T).T
    if mask.dense is not None:
        dense = _part(mask.dense, batch, head)
        seen = seen & (dense[begin:end] if dense.shape[0] > 1 else dense)
    return seen


def density(mask: Mask) -> float:
    """The share of visible pairs."""
    entries = [_visible_pairs(mask, b, h) for b, h in _entries(mask)]
    pairs = len(entries) * mask.len_q * mask.len_k
    return sum(entries) / pairs if pairs else 0.0


def quick_density(mask: Mask) -> float | None:
    """`density` where it takes little time and the elements can be read; otherwise None."""
    if not all(is_concrete(x) for x in mask.arrays().values()):
        return None
    work = mask.len_q * mask.len_k if _kind(mask) is None else mask.len_q + mask.len_k
    return density(mask) if work * mask.batch * mask.heads <= _QUICK else None


def tiles(mask: Mask, rows: int, keys: int) -> Tiles:
    """The numbers of tiles; those at the end of the sequence may be cut."""
    import numpy

    rows, keys = (integer(name, size, 1, 2**31 - 1)
                  for name, size in (("rows", rows), ("keys", keys)))
    if not mask.len_q or not mask.len_k:
        return Tiles(0, 0, 0)
    heights, widths = (numpy.minimum(size, length - numpy.arange(0, length, size))
                       for size, length in ((rows, mask.len_q), (keys, mask.len_k)))
    hidden = full = total = 0
    for b, h in _entries(mask):
        shown = _shown_in_tiles(mask, rows, keys, b, h)
        hidden += int((shown == 0).sum())
        full += int((shown == heights[:, None] * widths).sum())
        total += shown.size
    return Tiles(hidden, total - hidden - full, full)


def summary(mask: Mask) -> str:
    """Density and tiles, as far as they are found within a second or two."""
    pairs = mask.len_q * mask.len_k * mask.batch * mask.heads
    if _kind(mask) is None and pairs > _AT_MOST:
        return f"not counted: only a test of each of {pairs} pairs would tell"
    text = f"{100 * density(mask):.1f} % of the pairs"
    if pairs // (1 if _kind(mask) is None else 128) > _AT_MOST:
        return text
    found = tiles(mask, 128, 128)
    return (f"{text}; tiles of 128 x 128: {found.hidden} hidden, {found.partial} partial, "
            f"{found.full} full")


def parts_of(mask: Mask, begin: int, end: int, batch: int, head: int) -> Iterator[Any]:
    """These rows of one head as NumPy arrays, a limited number of pairs at a time."""
    library = library_of(*mask.arrays().values())
    step = max(1, _PAIRS_AT_ONCE // max(1, mask.len_k))
    for first in range(begin, end, step):
        yield to_numpy(rows_of(mask, first, min(first + step, end), batch, head, library))


def _entries(mask: Mask) -> Iterator[tuple[int, int]]:
    return ((b, h) for b in range(mask.batch) for h in range(mask.heads))


def _part(x: Any, batch: int, head: int) -> Any:
    """The last two dimensions of one batch entry and head."""
    x = x.reshape((1,) * (4 - len(x.shape)) + tuple(x.shape))
    return x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]


def _within(spans: Any, x: Any) -> Any:
    """Which of the indices x, (1, n), the spans of each row hold."""
    found = None
    for n in range(0, spans.shape[1], 2):
        one = (spans[:, n, None] <= x) & (x < spans[:, n + 1, None])
        found = one if found is None else found | one
    return found


# ------------------------------------------------------------------------------------------ counting

def _kind(mask: Mask) -> str | None:
    """The one kind of spans from which the pairs can be counted, next to causal and window."""
    if mask.dense is not None or (mask.row_spans is not None and mask.key_spans is not None):
        return None
    return "row_spans" if mask.key_spans is None else "key_spans"


def _visible_pairs(mask: Mask, batch: int, head: int) -> int:
    if _kind(mask) is None:
        return sum(int(part.sum()) for part in parts_of(mask, 0, mask.len_q, batch, head))
    return sum(int((end - begin).sum()) for begin, end in _intervals(mask, batch, head))


def _shown_in_tiles(mask: Mask, rows: int, keys: int, batch: int, head: int) -> Any:
    """How many pairs each tile shows, (ceil(Sq / rows), ceil(Sk / keys))."""
    import numpy

    kind = _kind(mask)
    if kind is None:
        cuts = numpy.arange(0, mask.len_k, keys)
        return numpy.array([sum(
            numpy.add.reduceat(part, cuts, axis=1, dtype=numpy.int64).sum(0)
            for part in parts_of(mask, begin, min(begin + rows, mask.len_q), batch, head))
            for begin in range(0, mask.len_q, rows)])
    of_keys = kind == "key_spans"
    own, other = (keys, rows) if of_keys else (rows, keys)
    length, others = (mask.len_k, mask.len_q) if of_keys else (mask.len_q, mask.len_k)
    cuts = numpy.arange(0, others, other)
    shown = numpy.zeros((-(-length // own), len(cuts)), numpy.int64)
    for begin, end in _intervals(mask, batch, head):
        for n in range(len(shown)):
            part = slice(n * own, (n + 1) * own)
            low = numpy.maximum(begin[part, None], cuts)
            high = numpy.minimum(end[part, None], cuts + other)
            shown[n] += numpy.maximum(high - low, 0).sum(0)
    return shown.T if of_keys else shown


def _intervals(mask: Mask, batch: int, head: int) -> Iterator[tuple[Any, Any]]:
    """begin <= end of disjoint intervals for each row, which together are what the row sees in its
    spans and in the band; with key spans for each key."""
    import numpy

    band, spans, length, others = band_of(mask), mask.row_spans, mask.len_q, mask.len_k
    if _kind(mask) == "key_spans":
        band, spans, length, others = band.turned(), mask.key_spans, others, length
    i = numpy.arange(length)
    found = (numpy.array([[0, others]]) if spans is None else
             to_numpy(_part(spans, batch, head)).astype(numpy.int64))
    low = numpy.maximum(0, i + (-math.inf if band.low is None else band.low)).astype(numpy.int64)
    high = numpy.minimum(others, i + (math.inf if band.high is None else band.high + 1))
    ends = found.reshape(len(found), found.shape[1] // 2, 2)
    ends = numpy.clip(ends, low[:, None, None], high[:, None, None]).astype(numpy.int64)
    ends = numpy.take_along_axis(ends, ends[..., :1].argsort(axis=1), axis=1)
    reached = low
    for n in range(ends.shape[1]):
        begin = numpy.maximum(ends[:, n, 0], reached)
        reached = numpy.maximum(begin, ends[:, n, 1])
        yield begin, reached
