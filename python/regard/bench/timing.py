"""Median times: sides take turns after a warm-up, timed by the host's clock or by CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from .memory import GpuMemory, Memory
from .side import Side, reason

WARM_SECONDS = 0.3  # for all sides together, before a case is timed
ROUNDS = 3          # at least
GRAPH_CALLS = 10

Samples = Callable[[], list[float]]  # seconds a call; known once the queue is empty


class HostClock:
    """A turn is a pause, calls that do not count, and calls for about 30 ms; each is a sample.

    The pause (seconds) is for threads of other libraries that spin after a call and take a core:
    OpenBLAS's threads spin for tens of milliseconds. After it, a virtual machine's host may run the
    cores that were idle as one for some 30 ms. now: the clock, such as time.thread_time.
    """

    TURN, WARM = 0.03, 0.04  # seconds
    MOST = 50    # calls a turn

    def __init__(self, now: Callable[[], float] = time.perf_counter, pause: float = 0.12) -> None:
        self.now, self.pause = now, pause

    def turn(self, side: Side) -> Samples:
        time.sleep(self.pause)
        with side.around():
            began = time.perf_counter()
            first = self._timed(side)
            if first > 10 * self.TURN:
                return lambda: [first]
            while self.pause > 0 and time.perf_counter() - began < self.WARM:
                first = self._timed(side)
            count = max(1, min(self.MOST, round(self.TURN / max(first, 1e-7))))
            samples = [self._timed(side) for _ in range(count)]
        return lambda: samples

    def wait(self) -> None:
        """Nothing is queued."""

    def _timed(self, side: Side) -> float:
        begin = self.now()
        side.call()
        if side.wait:
            side.wait()
        return self.now() - begin


class CudaClock:
    """A turn is calls for about 4 ms between two events; their mean is a sample.

    With a pause (seconds), each turn begins with it and with a call that does not count, and has at
    least BURST calls: the GPU then runs at the clock of short bursts. The host times a side with
    its own queue (JAX), from an empty queue to an empty queue.
    """

    TURN = 4e-3
    MOST = 50
    BURST = 4  # calls at least, after a pause

    def __init__(self, memory: GpuMemory, pause: float) -> None:
        self.memory, self.pause = memory, pause

    def turn(self, side: Side) -> Samples:
        if not side.turn:
            once = self._mean(side, 1)
            self.wait()
            fits = round(self.TURN / max(once(), 1e-6))
            side.turn = max(self.BURST if self.pause else 1, min(self.MOST, fits))
        mean = self._mean(side, side.turn)
        return lambda: [mean()]

    def wait(self) -> None:
        self.memory.wait()

    def _mean(self, side: Side, repeats: int) -> Callable[[], float]:
        count = repeats * side.times
        if self.pause:
            self.wait()
            time.sleep(self.pause)
            with side.around():
                side.call()  # raises the clock of an idle GPU
        if side.wait:
            self.wait()
            begin = time.perf_counter()
            for _ in range(repeats):
                side.call()
            side.wait()
            seconds = time.perf_counter() - begin
            return lambda: seconds / count
        first, last = (self.memory.torch.cuda.Event(enable_timing=True) for _ in range(2))
        with side.around():
            first.record()
            for _ in range(repeats):
                side.call()
            last.record()
        return lambda: 1e-3 * float(first.elapsed_time(last)) / count


Clock = HostClock | CudaClock


def clock_of(memory: Memory, pause: float) -> Clock:
    return CudaClock(memory, pause) if isinstance(memory, GpuMemory) else HostClock()


def medians(sides: list[Side], seconds: float, clock: Clock) -> dict[str, float]:
    """Median seconds of a call by side: turns for `seconds`, at least ROUNDS of them.

    Turns for WARM_SECONDS come before them and do not count, except where turns begin with pauses.
    """
    samples: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        clock.turn(side)  # finds how often it fits into a turn
    cold = isinstance(clock, CudaClock) and clock.pause > 0
    began, warm, rounds = time.perf_counter(), cold, 0
    while not (warm and rounds >= ROUNDS and time.perf_counter() - began >= seconds):
        if not warm and time.perf_counter() - began >= WARM_SECONDS:
            warm, began = True, time.perf_counter()
        first = rounds % len(sides)
        turns = [(side.name, clock.turn(side)) for side in sides[first:] + sides[:first]]
        clock.wait()
        if warm:
            rounds += 1
            for name, found in turns:
                samples[name] += found()
    return {name: statistics.median(values) for name, values in samples.items()}


def graphed(sides: list[Side], memory: GpuMemory, say: Callable[[str], Any]) -> list[Side]:
    """Ten calls of each side as one CUDA graph, as for decoding, where they can be captured."""
    torch = memory.torch
    for side in sides:
        if side.wait:
            continue  # JAX launches its kernels on streams of its own
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        call = side.on(stream.cuda_stream) if side.on else side.call
        try:
            with torch.cuda.stream(stream), side.around():
                call()
            memory.wait()
            with side.around(), torch.cuda.graph(graph, stream=stream):
                for _ in range(GRAPH_CALLS):
                    call()
        except Exception as error:  # noqa: BLE001 - timed without a graph then
            say(f"      {side.name}: no graph: {reason(error)}")
            memory.wait()
            continue
        side.call, side.times, side.keep = graph.replay, GRAPH_CALLS, (graph, call)
    return sides
