"""Checks and times every side of a random problem."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

from ..cases import Case
from ..measure import Bench, digits, status
from ..problem import Problem
from ..side import LeftOut, Side, reason
from ..sides import installed, ours
from ..watch import HANG_SECONDS, Progress
from .check import judged
from .clocks import timed
from .draw import drawn
from .peers import NAMES, peer

Row = dict[str, Any]


class Map:
    """a: the parsed arguments."""

    def __init__(self, a: argparse.Namespace, progress: Progress) -> None:
        self.a, self.progress = a, progress
        self.peers = installed(a.kind, NAMES[a.kind])
        self.bench = Bench(a.device, [a.kind], list(self.peers), a.threads, 0, 0, "", progress)

    def compile(self, numbers: list[int]) -> str:
        """Compiles the kernels of these problems, for half of the time that is left at most."""
        if self.a.kind == "cpu":
            return ""
        began = time.time()
        cases = [drawn(self.a.kind, self.a.seed, number) for number in numbers]
        count = self.bench.compile(cases, (self.a.until - began) / 2)
        return f"kernels of {count} of {sum(len(case.passes) for case in cases)} passes compiled " \
               f"in {time.time() - began:.1f} s"

    def rows(self, number: int) -> list[Row]:
        """One for each pass. Errors: what the memory throws where the problem does not fit."""
        case = drawn(self.a.kind, self.a.seed, number)
        problem = Problem(case, self.bench.memory)
        return [self._row(problem, number, which) for which in case.passes
                if f"{case.name}-{which}|timing" not in self.progress.lost]

    def _row(self, problem: Problem, number: int, which: str) -> Row:
        case, label = problem.case, f"{problem.case.name}-{which}"
        why_not: dict[str, str] = {}
        makers: dict[str, Callable[[], Side]] = {
            self.a.kind: functools.partial(ours, problem, which, self.a.kind, self.a.threads)}
        makers |= {name: functools.partial(peer, problem, which, name) for name in self.peers}
        sides = [side for name, make in makers.items()
                 if (side := self._called(make, name, label, why_not))]
        results = {side.name: side.results() for side in sides}
        mine = results.pop(self.a.kind, {})
        row: Row = _described(case) | {
            "number": number, "pass": which, "ours": self.a.kind, "why_not": why_not,
            "checked": "", "wrong": [], "queued": {}, "idle": {}, "kernel": "",
            "repeat": f"python -m regard.bench map --device {self.a.device} --seed {self.a.seed} "
                      f"--problem {number}"}
        if not mine:
            return row
        self.progress.begin(f"{label}|timing", 2 * HANG_SECONDS)
        status(f"{label}: checking")
        verdict = judged(problem, mine, results)
        why_not |= verdict.odd
        sides = [side for side in sides if side.name not in why_not]
        status(f"{label}: timing " + ", ".join(side.name for side in sides))
        times = timed(sides, self.bench.memory)
        self.progress.end()
        for state in ("queued", "idle"):
            row[state] = {name: digits(1e6 * found[state]) for name, found in times.items()}
        return row | {"checked": verdict.against, "wrong": verdict.wrong,
                      "kernel": sides[0].kernel}

    def _called(self, make: Callable[[], Side], name: str, label: str,
                why_not: dict[str, str]) -> Side | None:
        """A side whose results are there; None where it cannot run."""
        step = f"{label}|{name}"
        if step in self.progress.lost:
            why_not[name] = "the process was lost in it"
            return None
        self.progress.begin(step)
        try:
            side = make()
            with side.around():
                side.call()
            self.bench.memory.wait()
            return side
        except LeftOut as error:
            why_not[name] = reason(error)
        except Exception as error:  # noqa: BLE001 - a side that cannot run is left out
            why_not[name] = reason(error)
            self.bench.look_for_fault(error, label)
        finally:
            self.progress.end()
        return None


def _described(case: Case) -> Row:
    return {"case": case.name, "kind": case.group, "type": case.type, "sizes": case.sizes,
            "mask": case.mask, "options": case.options}
