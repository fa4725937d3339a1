"""Masks of neighbourhoods: grids of tokens of which each sees those around it."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

from ..checks import for_each, integer
from ..mask_value import MOST_SPANS, Mask
from .band import interleaved
from .library import Library, library_of


def neighbourhood_2d(height: int, width: int, kernel: int | tuple[int, int], *,
                     like: Any = None) -> Mask:
    """A grid whose token (y, x), number y * width + x, sees kernel rows by kernel columns of it.

    The window is centred on the token, and shifted into the grid at its borders, so that every
    token sees as many: it begins at row min(max(y - kernel // 2, 0), height - kernel), and likewise
    for columns.

    The mask has a span for each row of the window, or one span for all where the window is as wide
    as the grid. For more than 8 spans it is a matrix, (S, S) bool, whose hidden tiles are skipped as
    well.

    Args:
        height, width: of the grid; Sq and Sk are height * width.
        kernel: one size for both, or (rows, columns); at most the grid's.
        like: an array, in whose framework and on whose device the mask is made; None is NumPy.

    Raises:
        InvalidArgument: kernel is larger than the grid.
    """
    return _neighbourhood({"height": height, "width": width}, kernel, library_of(like))


def neighbourhood_3d(depth: int, height: int, width: int, kernel: int | tuple[int, int, int], *,
                     like: Any = None) -> Mask:
    """`neighbourhood_2d` for tokens (z, y, x), number (z * height + y) * width + x: a span for each
    row of each layer of the window, as one where they join, and a matrix for more than 8.

    Args:
        depth, height, width: of the grid.
        kernel: one size for all, or (layers, rows, columns).
        like: as in `neighbourhood_2d`.
    """
    sizes = {"depth": depth, "height": height, "width": width}
    return _neighbourhood(sizes, kernel, library_of(like))


def _neighbourhood(grid: dict[str, Any], kernel: Any, library: Library) -> Mask:
    sizes = [integer(name, size, 1, 2**31 - 1) for name, size in grid.items()]
    kernels = _kernels(kernel, sizes)
    length = integer("grid", math.prod(sizes), 1, 2**31 - 1)
    unit = 1  # how many tokens one step of the last axis is
    while len(sizes) > 1 and kernels[-1] == sizes[-1]:
        unit *= sizes.pop()
        kernels.pop()
    if math.prod(kernels[:-1]) <= MOST_SPANS:
        return Mask(length, length, row_spans=_spans(sizes, kernels, unit, library))
    return Mask(length, length, dense=_matrix(sizes, kernels, unit, library))


def _kernels(kernel: Any, sizes: list[int]) -> list[int]:
    axes = ("layers", "rows", "columns")[-len(sizes):]
    return [integer("kernel", one, 1, size)
            for one, size in zip(for_each("kernel", kernel, axes), sizes)]


def _first(x: Any, size: int, kernel: int, library: Library) -> Any:
    """Where the window of place x on an axis begins."""
    return (x - kernel // 2).clip(0, size - kernel)


def _spans(sizes: list[int], kernels: list[int], unit: int, library: Library) -> Any:
    """(S, 2 n): a span for each line of the window along the last axis."""
    place = library.order(0, math.prod(sizes) * unit) // unit
    first = _first(place % sizes[-1], sizes[-1], kernels[-1], library)[:, None]
    line, step, lines = place // sizes[-1], sizes[-1], first * 0
    for size, kernel in zip(reversed(sizes[:-1]), reversed(kernels[:-1])):
        own = _first(line % size, size, kernel, library)[:, None] + library.order(0, kernel)
        # Each place on this axis with each combination of the axes after it.
        lines = (own[:, :, None] * step + lines[:, None, :]).reshape(own.shape[0], -1)
        line, step = line // size, step * size
    begin = (lines + first) * unit
    return interleaved(begin, begin + kernels[-1] * unit, library)


def _matrix(sizes: list[int], kernels: list[int], unit: int, library: Library) -> Any:
    """(S, S) bool: on each axis, the window holds the key's place."""
    def near(size: int, kernel: int) -> Any:
        x = library.order(0, size)
        first = _first(x, size, kernel, library)[:, None]
        return (x >= first) & (x < first + kernel)

    def joined(a: Any, b: Any) -> Any:
        pairs = a[:, None, :, None] & b[None, :, None, :]
        length = a.shape[0] * b.shape[0]
        return pairs.reshape(length, length)

    axes = [near(size, kernel) for size, kernel in zip(sizes, kernels)]
    if unit > 1:
        axes.append(near(unit, unit))
    return reduce(joined, axes)
