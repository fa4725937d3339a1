"""Which keys a rank needs of which rank, and what its rows see of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .dealt_rows import BLOCK, DealtRows
from .memo import Memo
from .visibility import among, blocks_seen, plain
from .visible_keys import VisibleKeys

OTHERS = -1  # in place of an owner: all ranks but the one that asks


@dataclass(frozen=True, eq=False)
class NeededKeys:
    """Tensors that it returns are its own, and not to be changed.

    Attributes:
        dealt: which rows, and so which keys, each rank has.
        visible: what rows see.
        moves_all: whether every rank needs all keys, or those that its rows see.
    """

    dealt: DealtRows
    visible: VisibleKeys
    moves_all: bool
    _memo: Memo = field(default_factory=Memo)

    @cached_property
    @plain
    def sees(self) -> Tensor:
        """(ranks, blocks) bool: whether some row of the rank sees some key of the block."""
        return blocks_seen(self.visible.spans, self.dealt.owners, len(self.dealt.blocks),
                           self.dealt.length, BLOCK)

    @plain
    def sees_rank(self, rank: int, other: int) -> bool:
        """Whether some row of the rank sees some key of the other rank."""
        return bool(self.sees[rank, list(self.dealt.blocks[other])].any())

    @property
    def _blocks(self) -> Tensor:
        """(ranks, blocks) bool: the blocks of `positions`."""
        return torch.ones_like(self.sees) if self.moves_all else self.sees

    def positions(self, rank: int, device: Any = "cpu") -> Tensor:
        """(n) int64, ascending: where the keys that the rank needs, its own among them, stand in
        the sequence."""
        return self._memo.tensor(
            ("keys", rank), device,
            lambda: self.dealt.of(self._blocks[rank].nonzero()[:, 0].tolist()))

    def rows(self, rank: int, owner: int, device: Any = "cpu") -> Tensor:
        """(n) int64, ascending: which local rows of the owner the rank needs."""
        def found() -> Tensor:
            is_needed = self._blocks[rank].index_select(0, self.dealt.positions(owner) // BLOCK)
            return is_needed.nonzero()[:, 0]

        return self._memo.tensor(("needed", rank, owner), device, found)

    @cached_property
    @plain
    def counts(self) -> Tensor:
        """(ranks, owners) int64: how many `rows` there are."""
        owners, ranks = self.dealt.block_owners, len(self.dealt.blocks)
        sizes = torch.full_like(owners, BLOCK)
        sizes[-1] -= len(owners) * BLOCK - self.dealt.length
        counts = torch.zeros(ranks, ranks, dtype=torch.int64)
        return counts.index_add_(1, owners, self._blocks * sizes)

    @cached_property
    @plain
    def moved(self) -> tuple[list[int], list[int]]:
        """For each rank, how many keys of others it needs, and how many times others need its own
        keys."""
        others = self.counts.clone().fill_diagonal_(0)
        return others.sum(1).tolist(), others.sum(0).tolist()

    # ---------------------------------------------------------------------------- keys of a call

    @plain
    def part(self, rank: int, owner: int | None, device: Any, filled: bool = False
             ) -> Tensor | None:
        """The positions of the keys that a call of the rank has: those of one owner, with OTHERS
        those that it needs of others, or with None all that it needs. None for the whole sequence.
        filled: with None also the positions between them, at which nothing is visible."""
        if owner == OTHERS:
            return self._memo.tensor(("keys of others", rank), device, lambda: self.dealt.of(
                (self._blocks[rank] & (self.dealt.block_owners != rank)).nonzero()[:, 0].tolist()))
        if owner is not None:
            return self.dealt.positions(owner, device)
        if self.moves_all:
            return None
        keys = self.positions(rank, device)
        if not filled or not len(keys):
            return keys
        whole = self.positions(rank)
        return torch.arange(int(whole[0]), int(whole[-1]) + 1, device=device)

    def spans_of_part(self, rank: int, owner: int | None, device: Any, filled: bool = False
                      ) -> Tensor | None:
        """(1 or B, 1 or Hq, rows, 2 n) int32: what the rank's rows see of `part`, by the places of
        keys in it. None is every key."""
        whole = self.visible.spans
        if whole is None:
            return None

        def found() -> Tensor:
            spans = whole.index_select(-2, self.dealt.positions(rank))
            keys = self.part(rank, owner, "cpu", filled)
            return spans if keys is None else among(spans, keys.int())

        return self._memo.tensor(("spans", rank, owner, filled), device, found)

    def first_if_adjacent(self, rank: int, owner: int | None, filled: bool, rows: slice
                          ) -> int | None:
        """The position of the first key of `rows` of `part`, where they follow each other in the
        sequence; 0 where there are none."""
        keys = self.part(rank, owner, "cpu", filled)
        if keys is None:
            return rows.start or 0
        keys = keys[rows]
        if not len(keys):
            return 0
        first, last = int(keys[0]), int(keys[-1])
        return first if last - first + 1 == len(keys) else None
