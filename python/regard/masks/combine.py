"""`&` and `|` of masks."""

from __future__ import annotations

from typing import Any

from ..errors import Error, refuse
from ..mask_value import MOST_SPANS, Mask
from .band import EVERYTHING, band_of, clipped, interleaved, options_of, shared_options
from .library import Library, library_of


def both(a: Mask, b: Mask) -> Mask:
    """The pairs that both show. Errors: InvalidArgument."""
    library = _common(a, b, "&")
    found: dict[str, Any] = {}
    for name in ("row_spans", "key_spans"):
        parts = [library.here(getattr(x, name)) for x in (a, b) if getattr(x, name) is not None]
        if len(parts) == 2:
            found[name] = _cut(name, parts[0], parts[1], library)
        elif parts:
            found[name], = parts
    matrices = [library.here(x.dense) for x in (a, b) if x.dense is not None]
    if matrices:
        found["dense"] = matrices[0] & matrices[1] if len(matrices) == 2 else matrices[0]
    options, band = shared_options(a, b), band_of(a).cut(band_of(b))
    whole = options is None or a.whole_lengths or b.whole_lengths
    if options is None:  # two diagonals, which one of a call may express for whole lengths
        options = options_of(band, a.len_q, a.len_k)
    if options is None:  # spans can
        options = {}
        found["row_spans"] = clipped(found.get("row_spans"), band, a.len_q, a.len_k, library)
    return Mask(a.len_q, a.len_k, **found, **options, whole_lengths=whole)


def either(a: Mask, b: Mask) -> Mask:
    """The pairs that one of them shows. Errors: InvalidArgument."""
    library = _common(a, b, "|")
    for mask in (a, b):
        if not mask.arrays() and _bounds(mask) == _NO_BOUNDS:
            return mask
    band, shared, same = band_of(a), shared_options(a, b), _bounds(a) == _bounds(b)
    if not same and any(not mask.arrays() and band_of(mask) == EVERYTHING for mask in (a, b)):
        return Mask(a.len_q, a.len_k, whole_lengths=True)
    # Bounds that hide no pair of whole lengths hide some of others, and where rows have positions.
    whole = a.whole_lengths or b.whole_lengths or not same
    options: dict[str, Any] = {}
    kinds = {name for mask in (a, b) for name in mask.arrays()}
    if band == band_of(b):  # (A & band) | (B & band) = (A | B) & band
        options = shared or {"causal": a.causal, "window": a.window}
        if not (a.arrays() and b.arrays()):
            return Mask(a.len_q, a.len_k, **options, whole_lengths=whole)
    if kinds == {"dense"} and options:
        return Mask(a.len_q, a.len_k, dense=library.here(a.dense) | library.here(b.dense),
                    **options, whole_lengths=whole)
    name = kinds.pop() if kinds else "row_spans"
    if kinds or name == "dense":
        raise _refused(a, b, "|", "is only there for masks that both hold row_spans, or both "
                       "key_spans, or both a matrix and the same causal and window")
    parts = [_spans(mask, name, bool(options), library) for mask in (a, b)]
    count = sum(x.shape[-1] // 2 for x in parts)
    if count > MOST_SPANS:
        raise _refused(a, b, "|", f"has {count} {name}, more than {MOST_SPANS}")
    columns = [x[..., n] for x in parts for n in range(x.shape[-1])]
    if not options:  # the spans say it already; kernels skip tiles by it
        options = options_of(band.hull(band_of(b)), a.len_q, a.len_k) or {}
    return Mask(a.len_q, a.len_k, **{name: library.last_of(columns)}, **options,
                whole_lengths=whole)


_NO_BOUNDS = ("none", (-1, -1))


def _bounds(mask: Mask) -> tuple[str, tuple[int, int]]:
    """causal and window, the same for masks that show the same pairs of all lengths."""
    causal, (left, right) = mask.causal, mask.window
    return ("bottom_right" if causal is True else causal,
            (left, right if causal == "none" else -1))


def _common(a: Mask, b: Mask, operator: str) -> Library:
    """The library of their arrays. Errors: InvalidArgument for other sizes."""
    for size in ("len_q", "len_k", "batch", "heads"):
        one, other = getattr(a, size), getattr(b, size)
        broadcasts = size in ("batch", "heads") and 1 in (one, other)
        if one != other and not broadcasts:
            raise _refused(a, b, operator, f"needs masks of the same sizes; {size} is {one} and "
                           f"{other}")
    return library_of(*a.arrays().values(), *b.arrays().values())


def _cut(name: str, a: Any, b: Any, library: Library) -> Any:
    """Spans of what spans of both show: each of a's cut by each of b's."""
    counts = a.shape[-1] // 2, b.shape[-1] // 2
    if counts[0] * counts[1] > MOST_SPANS:
        raise refuse(name, f"{counts[0]} and {counts[1]} spans",
                     f"their intersection has up to {counts[0] * counts[1]} spans, more than "
                     f"{MOST_SPANS}")
    begin = library.xp.maximum(a[..., 0::2, None], b[..., None, 0::2])
    end = library.xp.minimum(a[..., 1::2, None], b[..., None, 1::2])
    flat = (*begin.shape[:-2], counts[0] * counts[1])
    return interleaved(begin.reshape(flat), end.reshape(flat), library)


def _spans(mask: Mask, name: str, keep_band: bool, library: Library) -> Any:
    """The mask's spans of this kind, with its band unless that is kept apart."""
    spans = getattr(mask, name)
    spans = None if spans is None else library.here(spans)
    if keep_band:
        return spans
    if name == "row_spans":
        return clipped(spans, band_of(mask), mask.len_q, mask.len_k, library)
    return clipped(spans, band_of(mask).turned(), mask.len_k, mask.len_q, library)


def _refused(a: Mask, b: Mask, operator: str, reason: str) -> Error:
    return refuse("mask", f"{a} {operator} {b}", reason)
