"""Keys and sums of a pass by copies from GPU to GPU, in memory that the ranks share (symmetric.py).

Each rank copies its own keys to where the others read them, and a run of keys is copied from there to
its place in the order of the sequence. Sums are copied from where a call wrote them to the owner.
Copies and waiting go on next to the stream that computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import call as one
from . import call_keys, others
from .call import Call, Pair, Tensors
from .copies import copy
from .runs import Run, are_few, between, given_rows, neighbours
from .symmetric import SharedMemory, shared_memory

_ALIGNMENT = 256  # of keys and of values of a part
_K, _V = 0, 1


def exchange(call: Call, parts: Sequence[Tensors], has_sums: bool) -> Exchange | None:
    """Of a pass whose calls have these heads; None where the ranks share no memory, or would copy
    many runs. Equal on all ranks, as has_sums has to be: whether sums come back."""
    memory = shared_memory(call.ranks, parts[0].k)
    if memory is None or not len(parts[0].k) or not call.kept(
            "few runs", lambda: are_few(call.plan, call_keys.name_of(call))):
        return None
    layout = call.kept(("layout", tuple(x.k.shape[1] for x in parts)), 
                       lambda: _Layout(call, parts, memory.copies))
    memory.begin(layout.keys_bytes, layout.sums_bytes if has_sums else 0)
    return Exchange(memory, call, parts, layout)


class Exchange:
    """As collectives.Exchange."""

    def __init__(self, memory: SharedMemory, call: Call, parts: Sequence[Tensors], layout: _Layout
                 ) -> None:
        self._memory, self._call, self._parts, self._layout = memory, call, parts, layout

    def begin_keys(self, part: int) -> Callable[[], Pair]:
        """Gives own keys and values to others; the result waits for those of others, and returns
        keys and values in the order of the sequence."""
        memory, layout, tensors = self._memory, self._layout, self._parts[part]
        k, v = tensors.k, tensors.v
        make = torch.zeros if self._call.by_position else torch.empty
        rows = Pair(*(make((*x.shape[:2], layout.count, x.shape[-1]), dtype=x.dtype, device=x.device)
                      for x in (k, v)))
        copies = self._call.kept(("copies", part, layout, k.stride(), v.stride()),
                                 lambda: _Copies(layout, part, k, v, memory.copies))
        done = memory.begin_aside()
        try:
            copies.give(memory, k, v)
            memory.barrier()
            memory.run(layout.taken[part], *rows)
            if part:
                copies.keep(memory, k, v, rows)
        finally:
            memory.end_aside(done)
        if not part:  # its call waits for all of this
            copies.keep(memory, k, v, rows)

        def came() -> Pair:
            memory.wait_aside(done)
            return rows

        return came

    def empty_sums(self, part: int) -> Pair:
        """For the sums of a call over the keys of `begin_keys`."""
        k, v = self._parts[part].k, self._parts[part].v
        return Pair(*(x.new_empty((*x.shape[:2], self._layout.count, x.shape[-1]),
                                  dtype=one.sums_type(x)) for x in (k, v)))

    def begin_sums(self, part: int, sums: Pair, finish: Callable[[Sequence[Pair | None]], None]
                   ) -> Callable[[], None]:
        """Brings the owners sums for their keys, and gives `finish` those of others for own keys when
        they are there: of each rank those for the keys that it needs. The result waits for it."""
        memory, layout = self._memory, self._layout
        done = memory.begin_aside()
        try:
            memory.run(layout.returned[part], *sums)
            for owner in layout.owners:
                memory.signal(owner, part)
            for giver in layout.givers:
                memory.wait(giver, part)
            finish(layout.sums_of_others(memory, part, sums))
        finally:
            memory.end_aside(done)
        held = [sums]  # until the current stream waits: its allocator may give the memory away

        def wait() -> None:
            memory.wait_aside(done)
            held.clear()

        return wait


class _Block(NamedTuple):
    """(B, Hkv, rows, D) somewhere in memory; each head's rows are dense.

    address: its number among those of SharedMemory.run. begin: bytes from there to the first row.
    row, head, batch: bytes from one to the next.
    """

    address: int
    begin: int
    row: int
    head: int
    batch: int

    def copies_from(self, other: _Block, heads: tuple[int, int], run: tuple[int, int, int]
                    ) -> list[Any]:
        """Those of a run: its first row here, the other's first row, and how many. heads: B, Hkv."""
        batch, count = heads
        first, others_first, n = run
        is_one = all(x.batch == count * x.head for x in (self, other))
        entries, rows = (1, batch * count) if is_one else (batch, count)
        return [((self.address, self.begin + entry * self.batch + first * self.row, self.head),
                 (other.address, other.begin + entry * other.batch + others_first * other.row,
                  other.head), n * self.row, rows) for entry in range(entries)]


class _Copies:
    """A part's copies of own keys and values, which depend on their strides: to memory that others
    read, and to the call's keys. Where the rows of a head do not follow each other, kernels copy."""

    def __init__(self, layout: _Layout, part: int, k: Tensor, v: Tensor, make: Any) -> None:
        self._layout, self._part = layout, part
        self._is_dense = all(x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] for x in (k, v))
        if not self._is_dense:
            return
        given: list[Any] = []
        own: list[Any] = []
        heads = k.shape[0], k.shape[1]
        for which, x in ((_K, k), (_V, v)):
            e = x.element_size()
            source = _Block(layout.tensor + which, 0, x.shape[-1] * e, x.stride(1) * e,
                            x.stride(0) * e)
            to_others = layout.given_block(part, which)
            to_call = layout.block(part, which, layout.tensor + 2 + which)
            for first, place, n in layout.given:
                given += to_others.copies_from(source, heads, (place, first, n))
            for first, place, n in layout.own:
                own += to_call.copies_from(source, heads, (place, first, n))
        self._given, self._own = make(given), make(own)

    def give(self, memory: SharedMemory, k: Tensor, v: Tensor) -> None:
        """Own keys and values to where others read them."""
        if self._is_dense:
            memory.run(self._given, k, v)
            return
        for which, x in ((_K, k), (_V, v)):
            to = self._layout.given_rows(memory, self._part, which, x)
            for first, place, n in self._layout.given:
                copy(to[:, :, place:place + n], x[:, :, first:first + n])

    def keep(self, memory: SharedMemory, k: Tensor, v: Tensor, rows: Pair) -> None:
        """Own keys and values to their places among the keys of the call."""
        if self._is_dense:
            memory.run(self._own, k, v, *rows)
            return
        for x, to in zip((k, v), rows):
            for first, place, n in self._layout.own:
                copy(to[:, :, place:place + n], x[:, :, first:first + n])


class _Layout:
    """Where rows of a pass's parts lie.

    tensor: the number of the first address that is a tensor's. count: how many keys a call has. given: runs of own rows that others need: the first row, its
    place among these, how many. own: likewise runs of own rows whose keys the call has, and their
    places. taken, returned: of each part the copies of others' keys and values, and of sums to their
    owners. owners, givers: other ranks to which this one brings sums, and who bring it some.
    keys_bytes, sums_bytes: of memory for the keys that a rank gives, and for sums that it gets.
    """

    def __init__(self, call: Call, parts: Sequence[Tensors], make: Any) -> None:
        plan, rank = call.plan, call.ranks.rank
        self._rank, self._world = rank, plan.world_size
        self.tensor = 2 * self._world
        name = call_keys.name_of(call)
        positions = call_keys.positions(plan, rank, name)
        self.count = plan.sizes.length if positions is None else len(positions)
        rows = [given_rows(plan, owner) for owner in range(self._world)]
        self._given_counts = [*map(len, rows)]
        self.given = [(int(rows[rank][begin]), begin, end - begin)
                      for begin, end in neighbours(rows[rank])]
        self.own = others.own_runs(call, name)
        counts = plan.needed_counts.clone().fill_diagonal_(0)
        self._needed: list[list[int]] = counts.T.tolist()  # [owner][who needs]: rows
        in_turn = [(rank + step) % self._world for step in range(1, self._world)]
        self.owners = [owner for owner in in_turn if self._needed[owner][rank]]
        self.givers = [other for other in in_turn if self._needed[rank][other]]
        self._heads = [(x.k.shape[0], x.k.shape[1]) for x in parts]
        self._sizes = parts[0].k.shape[-1], parts[0].v.shape[-1]
        self._bytes = parts[0].k.element_size()
        self._sum_bytes = one.sums_type(parts[0].k).itemsize
        runs: list[tuple[int, Run]] = [  # not all from one rank at once
            (owner, run) for owner in in_turn for run in between(plan, rank, owner, name)]
        self.taken = [make(self._taken(part, runs)) for part in range(len(parts))]
        self.returned = [make(self._returned(part, runs)) for part in range(len(parts))]
        self.keys_bytes = self._begin(len(parts), [max(self._given_counts)], self._bytes)
        self.sums_bytes = max(self._begin(len(parts), needed, self._sum_bytes)
                              for needed in self._needed)

    def block(self, part: int, which: int, address: int) -> _Block:
        """Of the keys or values of a call."""
        return self._block(address, 0, part, which, self.count, self._bytes)

    def given_block(self, part: int, which: int, owner: int | None = None) -> _Block:
        """Of what the owner, or this rank, gives to others."""
        owner = self._rank if owner is None else owner
        most, count = max(self._given_counts), self._given_counts[owner]
        begin = self._begin(part, [most], self._bytes) + which * self._size(
            part, _K, most, self._bytes)
        return self._block(owner, begin, part, which, count, self._bytes)

    def given_rows(self, memory: SharedMemory, part: int, which: int, like: Tensor) -> Tensor:
        """The same of this rank as (B, Hkv, rows, D)."""
        block, n = self.given_block(part, which), self._given_counts[self._rank]
        shape = (*self._heads[part], n, self._sizes[which])
        return memory.keys(self._rank, block.begin, shape, like.dtype)

    def sums_of_others(self, memory: SharedMemory, part: int, like: Pair) -> list[Pair | None]:
        """Of each rank the sums that it brought: (B, Hkv, rows that it needs, D)."""
        found: list[Pair | None] = [None] * self._world
        for giver in self.givers:
            n = self._needed[self._rank][giver]
            found[giver] = Pair(*(memory.sums(
                self._rank, self._sums_block(self._rank, giver, part, which).begin,
                (*self._heads[part], n, self._sizes[which]), like[which].dtype)
                for which in (_K, _V)))
        return found

    def _taken(self, part: int, runs: Sequence[tuple[int, Run]]) -> list[Any]:
        return [copy for owner, run in runs for which in (_K, _V)
                for copy in self.block(part, which, self.tensor + which).copies_from(
                    self.given_block(part, which, owner), self._heads[part],
                    (run.place, run.given, run.size))]

    def _returned(self, part: int, runs: Sequence[tuple[int, Run]]) -> list[Any]:
        return [copy for owner, run in runs for which in (_K, _V)
                for copy in self._sums_block(owner, self._rank, part, which).copies_from(
                    self._block(self.tensor + which, 0, part, which, self.count,
                                self._sum_bytes),
                    self._heads[part], (run.row, run.place, run.size))]

    def _sums_block(self, owner: int, rank: int, part: int, which: int) -> _Block:
        """Of what a rank brings the owner."""
        needed = self._needed[owner]
        begin = self._begin(part, needed, self._sum_bytes)
        begin += sum(self._size(part, _K, n, self._sum_bytes) +
                     self._size(part, _V, n, self._sum_bytes) for n in needed[:rank])
        begin += which * self._size(part, _K, needed[rank], self._sum_bytes)
        return self._block(self._world + owner, begin, part, which, needed[rank], self._sum_bytes)

    def _block(self, address: int, begin: int, part: int, which: int, rows: int, element: int
               ) -> _Block:
        """A dense one."""
        row = self._sizes[which] * element
        return _Block(address, begin, row, rows * row, self._heads[part][1] * rows * row)

    def _begin(self, part: int, rows: Sequence[int], element: int) -> int:
        """Of a part, where each has keys and values of so many rows, one block after the other."""
        return sum(self._size(earlier, which, n, element)
                   for earlier in range(part) for n in rows for which in (_K, _V))

    def _size(self, part: int, which: int, rows: int, element: int) -> int:
        batch, heads = self._heads[part]
        size = batch * heads * rows * self._sizes[which] * element
        return -(-size // _ALIGNMENT) * _ALIGNMENT
