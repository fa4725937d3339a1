"""Where the keys and sums of a pass lie that ranks exchange by copies (peers.py): blocks of each rank's
memory, and the copies between them. The heads of a pass follow each other, so that those of a part are
neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import call_keys, others
from .call import Call, Pair, Tensors, sums_type
from .runs import Run, between
from .shared_memory import SharedMemory

K, V = 0, 1
_ALIGNMENT = 256  # of keys and of values
_WORD = 4


class Block(NamedTuple):
    """(B, Hkv, rows, D) somewhere in memory; each head's rows are dense.

    address: its number among those of SharedMemory.run. begin: bytes from there to the first row.
    row, head, batch: bytes from one to the next.
    """

    address: int
    begin: int
    row: int
    head: int
    batch: int

    def take(self, append: Callable[..., None], other: Block, heads: tuple[int, int],
             run: tuple[int, int, int]) -> None:
        """Appends the copies of a run: its first row here, the other's first row, and how many.
        append: a step of GpuSteps. heads: B, Hkv."""
        batch, count = heads
        first, others_first, n = run
        is_one = all(x.batch == count * x.head for x in (self, other))
        entries, rows = (1, batch * count) if is_one else (batch, count)
        for entry in range(entries):
            to = self.begin + entry * self.batch + first * self.row
            from_ = other.begin + entry * other.batch + others_first * other.row
            append((self.address, to, self.head), (other.address, from_, other.head),
                   n * self.row, rows)


class Layout:
    """Of a pass whose calls have the heads of `parts`, on one rank.

    keys_bytes, sums_bytes: of memory for the keys of a rank's calls, and for sums that others bring
    it, equal on all ranks.
    """

    def __init__(self, call: Call, parts: Sequence[Tensors]) -> None:
        plan, rank = call.plan, call.ranks.rank
        name = call_keys.name_of(call)
        self._rank, self._world = rank, plan.world_size
        self._counts = call_keys.counts(plan, name)
        self._own = others.own_runs(call, name)
        counts = plan.needed.counts.clone().fill_diagonal_(0)
        self._needed: list[list[int]] = counts.T.tolist()  # [owner][who needs]: rows
        # Each rank begins with another one, so that they do not all write to one at once.
        self._others = [(rank + step) % self._world for step in range(1, self._world)]
        self._given: list[tuple[int, Run]] = [
            (other, run) for other in self._others for run in between(plan, other, rank, name)]
        self._taken: list[tuple[int, Run]] = [
            (owner, run) for owner in self._others for run in between(plan, rank, owner, name)]
        heads = [x.k.shape[1] for x in parts]
        self._batch, self._all_heads = parts[0].k.shape[0], sum(heads)
        self._heads = [(sum(heads[:part]), count) for part, count in enumerate(heads)]
        self._sizes = parts[0].k.shape[-1], parts[0].v.shape[-1]
        self._bytes = parts[0].k.element_size()
        self._sum_bytes = sums_type(parts[0].k).itemsize
        self.keys_bytes = self._size([max(self._counts)], self._bytes)
        self.sums_bytes = max(self._size(needed, self._sum_bytes) for needed in self._needed)

    # ------------------------------------------------------------------------------------------ steps

    def give_keys(self, steps: Any, part: int, k: Tensor, v: Tensor) -> None:
        """Own keys and values, tensors 0 and 1, to others' calls, and waits for theirs. Before that
        of the first part all ranks wait until no call has the memory any more."""
        if part == 0:
            self._meet(steps, 0, self._others, self._others)
        for other, run in self._given:
            for which, x in ((K, k), (V, v)):
                self._keys_block(other, part, which).take(
                    steps.copy, self._of_tensor(which, x), self._entries(part),
                    (run.place, run.own, run.size))
        self._meet(steps, 1, self._others, self._others)

    def keep_keys(self, steps: Any, part: int | None, k: Tensor, v: Tensor) -> None:
        """Own keys and values, tensors 0 and 1, to the own call's, by kernels; None: of all heads."""
        for which, x in ((K, k), (V, v)):
            for first, place, n in self._own:
                self._keys_block(self._rank, part, which).take(
                    steps.place, self._of_tensor(which, x), self._entries(part), (place, first, n))

    def return_sums(self, steps: Any, part: int, dk: Tensor, dv: Tensor) -> None:
        """Sums, tensors 0 and 1, to the owners of their keys; then waits for those of others."""
        for owner, run in self._taken:
            for which, x in ((K, dk), (V, dv)):
                self._sums_block(owner, self._rank, part, which).take(
                    steps.copy, self._of_tensor(which, x), self._entries(part),
                    (run.row, run.place, run.size))
        self._meet(steps, 1, [owner for owner in self._others if self._needed[owner][self._rank]],
                   [giver for giver in self._others if self._needed[self._rank][giver]])

    def _meet(self, steps: Any, kind: int, tells: Sequence[int], hears: Sequence[int]) -> None:
        """Tells ranks that this one has come so far, and waits until others have. kind: 0 or 1."""
        first = kind * self._world
        for rank in tells:
            steps.write((2 * self._world + rank, (first + self._rank) * _WORD))
        for rank in hears:
            steps.wait((2 * self._world + self._rank, (first + rank) * _WORD))

    # ------------------------------------------------------------------------------------------ views

    def keys(self, memory: SharedMemory, part: int, like: Pair) -> Pair:
        """Of a call: (B, Hkv, keys, D and Dv)."""
        return Pair(*(self._of_part(part, memory.keys(
            self._keys_block(self._rank, None, which).begin,
            self._shape(self._counts[self._rank], which), like[which].dtype)) for which in (K, V)))

    def empty_sums(self, part: int, like: Pair) -> Pair:
        """Memory for the sums of a call over keys and values of these types."""
        return Pair(*(x.new_empty((*self._entries(part), self._counts[self._rank], x.shape[-1]),
                                  dtype=sums_type(x)) for x in like))

    def sums_of_others(self, memory: SharedMemory, part: int, like: Pair) -> list[Pair | None]:
        """Of each rank the sums that it brought: (B, Hkv, rows that it needs, D and Dv)."""
        needed = self._needed[self._rank]
        return [None if rank == self._rank or not n else Pair(*(self._of_part(part, memory.sums(
            self._sums_block(self._rank, rank, None, which).begin, self._shape(n, which),
            like[which].dtype)) for which in (K, V))) for rank, n in enumerate(needed)]

    def _of_part(self, part: int, x: Tensor) -> Tensor:
        first, count = self._heads[part]
        return x[:, first:first + count]

    def _shape(self, rows: int, which: int) -> tuple[int, ...]:
        return self._batch, self._all_heads, rows, self._sizes[which]

    # ----------------------------------------------------------------------------------------- blocks

    def _of_tensor(self, which: int, x: Tensor) -> Block:
        """Of own keys or values, tensors 0 and 1, whose rows are dense in each head."""
        e = x.element_size()
        return Block(3 * self._world + which, 0, x.shape[-1] * e, x.stride(1) * e, x.stride(0) * e)

    def _keys_block(self, rank: int, part: int | None, which: int) -> Block:
        """Of the keys or values of a rank's call, in its memory. part: None for all heads."""
        begin = which * self._size_of(K, max(self._counts), self._bytes)
        return self._block(rank, begin, part, which, self._counts[rank], self._bytes)

    def _sums_block(self, owner: int, rank: int, part: int | None, which: int) -> Block:
        """Of what a rank brings the owner, in its memory."""
        needed, e = self._needed[owner], self._sum_bytes
        begin = self._size(needed[:rank], e) + which * self._size_of(K, needed[rank], e)
        return self._block(self._world + owner, begin, part, which, needed[rank], e)

    def _block(self, address: int, begin: int, part: int | None, which: int, rows: int, element: int
               ) -> Block:
        """The heads of a part in a dense one."""
        row = self._sizes[which] * element
        first = 0 if part is None else self._heads[part][0]
        return Block(address, begin + first * rows * row, row, rows * row,
                     self._all_heads * rows * row)

    def _entries(self, part: int | None) -> tuple[int, int]:
        """B and how many heads."""
        return self._batch, self._all_heads if part is None else self._heads[part][1]

    def _size(self, rows: Sequence[int], element: int) -> int:
        """Of so many rows of keys and of values, one block after the other."""
        return sum(self._size_of(which, n, element) for n in rows for which in (K, V))

    def _size_of(self, which: int, rows: int, element: int) -> int:
        size = self._batch * self._all_heads * rows * self._sizes[which] * element
        return -(-size // _ALIGNMENT) * _ALIGNMENT
