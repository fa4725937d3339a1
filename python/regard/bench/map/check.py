"""Whether results are right: they agree with another side's, or else with float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...exact import Exact, Space
from ..exact import TOLERANCE, TOLERANCE_LSE
from ..problem import Problem

Results = dict[str, Any]


@dataclass
class Verdict:
    """against: what ours agree with, and how well; wrong: ours that are not right; odd: the peers
    with another result, and how far off it is."""

    against: str = ""
    wrong: list[str] = field(default_factory=list)
    odd: dict[str, str] = field(default_factory=dict)


def judged(problem: Problem, ours: Results, peers: dict[str, Results]) -> Verdict:
    """A result that two sides share is right; where no peer agrees with ours, float64 decides."""
    limit = TOLERANCE["cuda" if problem.memory.cuda else "cpu"][problem.case.type]
    apart = {name: _largest(_errors(problem, theirs, ours)) for name, theirs in peers.items()}
    close = {name: error for name, error in apart.items() if error <= 2 * limit}
    if close:
        best = min(close, key=lambda name: close[name])
        return Verdict(f"{best} {close[best]:.1e}", odd={
            name: f"another result: {error:.1e}" for name, error in apart.items()
            if name not in close})
    exact = Exact(problem.call, Space(problem.given["q"]), problem.dout).run()
    found = _errors(problem, ours, exact)
    wrong = [f"{name} {error:.1e}" for name, error in found.items()
             if not error <= (TOLERANCE_LSE if name == "lse" else limit)]
    apart = {name: _largest(_errors(problem, theirs, exact)) for name, theirs in peers.items()}
    return Verdict(f"float64 {_largest(found):.1e}", wrong, {
        name: f"another result: {error:.1e}" for name, error in apart.items()
        if not error <= 2 * limit})


def _errors(problem: Problem, results: Results, right: Results) -> dict[str, float]:
    """The norm of the difference over the norm, of each result."""
    norm, double = problem.memory.xp.linalg.norm, problem.memory.double
    return {name: float(norm(double(x) - double(right[name])) / norm(double(right[name])))
            for name, x in results.items()}


def _largest(found: dict[str, float]) -> float:
    """NaN if one is."""
    return max(found.values(), key=lambda error: (error != error, error))
