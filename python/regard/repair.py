"""Advice in an error's text, where the shapes show what the caller meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import InvalidArgument

Shape = Sequence[int]
_WRITTEN = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")


def layout_advice(q: Shape, k: Shape, v: Shape, layout: str) -> str:
    """Advice where heads and lengths seem to be swapped: only in the other layout do q, k and v fit
    together, or are there as many queries as keys. Otherwise ""."""
    other = _other(layout)
    if len(q) != 4 or not _fit(q, k, v, other):
        return ""
    row, row_of_other = _row(layout), _row(other)
    swapped = q[row] != k[row] and q[row_of_other] == k[row_of_other]
    return _other_layout_fits(layout) if swapped or not _fit(q, k, v, layout) else ""


def advised(error: InvalidArgument, q: Shape, k: Shape, v: Shape, layout: str,
            shapes: Mapping[str, Shape], dense: str) -> InvalidArgument:
    """The error with advice in its text, or unchanged where there is none.

    shapes: those of the options; dense: an expression for a dense copy of the array "{}".
    """
    argument, more = error.argument, ""
    if "the last stride must be 1" in str(error):
        if argument in _WRITTEN:
            return error  # a dense copy would take the result
        more = f"; {dense.format(argument)} is"
    elif argument in ("k", "v"):
        more = layout_advice(q, k, v, layout)
    elif argument in ("bias", "mask") and len(q) == 4:
        more = _scores_advice(argument, shapes.get(argument, ()), q, k, v, layout)
    return type(error)(str(error) + more, argument, error.value) if more else error


def _scores_advice(argument: str, shape: Shape, q: Shape, k: Shape, v: Shape, layout: str) -> str:
    """For an array that does not broadcast to (B, Hq, Sq, Sk)."""
    other, row = _other(layout), _row(layout)
    if _fit(q, k, v, other) and _broadcasts(shape, (q[0], q[row], q[3 - row], k[3 - row])):
        return _other_layout_fits(layout)
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    if tuple(shape) == (q[0], k[row]):
        return f"; for keys of each batch entry give {argument}[:, None, None, :]"
    return ""


def _other(layout: str) -> str:
    return "bhsd" if layout == "bshd" else "bshd"


def _other_layout_fits(layout: str) -> str:
    other = _other(layout)
    return (f"; these shapes fit layout='{other}', ({', '.join(other.upper())}): "
            "are heads and lengths swapped?")


def _row(layout: str) -> int:
    """The axis of queries and keys; the axis of heads is 3 minus it."""
    return 1 if layout == "bshd" else 2


def _fit(q: Shape, k: Shape, v: Shape, layout: str) -> bool:
    row = _row(layout)
    head = 3 - row
    return (len(k) == len(v) == 4 and q[0] == k[0] == v[0] and q[3] == k[3]
            and k[head] == v[head] and k[row] == v[row] and k[head] > 0
            and q[head] % k[head] == 0)


def _broadcasts(shape: Shape, to: Shape) -> bool:
    return 0 < len(shape) <= len(to) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(to)))
