"""Keys and sums of a pass by copies from GPU to GPU, in memory that the ranks share (symmetric.py).

Each rank writes its own keys where the others read them, and a run of keys is copied from there to
its place in the order of the sequence. Sums are copied from where a call wrote them to the owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import call as one
from . import call_keys, others
from .call import Call, Tensors
from .copies import as_wide
from .runs import Run, are_few, between, given_rows, neighbours
from .symmetric import SharedMemory, shared_memory

_ALIGNMENT = 256  # of a part


def exchange(call: Call, parts: Sequence[Tensors], has_sums: bool) -> Exchange | None:
    """Of a pass whose calls have these heads; None where the ranks share no memory, or would copy
    many runs. Equal on all ranks, as has_sums has to be: whether sums come back."""
    memory = shared_memory(call.ranks, parts[0].k)
    if memory is None or not len(parts[0].k) or not call.kept(
            "few runs", lambda: are_few(call.plan, call_keys.name_of(call))):
        return None
    layout = call.kept(("layout", tuple(x.k.shape[1] for x in parts)), lambda: _Layout(call, parts))
    memory.begin(layout.keys_bytes, layout.sums_bytes if has_sums else 0)
    return Exchange(memory, call, parts, layout)


class Exchange:
    """As collectives.Exchange."""

    def __init__(self, memory: SharedMemory, call: Call, parts: Sequence[Tensors], layout: _Layout
                 ) -> None:
        self._memory, self._call, self._parts, self._layout = memory, call, parts, layout
        self._rank = call.ranks.rank

    def begin_keys(self, part: int) -> Callable[[], Tensor]:
        """Gives own keys and values to others; the result waits for those of others, and returns
        (keys, B, Hkv, D + Dv) in the order of the sequence."""
        memory, layout, tensors = self._memory, self._layout, self._parts[part]
        k, v = as_wide(tensors.k, tensors.v)
        places = layout.places(memory, part, k.dtype, k.shape[-1])
        k, v = k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)
        for first, n, own_k, own_v in places.given:
            own_k.copy_(k[first:first + n])
            own_v.copy_(v[first:first + n])
        memory.barrier()
        rows = (k.new_zeros if self._call.by_position else k.new_empty)(places.shape)
        done = memory.begin_aside()
        try:
            for place, x in places.taken:
                rows[place:place + len(x)].copy_(x)
        finally:
            memory.end_aside(done)
        for place, x in places.own:  # not aside: multiprocessors copy within a GPU
            rows[place:place + len(x)].copy_(x)
        for first, place, n in () if places.own else layout.own:
            rows[place:place + n, ..., :places.size].copy_(k[first:first + n])
            rows[place:place + n, ..., places.size:].copy_(v[first:first + n])

        def came() -> Tensor:
            memory.wait_aside(done)
            return rows.view(tensors.k.dtype)

        return came

    def begin_sums(self, part: int, sums: Tensor, finish: Callable[[Sequence[Tensor]], None]
                   ) -> Callable[[], None]:
        """Brings the owners sums for their keys, of (keys, ...), and gives `finish` those of others
        for own keys when they are there: of each rank (rows, ...). The result waits for it."""
        memory, layout, shape = self._memory, self._layout, self._layout.keys[part]

        def place(owner: int, rank: int) -> Tensor:
            found = memory.sums(owner, *layout.sums_place(owner, rank, part))
            return found.view(sums.dtype).view(-1, *shape[1:])

        done = memory.begin_aside()
        try:
            for owner in layout.owners:
                to = place(owner, self._rank)
                for other, run in layout.taken:
                    if other == owner:
                        to[run.row:run.row + run.size].copy_(sums[run.place:run.place + run.size])
                memory.signal(owner, part)
            for giver in layout.givers:
                memory.wait(giver, part)
            finish([place(self._rank, other) if other in layout.givers else sums[:0]
                    for other in range(self._call.plan.world_size)])
        finally:
            memory.end_aside(done)
        held = [sums]  # until the current stream waits: its allocator may give the memory away

        def wait() -> None:
            memory.wait_aside(done)
            held.clear()

        return wait


class _Places(NamedTuple):
    """Of one part, in the shared memory of one turn; rows are (n, B, Hkv, size of k and of v).

    given: runs of own rows for others: the first one, how many, where their keys and values go.
    taken, own: runs of others' rows and of own ones for the call, with their places among its keys;
    own is empty where not all own rows are given. shape: of the call's keys. size: of k.
    """

    given: list[tuple[int, int, Tensor, Tensor]]
    taken: list[tuple[int, Tensor]]
    own: list[tuple[int, Tensor]]
    shape: tuple[int, ...]
    size: int


class _Layout:
    """Where rows of a pass's parts lie.

    keys: the shape of each part's (keys, B, Hkv, D + Dv). name, positions: of these keys.
    keys_of_ranks: of each part the rank, first byte and bytes of what all ranks give to others.
    given: runs of own rows that others need: the first row, its place among these, how many.
    gives_all: whether these are all of its rows. own: likewise runs of own rows whose keys the call
    has, and their places. taken: the runs of others' keys that it has, with their owners. owners,
    givers: other ranks to which it brings sums, and who bring it some.
    """

    def __init__(self, call: Call, parts: Sequence[Tensors]) -> None:
        plan, rank = call.plan, call.ranks.rank
        ranks = range(plan.world_size)
        self._rank = rank
        self.name = call_keys.name_of(call)
        self.positions = call_keys.positions(plan, rank, self.name)
        count = plan.sizes.length if self.positions is None else len(self.positions)
        rows = [given_rows(plan, owner) for owner in ranks]
        self.keys = [(count, *x.k.shape[:2], x.k.shape[-1] + x.v.shape[-1]) for x in parts]
        self._widths = [math.prod(shape[1:]) for shape in self.keys]
        self._key_bytes, self._sum_bytes = (
            dtype.itemsize for dtype in (parts[0].k.dtype, one.sums_type(parts[0].k)))
        self.keys_of_ranks = [
            [(owner, self._begin(len(rows[owner]), part, self._key_bytes),
              len(rows[owner]) * self._widths[part] * self._key_bytes) for owner in ranks]
            for part in range(len(parts))]
        in_turn = [(rank + step) % plan.world_size for step in ranks[1:]]  # not all from one at once
        self.gives_all = len(rows[rank]) == plan.rows(rank)
        self.given = [(int(rows[rank][begin]), begin, end - begin)
                      for begin, end in neighbours(rows[rank])]
        self.own = others.own_runs(call, self.positions, self.name)
        self.taken: list[tuple[int, Run]] = [
            (owner, run) for owner in in_turn for run in between(plan, rank, owner, self.name)]
        counts = plan.needed_counts.clone().fill_diagonal_(0)
        self._needed: list[list[int]] = counts.T.tolist()  # [owner][who needs]: rows
        self.owners = [owner for owner in in_turn if self._needed[owner][rank]]
        self.givers = [other for other in ranks if self._needed[rank][other]]
        self.keys_bytes = self._begin(max(map(len, rows)), len(parts), self._key_bytes)
        self.sums_bytes = self._begin(max(map(sum, self._needed)), len(parts), self._sum_bytes)

    def places(self, memory: SharedMemory, part: int, dtype: torch.dtype, size: int) -> _Places:
        """As views, which are made once, and kept with the memory. dtype, size: of k, whose elements
        may be wide."""
        kept: dict[Any, _Places] = memory.views.setdefault(self, {})
        key = part, memory.turn, dtype
        if key not in kept:
            kept[key] = self._made(memory, part, dtype, size)
        return kept[key]

    def _made(self, memory: SharedMemory, part: int, dtype: torch.dtype, size: int) -> _Places:
        count, *row, width = self.keys[part]
        shape = (*row, width * self._key_bytes // dtype.itemsize)
        ranks = [memory.keys(*place).view(dtype).view(-1, *shape)
                 for place in self.keys_of_ranks[part]]
        own = ranks[self._rank]
        return _Places(
            [(first, n, own[to:to + n, ..., :size], own[to:to + n, ..., size:])
             for first, to, n in self.given],
            [(run.place, ranks[owner][run.given:run.given + run.size]) for owner, run in self.taken],
            [(to, own[first:first + n]) for first, to, n in self.own] if self.gives_all else [],
            (count, *shape), size)

    def sums_place(self, owner: int, rank: int, part: int) -> tuple[int, int]:
        """The first byte and the bytes of what a rank brings the owner."""
        row = self._widths[part] * self._sum_bytes
        needed = self._needed[owner]
        return (self._begin(sum(needed), part, self._sum_bytes) + sum(needed[:rank]) * row,
                needed[rank] * row)

    def _begin(self, rows: int, part: int, element: int) -> int:
        """Of a part, where each has so many rows."""
        sizes = (rows * width * element for width in self._widths[:part])
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
