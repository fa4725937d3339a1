"""python -m regard.bench compare: two builds of the library, loaded into one process.

    python -m regard.bench compare old/libregard.so new/libregard.so
    python -m regard.bench compare old/libregard.so new/libregard.so --only "^d128-.*-bwd" --most 1.02

Both builds compute the same cases on the same arrays, in turns whose order alternates. A ratio is
the median, over the rounds, of the new time over the old time. On the CPU with one thread the times
are CPU times of that thread. Before a case is timed, the results of both builds are compared with
float64, and with each other: the same bits, or the norm of the difference over the norm. A case
above the limit counts only if four times as many rounds confirm it. The status is 1 if a case is
slower than the limit, if a result is wrong, if the new build fails where the old one does not, or
if nothing was compared.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .cases import Case, cases_of
from .environment import prepare_environment

COLUMNS = f"{'case':<34} {'pass':<4} {'old, ms':>10} {'new, ms':>10} {'ratio':>7} {'spread':>7}  "
AGAIN = 4  # times as many rounds, for a case above the limit


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regard.bench compare", description=(__doc__ or "").split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("old", help="a libregard.so")
    add("new", help="another one")
    add("--device", default="cpu", help="cpu or cuda:0, which needs PyTorch (default: cpu)")
    add("--preset", default="small", choices=["quick", "small", "full"])
    add("--only", default="", metavar="REGEX", help='of "case-pass" in the preset')
    add("--backend", default="", help="of both (default: the library chooses)")
    add("--threads", type=int, default=1, help="of the CPU (default: 1)")
    add("--rounds", type=int, default=15, help="turns of each build (default: %(default)s)")
    add("--most", type=float, default=1.02, help="the largest ratio (default: %(default)s)")
    a = parser.parse_args(argv)
    if not re.fullmatch(r"cpu|cuda:\d+", a.device):
        parser.error(f"--device = {a.device}: must be cpu or cuda:NUMBER")
    if not 1 <= a.threads <= len(os.sched_getaffinity(0)):
        parser.error(f"--threads = {a.threads}: must be 1 to {len(os.sched_getaffinity(0))}")
    if a.rounds < 1:
        parser.error(f"--rounds = {a.rounds}: must be 1 or more")
    if not a.most > 0:  # nan included
        parser.error(f"--most = {a.most}: must be above 0")
    try:
        re.compile(a.only)
    except re.error as error:
        parser.error(f"--only = {a.only}: {error}")
    return a


@dataclass
class Timing:
    """Seconds of a call: each round's shortest one, of which these are the medians. ratio: new over
    old, the median over the rounds; spread: the distance of the ratios' quartiles."""

    old: float
    new: float
    ratio: float
    spread: float

    def __str__(self) -> str:
        return (f"{1e3 * self.old:>10.4f} {1e3 * self.new:>10.4f} {self.ratio:>7.3f} "
                f"{self.spread:>7.3f}")


def timed(sides: Sequence[Any], clock: Any, rounds: int) -> Timing:
    """sides: the old and the new one."""
    found: list[tuple[float, float]] = []
    for n in range(rounds):
        order = (0, 1) if n % 2 == 0 else (1, 0)
        turns = {index: clock.turn(sides[index]) for index in order}
        clock.wait()
        found.append((min(turns[0]()), min(turns[1]())))
    ratios = [new / old for old, new in found]
    quartiles = statistics.quantiles(ratios, n=4) if rounds > 1 else [0.0] * 3
    old, new = (statistics.median(times) for times in zip(*found))
    return Timing(old, new, statistics.median(ratios), quartiles[2] - quartiles[0])


class Comparison:
    """Counts the cases and passes that were compared, and those with a fault."""

    def __init__(self, a: argparse.Namespace) -> None:
        from .libraries import Library
        from .memory import GpuMemory, HostMemory, Memory
        from .timing import CudaClock, HostClock

        self.a, self.compared, self.faulty = a, 0, 0
        self.memory: Memory = HostMemory() if a.device == "cpu" else GpuMemory(a.device)
        self.clock: Any = (CudaClock(self.memory, 0) if isinstance(self.memory, GpuMemory) else
                           HostClock(time.thread_time, 0) if a.threads == 1 else HostClock())
        self.old, self.new = Library("old", a.old), Library("new", a.new)

    def cells(self, case: Case, which: str) -> str:
        """What the table says of a case and pass."""
        from .problem import Problem
        from .side import reason

        problem = Problem(case, self.memory)
        try:
            if which == "bwd":
                self.called(self.old, problem, "fwd")
            old = self.called(self.old, problem, which)
        except Exception as error:  # noqa: BLE001 - nothing to compare with
            return f"left out: {reason(error)}"
        self.compared += 1
        before = {name: x.clone() if self.memory.cuda else x.copy()
                  for name, x in old.results().items()}
        try:
            new = self.called(self.new, problem, which)
        except Exception as error:  # noqa: BLE001 - the table says it
            self.faulty += 1
            return f"FAILED: {reason(error)}"
        after = new.results()
        faults = self.wrong(problem, {"old": before, "new": after})
        timing = timed((old, new), self.clock, self.a.rounds)
        if timing.ratio > self.a.most:
            timing = timed((old, new), self.clock, AGAIN * self.a.rounds)
        if timing.ratio > self.a.most:
            faults.append(f"SLOWER than {self.a.most:g}")
        self.faulty += bool(faults)
        return "  ".join([str(timing), self.difference(before, after), *faults])

    def called(self, library: Any, problem: Any, which: str) -> Any:
        """A side whose results are those of a first call."""
        side = library.side(problem, which, self.a.backend, self.a.threads)
        side.call()
        self.memory.wait()
        return side

    def wrong(self, problem: Any, results: dict[str, dict[str, Any]]) -> list[str]:
        """The results, by build, that are not right by the benchmark's tolerances."""
        from .exact import TOLERANCE, TOLERANCE_LSE, errors, exact_parts

        limit = TOLERANCE[self.a.device.partition(":")[0]][problem.case.type]
        exact = exact_parts(problem)
        return [f"WRONG: {build} {name} {error:.1e}" for build, found in results.items()
                for name, error in errors(exact, found, problem).items()
                if not error <= (TOLERANCE_LSE if name == "lse" else limit)]

    def difference(self, before: dict[str, Any], after: dict[str, Any]) -> str:
        xp, double, found = self.memory.xp, self.memory.double, []
        for name, x in before.items():
            y = after[name]
            same = (bool(xp.equal(x.contiguous().view(xp.uint8), y.contiguous().view(xp.uint8)))
                    if self.memory.cuda else x.tobytes() == y.tobytes())
            if not same:  # what nobody writes is NaN
                norm = float(xp.linalg.norm(xp.nan_to_num(double(y) - double(x))))
                found.append(f"{name} {norm / float(xp.linalg.norm(xp.nan_to_num(double(x)))):.0e}")
        return ", ".join(found) or "same bits"


def main(argv: Sequence[str]) -> int:
    a = parse(argv)
    kind = a.device.partition(":")[0]
    prepare_environment(kind, a.threads)
    try:
        comparison = Comparison(a)
    except (ImportError, OSError) as error:
        sys.exit(f"--device = {a.device}: {error}")
    except ValueError as error:
        sys.exit(str(error))
    from . import facts

    for library in (comparison.old, comparison.new):
        print(f"{library.name}: {library.path}, version {library.version}")
    place = "" if kind == "cuda" else f", {a.threads} threads" if a.threads > 1 else ", 1 thread"
    print(f"{facts.device_name(comparison.memory)}{place}, {a.rounds} rounds\n\n{COLUMNS}results")
    for case in cases_of(kind, a.preset):
        for which in case.passes:
            if re.search(a.only, f"{case.name}-{which}"):
                print(f"{case.name:<34} {which:<4} {comparison.cells(case, which)}", flush=True)
    print(f"\n{comparison.compared} compared, {comparison.faulty} slower, wrong or failed")
    return 1 if comparison.faulty or not comparison.compared else 0
