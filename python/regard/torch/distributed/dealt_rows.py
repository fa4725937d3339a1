"""Which rows of the whole sequence each rank has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .dealing import Blocks
from .memo import Memo

BLOCK = 128  # rows that are dealt together


@dataclass(frozen=True, eq=False)
class DealtRows:
    """The rows of a sequence, dealt in blocks of 128, the last of which may be shorter. A rank's
    rows are its blocks in ascending order. Tensors are not to be changed.

    Attributes:
        length: of the sequence.
        blocks: the numbers of each rank's blocks.
    """

    length: int
    blocks: Blocks
    _memo: Memo = field(default_factory=Memo)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many rows each rank has."""
        last = -(-self.length // BLOCK) - 1
        short = (last + 1) * BLOCK - self.length
        return tuple(len(blocks) * BLOCK - (short if blocks and blocks[-1] == last else 0)
                     for blocks in self.blocks)

    def of(self, blocks: Iterable[int]) -> Tensor:
        """(n) int64: the rows of blocks."""
        first = torch.tensor(list(blocks), dtype=torch.int64)[:, None] * BLOCK
        rows = (first + torch.arange(BLOCK)).flatten()
        return rows[rows < self.length]

    def positions(self, rank: int, device: Any = "cpu") -> Tensor:
        """(rows) int64, ascending: the row of the sequence that each local row is."""
        return self._memo.tensor(("positions", rank), device, lambda: self.of(self.blocks[rank]))

    def first_positions(self, rank: int, device: Any = "cpu") -> Tensor:
        """(ceil(rows / 128)) int32: the position of the first row of each block of the rank."""
        return self._memo.tensor(("first positions", rank), device,
                                 lambda: self.positions(rank)[::BLOCK].int())

    def places(self, device: Any) -> Tensor:
        """(S) int64: where each row lies among the rows of all ranks, one rank after the other,
        each of which has as many places as the longest one."""
        def found() -> Tensor:
            places = torch.empty(self.length, dtype=torch.int64)
            for rank, count in enumerate(self.counts):
                places[self.positions(rank)] = rank * max(self.counts) + torch.arange(count)
            return places

        return self._memo.tensor("places", device, found)

    @property
    def owners(self) -> Tensor:
        """(S) int64: the rank that has each row."""
        return self.block_owners.repeat_interleave(BLOCK)[:self.length]

    @property
    def block_owners(self) -> Tensor:
        """(blocks) int64."""
        found = torch.empty(sum(map(len, self.blocks)), dtype=torch.int64)
        for rank, blocks in enumerate(self.blocks):
            found[list(blocks)] = rank
        return found

    def runs(self, rank: int) -> list[slice]:
        """The rank's rows, cut where the sequence goes on at another rank."""
        blocks = self.blocks[rank]
        cuts = [n for n in range(1, len(blocks)) if blocks[n] != blocks[n - 1] + 1]
        ends = [min(n * BLOCK, self.counts[rank]) for n in (0, *cuts, len(blocks))]
        return [slice(begin, end) for begin, end in zip(ends, ends[1:])]
