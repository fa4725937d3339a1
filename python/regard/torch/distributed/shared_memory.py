"""Memory of each rank of a group that the others read and write, and the work of copy engines in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ... import _core
from .watch import Watch

T = TypeVar("T")

_UNIT = 1 << 21  # bytes that memory is a multiple of
_WORDS = _UNIT  # bytes of them, of which each rank has two for each other rank


class SharedMemory:
    """This rank's memory for one group and device, and that of the others, of one size.

    Others write keys for this rank's next call there, and sums for keys that it has given them. They
    do so once it has told them that it came to the call, and has done with the one before it. Ranks
    tell each other by words in this memory, which count the exchanges of all calls.

    make: makes memory of so many bytes on each rank, the same number on all. It returns views of each
    one's, once all ranks have filled theirs with zeros. fail: ends with an error the use of this GPU,
    which waits for a rank that does not come. seconds: after how long.
    """

    def __init__(self, rank: int, device: torch.device, make: Callable[[int], list[Tensor]],
                 fail: Callable[[], None], seconds: float) -> None:
        self._rank, self._device, self._make = rank, device, make
        self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._watch = Watch(fail, seconds)
        self._lanes: list[tuple[Any, Any]] = []  # streams for calls next to those of the main one
        self._main: Any = None  # the stream of the last pass
        self._now: Any = None  # that of the call which is made: the main one, or a lane
        self._bytes = (0, 0)  # of keys, of sums
        self._ranks: list[Tensor] = []
        self._addresses: list[int] = []
        self._count = 0
        self._kept: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def begin(self, keys: int, sums: int) -> None:
        """Begins a call that needs so many bytes of keys and of sums, both equal on all ranks."""
        if not self._addresses or keys > self._bytes[0] or sums > self._bytes[1]:
            self._allocate(max(keys, self._bytes[0]), max(sums, self._bytes[1]))
        stream = torch.cuda.current_stream(self._device)
        if self._main is not None and self._main != stream:
            stream.wait_stream(self._main)
        self._main = self._now = stream

    @contextmanager
    def lanes(self, count: int) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
        """For so many calls of a pass, each in the context that this gives for its number: they may be
        under way at once. Blocks of earlier numbers come first, so that later calls fill what they
        leave idle. The last number is the current stream, which waits for the others in the end."""
        others = self._other_lanes(count - 1)
        streams = [*reversed([stream for stream, _ in others]), self._main]
        if others:
            begun = self._main.record_event()
            for stream, _ in others:
                stream.wait_event(begun)

        @contextmanager
        def lane(number: int) -> Iterator[None]:
            if number == count - 1:
                yield
                return
            self._now = streams[number]
            try:
                with torch.cuda.stream(self._now):
                    yield
            finally:
                self._now = self._main

        try:
            yield lane
        finally:
            for stream, ended in others:
                self._main.wait_event(stream.record_event(ended))

    def _other_lanes(self, count: int) -> list[tuple[Any, Any]]:
        """Streams, each with an event for its end."""
        for n in range(len(self._lanes), count):
            stream = torch.cuda.Stream(self._device, priority=-1 - n)  # type: ignore[no-untyped-call]
            self._lanes.append((stream, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        return self._lanes[:count]

    def kept(self, owner: Any, key: Any, make: Callable[[], T]) -> T:
        """What `make` returns, made once for as long as the owner lives and the memory is this one."""
        kept = self._kept.setdefault(owner, {})
        if key not in kept:
            with torch.inference_mode(False):  # calls outside of it have them as well
                kept[key] = make()
        found: T = kept[key]
        return found

    def keys(self, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A view of own memory for keys, from a byte on."""
        return self._view(begin, shape, dtype)

    def sums(self, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Likewise for sums that others bring."""
        return self._view(self._bytes[0] + begin, shape, dtype)

    @staticmethod
    def steps() -> _core.GpuSteps:
        """An empty list of steps. Their addresses are, in this order: each rank's memory for keys, each
        one's for sums, each one's words, and the tensors of a run."""
        return _core.GpuSteps()

    def run(self, steps: _core.GpuSteps, *tensors: Tensor) -> None:
        """Puts steps on the current stream, none of which is of a word."""
        self._run(steps, tensors, self._now)

    def run_aside(self, steps: _core.GpuSteps, *tensors: Tensor) -> Any:
        """Puts steps on a stream next to it, after all that is on it so far; all ranks do so in the
        same order. They may tell others that this one came so far, and wait for these. Returns what
        `wait_for` takes. Tensors have to live until then."""
        begun, done = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        self._now.record_event(begun)
        self._side.wait_event(begun)
        self._count += 1
        self._run(steps, tensors, self._side)
        self._side.record_event(done)
        self._watch.add(begun, done)
        return done

    def wait_for(self, done: Any) -> None:
        """The current stream waits for steps aside."""
        self._now.wait_event(done)

    def _run(self, steps: _core.GpuSteps, tensors: Sequence[Tensor], stream: Any) -> None:
        steps.run(self._addresses + [x.data_ptr() for x in tensors],
                  self._count & 0xffffffff, self._device.index, stream.cuda_stream)

    def _allocate(self, keys: int, sums: int) -> None:
        torch.cuda.synchronize(self._device)  # once all ranks are here, nothing uses the old memory
        keys, sums = (-(-max(size, 1) // _UNIT) * _UNIT for size in (keys, sums))
        self._kept.clear()
        self._ranks = self._make(keys + sums + _WORDS)  # the old one lives until all ranks are here
        self._bytes, self._count = (keys, sums), 0
        self._addresses = [x.data_ptr() + begin for begin in (0, keys, keys + sums)
                           for x in self._ranks]

    def _view(self, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self._ranks[self._rank][begin:begin + size].view(dtype).view(*shape)
