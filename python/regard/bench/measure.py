"""Checks and times every side of a case; makes a row of results for each pass."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .cases import PASSES, Case
from .exact import TOLERANCE, TOLERANCE_LSE, Part, errors, exact_parts
from .facts import peak
from .memory import GpuMemory, HostMemory, Memory, NoMemory
from .problem import Problem
from .side import LeftOut, Side, reason
from .sides import ours, peer
from .tables import Row, is_ours
from .timing import WARM_SECONDS, Clock, clock_of, graphed, medians
from .watch import HANG_SECONDS, Progress

COMPILERS = 16  # kernels that are compiled at a time
PLAIN = "plain"  # the side of the plain problem


@dataclass
class Sides:
    """The sides that work, the errors of their results, and why the others do not work.

    plain: ours without the case's features, in the same turns. Rows that are timed after each other
    have differed by a tenth, because a GPU's clock follows its power.
    """

    ready: list[Side] = field(default_factory=list)
    plain: Side | None = None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)


class Bench:
    """device: "cpu" or "cuda:0"; backends: ours; peers: the names of those to compare with."""

    def __init__(self, device: str, backends: list[str], peers: list[str], threads: int,
                 seconds: float, pause: float, only: str, progress: Progress) -> None:
        self.memory: Memory = HostMemory() if device == "cpu" else GpuMemory(device)
        self.clock: Clock = clock_of(self.memory, pause)
        self.backends, self.peers, self.threads = backends, peers, threads
        self.seconds, self.only, self.progress = seconds, only, progress
        self.peaks: dict[tuple[str, str], float | None] = {}
        self.plain: tuple[Case, Problem, list[Part]] | None = None  # the last one

    @property
    def kind(self) -> str:
        return "cuda" if self.memory.cuda else "cpu"

    def wanted(self, case: Case, which: str) -> bool:
        return re.search(self.only, f"{case.name}-{which}") is not None

    # ------------------------------------------------------------------------------- compilation

    def compile(self, cases: list[Case], seconds: float = math.inf) -> int:
        """Compiles the GPU kernels of the cases in parallel; returns the number of problems.

        seconds: after which none begins. A failure is reported later, by the case itself.
        """
        if not self.memory.cuda or "compiling" in self.progress.lost:
            return 0
        until, done = time.monotonic() + seconds, itertools.count(1)
        wanted = {}
        for case in cases:
            for which in case.passes:
                for backend in self.backends:
                    if self.wanted(case, which):
                        wanted[case.name, which, backend] = case

        def one(key: tuple[str, str, str]) -> bool:
            _, which, backend = key
            if time.monotonic() > until:
                return False
            try:
                Problem(wanted[key], NoMemory()).core.prepare(PASSES[which], self.memory.device,
                                                              backend)
            except Exception:  # noqa: BLE001
                pass
            status(f"compiled: {next(done)} of {len(wanted)} problems")
            return True

        self.progress.begin("compiling", 5 * HANG_SECONDS)
        with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
            count = sum(pool.map(one, wanted))
        self.progress.end()
        return count

    # ------------------------------------------------------------------------------------ one case

    def rows(self, case: Case) -> list[Row]:
        problem = Problem(case, self.memory)
        rows = []
        for which in case.passes:
            label = f"{case.name}-{which}"
            if not self.wanted(case, which) or f"{label}|timing" in self.progress.lost:
                continue
            status(f"{label}: checking")
            first = self.backends[0]
            why = self.first_forward(problem, label) if which == "bwd" else ""
            sides = Sides(why_not={first: why}) if why else self.checked(problem, which, label)
            if case.plain and sides.ready:
                self.add_plain(sides, case.plain, which, label)
            status(f"{label}: timing " + ", ".join(side.name for side in sides.ready))
            rows.append(self.row(case, which, sides, self.timed(case, sides, label)))
        return rows

    def first_forward(self, problem: Problem, label: str) -> str:
        """Runs the forward pass that our backward pass needs; why it failed, or ""."""
        backend = self.backends[0]
        self.progress.begin(f"{label}|{backend}")
        try:
            ours(problem, "fwd", backend.split("@")[0], self.threads).call()
            self.memory.wait()
        except Exception as error:  # noqa: BLE001 - the row says it
            self.look_for_fault(error, label)
            return reason(error)
        finally:
            self.progress.end()
        return ""

    def checked(self, problem: Problem, which: str, label: str) -> Sides:
        """Calls every side once, and compares its results."""
        found = Sides()
        exact = exact_parts(problem)
        makers: dict[str, Callable[[], Side]] = {
            name: functools.partial(ours, problem, which, name, self.threads)
            for name in self.backends}
        makers |= {name: functools.partial(peer, problem, which, name)
                   for name in problem.case.peers if name in self.peers}
        for name, make in makers.items():
            if f"{label}|{name}" in self.progress.lost:
                found.why_not[name] = "the process was lost in it"
                continue
            self.progress.begin(f"{label}|{name}")
            try:
                side = make()
                with side.around():
                    side.call()
                if side.wait:
                    side.wait()
                self.memory.wait()
                found.errors[name] = errors(exact, side.results(), problem)
                found.ready.append(side)
            except LeftOut as error:
                found.why_not[name] = reason(error)
            except Exception as error:  # noqa: BLE001 - a side that cannot run is left out
                found.why_not[name] = reason(error)
                self.look_for_fault(error, label)
            self.progress.end()
        return found

    def add_plain(self, sides: Sides, case: Case, which: str, label: str) -> None:
        """With its errors. Where it cannot run there is no price."""
        self.progress.begin(f"{label}|plain")
        try:
            if self.plain is None or self.plain[0] != case:
                self.plain = None  # its memory
                problem = Problem(case, self.memory)
                self.plain = case, problem, exact_parts(problem)
            _, problem, exact = self.plain
            for one in dict.fromkeys(("fwd", which)):  # backward needs the results of forward
                side = ours(problem, one, self.backends[0].split("@")[0], self.threads)
                side.call()
            self.memory.wait()
            side.name, sides.plain = PLAIN, side
            sides.errors[PLAIN] = errors(exact, side.results(), problem)
        except Exception as error:  # noqa: BLE001
            self.look_for_fault(error, label)
        finally:
            self.progress.end()

    def look_for_fault(self, error: Exception, label: str) -> None:
        """A process cannot use its GPU any more after a kernel has failed: gives up if so."""
        try:
            self.memory.wait()
        except Exception:  # noqa: BLE001
            say(f"{label}: {reason(error)}")
            self.progress.give_up()
            raise

    def timed(self, case: Case, found: Sides, label: str) -> dict[str, float]:
        sides = found.ready + ([found.plain] if found.plain else [])
        if not found.ready:
            return {}
        self.progress.begin(f"{label}|timing", HANG_SECONDS + 10 * (self.seconds + WARM_SECONDS))
        if case.group == "decode" and isinstance(self.memory, GpuMemory):
            sides = graphed(sides, self.memory, say)
        times = medians(sides, self.seconds, self.clock)
        self.progress.end()
        return times

    def row(self, case: Case, which: str, sides: Sides, times: dict[str, float]) -> Row:
        mine = [name for name in sides.errors if is_ours(name)]
        wrong = [f"{name} {result} {error:.1e}" for name in mine
                 for result, error in sides.errors[name].items()
                 if not error <= self.limit(case, name, result)]
        flops, amount = case.flops(which), case.bytes()
        plain = times.pop(PLAIN, None)
        row: dict[str, Any] = {
            "case": case.name, "pass": which, "group": case.group, "type": case.type,
            "sizes": case.sizes, "mask": case.mask,
            "ms": {name: digits(1e3 * time) for name, time in times.items()},
            "tflops": {name: digits(1e-12 * flops / time) for name, time in times.items()},
            "tbytes": {name: digits(1e-12 * amount / time) for name, time in times.items()},
            "error": {name: max(found.values(), default=None)
                      for name, found in sides.errors.items()},
            "errors": {name: sides.errors[name] for name in mine},
            "wrong": wrong, "why_not": sides.why_not,
            "backend": {side.name: side.backend for side in sides.ready if side.backend},
            "kernel": {side.name: side.kernel for side in sides.ready if side.kernel},
        }
        if plain is not None:
            row["plain_ms"] = digits(1e3 * plain)
        if not self.memory.cuda:
            row["share"] = self.shares(case.type, row)
        return row

    def limit(self, case: Case, side: str, result: str) -> float:
        """Of a result's error. The plain problem may have another type than the case."""
        type = case.plain.type if side == PLAIN and case.plain else case.type
        return TOLERANCE_LSE if result == "lse" else TOLERANCE[self.kind][type]

    def shares(self, type: str, row: Row) -> dict[str, float]:
        """Each rate as a share of the peak rate of the backend's instruction on these threads."""
        found = {}
        for name, backend in row["backend"].items():
            key = type, backend
            if key not in self.peaks:
                self.peaks[key] = peak(type, self.threads, backend)
            top = self.peaks[key]
            if top and name in row["tflops"]:
                found[name] = digits(1e12 * row["tflops"][name] / top)
        return found


def digits(value: float) -> float:
    """Rounded to five digits."""
    return float(f"{value:.5g}")


def status(text: str) -> None:
    """Shows the current step on the terminal's last line, if there is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text[:100]}", end="\r", file=sys.stderr, flush=True)


def say(text: str) -> None:
    status("")
    print(text, flush=True)
