"""Which rank has which blocks of rows: five ways to deal the blocks of a sequence.

Each function returns, for each rank, the numbers of its blocks in ascending order. Every block is
dealt once. The last block, which may be shorter, is therefore the last one of its rank.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, groupby

Blocks = tuple[tuple[int, ...], ...]


def contiguous(count: int, ranks: int) -> Blocks:
    """Neighbouring blocks to one rank; numbers of blocks differ by one at most."""
    cuts = [rank * count // ranks for rank in range(ranks + 1)]
    return tuple(tuple(range(begin, end)) for begin, end in zip(cuts, cuts[1:]))


def by_area(areas: Sequence[float], ranks: int) -> Blocks:
    """Neighbouring blocks to one rank, cut where the areas before a cut are nearest to equal shares."""
    sums = [0.0, *accumulate(areas)]
    if not sums[-1]:
        return contiguous(len(areas), ranks)
    cuts = [0]
    for rank in range(1, ranks):
        share = sums[-1] * rank / ranks
        after = bisect_left(sums, share, cuts[-1])
        is_nearer = after > cuts[-1] and share - sums[after - 1] <= sums[after] - share
        cuts.append(after - is_nearer)
    cuts.append(len(areas))
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


def documents(areas: Sequence[float], labels: Sequence[int], ranks: int, shares: float) -> Blocks:
    """Each document to few ranks, those with the least area so far, as many blocks to each rank.

    labels: equal for neighbouring blocks of one document. shares: to how many times as many ranks as
    a document needs, by its blocks and its area; more make areas more even, and more keys move.
    """
    least, more = divmod(len(areas), ranks)
    room = [least + (rank < more) for rank in range(ranks)]
    sums, found = [0.0] * ranks, [list[int]() for _ in range(ranks)]
    mean = sum(areas) / ranks or 1.0

    def lightest(count: int) -> list[int]:
        return heapq.nsmallest(count, (rank for rank in range(ranks) if room[rank]),
                               key=lambda rank: (sums[rank], rank))

    for blocks in _groups(areas, labels):
        needed = max(len(blocks) / max(1, least), sum(areas[block] for block in blocks) / mean)
        count = math.ceil(math.ceil(needed) * shares)
        chosen = lightest(count)
        for block in sorted(blocks, key=lambda block: (-areas[block], block)):
            chosen = [rank for rank in chosen if room[rank]] or lightest(count)
            rank = min(chosen, key=lambda rank: (sums[rank], rank))
            found[rank].append(block)
            sums[rank] += areas[block]
            room[rank] -= 1
    return tuple(tuple(sorted(blocks)) for blocks in found)


def _groups(areas: Sequence[float], labels: Sequence[int]) -> list[list[int]]:
    """Neighbours with one label, those with the most area a block first."""
    found = [list(blocks) for _, blocks in groupby(range(len(areas)), key=lambda n: labels[n])]
    return sorted(found, key=lambda blocks: (-sum(areas[n] for n in blocks) / len(blocks), blocks))
