"""Keys and sums of a pass by copies from GPU to GPU, in memory that the ranks share (symmetric.py).

Runs of keys are copied from where the caller has them to the memory that another rank's call reads,
in the order of the sequence; sums from where a call wrote them to the keys' owner. Copy engines do
this next to the stream that computes: no multiprocessor copies, tells others, or waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import call_keys
from .call import Call, Pair, Tensors
from .copies import copy
from .peer_layout import Layout
from .runs import are_few
from .shared_memory import SharedMemory
from .symmetric import memory_of


def exchange(call: Call, tensors: Tensors, parts: Sequence[Tensors], has_sums: bool
             ) -> Exchange | None:
    """For a pass whose calls have these parts of the tensors' heads; None where the ranks share no
    memory, or would copy many runs. Equal on all ranks, as has_sums has to be: whether sums come
    back."""
    memory = memory_of(call.ranks, parts[0].k)
    if memory is None or not len(parts[0].k) or not call.kept(
            "few runs", lambda: are_few(call.plan, call_keys.name_of(call))):
        return None
    layout = call.kept(("layout", tuple(x.k.shape[1] for x in parts)), lambda: Layout(call, parts))
    memory.begin(layout.keys_bytes, layout.sums_bytes if has_sums else 0)
    return Exchange(memory, call, tensors, parts, layout)


class Exchange:
    """As collectives.Exchange."""

    at_once = True

    def __init__(self, memory: SharedMemory, call: Call, tensors: Tensors, parts: Sequence[Tensors],
                 layout: Layout) -> None:
        self._memory, self._call, self._parts, self._layout = memory, call, parts, layout
        # Copies of own keys to their places: at once where heads are as copies take them.
        self._own = ([self._placing(None, tensors.k, tensors.v)]
                     if all(_has_dense_rows(x) for x in (tensors.k, tensors.v)) else [])
        self._places_all = bool(self._own)
        self._keys = [memory.kept(layout, part, partial(self._views, part))
                      for part in range(len(parts))]
        if call.by_position:  # there are zeros between keys that some row sees
            for pair in self._keys:
                pair.k.zero_()
                pair.v.zero_()

    def begin_keys(self, part: int) -> Callable[[], Pair]:
        """Gives own keys and values to others; the result waits for those of others, and returns
        keys and values in the order of the sequence, which the next exchange overwrites."""
        memory, layout = self._memory, self._layout
        k, v = (_with_dense_rows(x) for x in (self._parts[part].k, self._parts[part].v))
        done = memory.run_aside(self._steps(layout.give_keys, part, k, v), k, v)
        if not self._places_all:
            self._own.append(self._placing(part, k, v))
        held = [k, v]  # perhaps copies, until the current stream waits: it may give their memory away

        def came() -> Pair:
            self._place_own()
            memory.wait_for(done)
            held.clear()
            return self._keys[part]

        return came

    def _placing(self, part: int | None, k: Tensor, v: Tensor) -> Callable[[], None]:
        return lambda: self._memory.run(self._steps(self._layout.keep_keys, part, k, v), k, v)

    def _place_own(self) -> None:
        """Of all parts that have begun, while the first keys of others arrive: between the calls of
        two parts the copies would take time of their own."""
        for place in self._own:
            place()
        self._own.clear()

    def side_by_side(self, count: int
                     ) -> AbstractContextManager[Callable[[int], AbstractContextManager[None]]]:
        """For so many calls, each in the context that this gives for its number: they may be under way
        at once, earlier numbers first. All keys are on their way by then."""
        self._place_own()
        return self._memory.lanes(count)

    def empty_sums(self, part: int) -> Pair:
        """For the sums of a call over the keys of `begin_keys`."""
        return self._layout.empty_sums(part, self._keys[part])

    def begin_sums(self, part: int, sums: Pair, finish: Callable[[Sequence[Pair | None]], None]
                   ) -> Callable[[], None]:
        """Brings the owners sums for their keys. The result waits for those of others for own keys, and
        gives them to `finish`: of each rank those for the keys that it needs. They are added only
        then, because adding next to later calls would take multiprocessors from these."""
        memory, layout = self._memory, self._layout
        done = memory.run_aside(self._steps(layout.return_sums, part, *sums), *sums)
        held = [sums]  # until the current stream waits: its allocator may give the memory away

        def wait() -> None:
            if not held:  # it was waited for
                return
            memory.wait_for(done)
            like = held.pop()
            finish(memory.kept(layout, ("sums", part),
                               lambda: layout.sums_of_others(memory, part, like)))

        return wait

    def _steps(self, append: Callable[..., None], part: int | None, *tensors: Tensor) -> Any:
        """Those that a method of the layout appends, made once for tensors of these strides."""
        def made() -> Any:
            steps = self._memory.steps()
            append(steps, part, *tensors)
            return steps

        strides = (x.stride() for x in tensors)
        return self._call.kept((append.__name__, part, self._layout, *strides), made)

    def _views(self, part: int) -> Pair:
        like = Pair(self._parts[part].k, self._parts[part].v)
        return self._layout.keys(self._memory, part, like)


def _with_dense_rows(x: Tensor) -> Tensor:
    """(B, H, rows, D) whose rows follow each other in each head, and whose heads do not overlap: what
    copy engines take at once."""
    if _has_dense_rows(x):
        return x
    dense = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copy(dense, x)
    return dense


def _has_dense_rows(x: Tensor) -> bool:
    rows, size = x.shape[2:]
    return x.stride(3) == 1 and x.stride(2) == size and x.stride(1) >= rows * size
