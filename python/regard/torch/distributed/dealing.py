"""Which rank has which blocks of rows: three ways to deal the blocks of a sequence.

Each function returns, for each rank, the numbers of its blocks in ascending order. Every block is
dealt once. The last block, which may be shorter, is therefore the last one of its rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

Blocks = tuple[tuple[int, ...], ...]


def contiguous(count: int, ranks: int) -> Blocks:
    """Neighbouring blocks to one rank; numbers of blocks differ by one at most."""
    cuts = [rank * count // ranks for rank in range(ranks + 1)]
    return tuple(tuple(range(begin, end)) for begin, end in zip(cuts, cuts[1:]))


def zigzag(areas: Sequence[float], ranks: int) -> Blocks:
    """Two chunks for each rank, one from the front and one from the back of the sequence.

    With a causal mask the areas of both add up to nearly the same for all ranks. Where the blocks
    do not divide into 2 ranks chunks, some neighbouring chunks are longer by a block: those for
    which the largest area of a rank is the smallest.
    """
    sums = [0, *accumulate(areas)]
    best: list[int] = []
    smallest = -1.0
    for first in range(2 * ranks):
        cuts = _chunks(len(areas), 2 * ranks, first)
        chunks = [sums[end] - sums[begin] for begin, end in zip(cuts, cuts[1:])]
        largest = max(map(sum, zip(chunks, reversed(chunks[ranks:]))))
        if smallest < 0 or largest < smallest:
            best, smallest = cuts, largest
    return tuple((*range(best[rank], best[rank + 1]),
                  *range(best[2 * ranks - 1 - rank], best[2 * ranks - rank]))
                 for rank in range(ranks))


def _chunks(count: int, chunks: int, first: int) -> list[int]:
    """Where chunks begin and end; the rest's blocks go to chunk `first` and those after it."""
    size, rest = divmod(count, chunks)
    return [0, *accumulate(size + ((chunk - first) % chunks < rest) for chunk in range(chunks))]


def greedy(areas: Sequence[float], ranks: int) -> Blocks:
    """The largest block that is left goes to the rank with the smallest area so far.

    Numbers of blocks differ by one at most, so that work which does not depend on the mask is
    spread evenly as well.
    """
    least, more = divmod(len(areas), ranks)
    found: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for block in sorted(range(len(areas)), key=lambda block: (-areas[block], block)):
        area, rank = heapq.heappop(heap)
        while len(found[rank]) > least or (len(found[rank]) == least and more == 0):
            area, rank = heapq.heappop(heap)  # a rank that is full leaves the heap
        more -= len(found[rank]) == least
        found[rank].append(block)
        heapq.heappush(heap, (area + areas[block], rank))
    return tuple(tuple(sorted(blocks)) for blocks in found)
