"""Seconds of a call: queued, and from an idle device."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from ..memory import GpuMemory, Memory
from ..side import Side

ROUNDS = 4            # in which the sides take turns, on a GPU
ROUNDS_ON_CPU = 15    # whose speed changes with what other programs do
IDLE_CALLS = 4        # of a side in a round
TURN = 2e-3           # seconds of queued calls
MOST = 20             # queued calls
PAUSE = 0.01          # seconds in which threads of the CPU that spin fall asleep
CYCLES = 2e9          # of the GPU's clock in a second, at most


@dataclass
class Times:
    queued: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        return {"queued": statistics.median(self.queued), "idle": statistics.median(self.idle)}


def timed(sides: list[Side], memory: Memory) -> dict[str, dict[str, float]]:
    """Median seconds by side, "queued" and "idle". All sides have been called before."""
    round_of = _round_on_gpu if isinstance(memory, GpuMemory) else _round_on_cpu
    times = {side.name: Times() for side in sides}
    for number in range(ROUNDS if isinstance(memory, GpuMemory) else ROUNDS_ON_CPU):
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            with side.around():
                round_of(side, memory, times[side.name])
    return {name: found.medians() for name, found in times.items()}


def _once(side: Side, memory: Memory) -> float:
    """From an idle device to an idle device."""
    began = time.perf_counter()
    side.call()
    memory.wait()
    return time.perf_counter() - began


def _round_on_gpu(side: Side, memory: Memory, times: Times) -> None:
    """Queued calls lie behind a kernel that is busy until the host has launched the last one."""
    memory.wait()
    times.idle += [_once(side, memory) for _ in range(IDLE_CALLS)]
    typical = statistics.median(times.idle)
    calls = max(1, min(MOST, round(TURN / typical)))
    torch = memory.xp
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(CYCLES * (1e-4 + 1.5 * calls * min(typical, 1e-3))))
    first.record()
    for _ in range(calls):
        side.call()
    last.record()
    memory.wait()
    times.queued.append(1e-3 * float(first.elapsed_time(last)) / calls)


def _round_on_cpu(side: Side, memory: Memory, times: Times) -> None:
    """Queued calls follow each other; the first one, after a pause, is the idle one."""
    time.sleep(PAUSE)
    times.idle.append(_once(side, memory))
    calls = max(1, min(MOST, round(TURN / times.idle[-1])))
    times.queued += [_once(side, memory) for _ in range(calls)]
