#!/usr/bin/env python3
"""Runs the stages of the test suite, also after a failure, and sums them up.

  tools/test.py                  what `make test` runs: tier core, every pair of features everywhere
  tools/test.py --tier all       what CI runs: the same, then what is marked or labelled exhaustive,
                                 a chip of each kind, sanitizers and fuzzing; nothing runs twice
  tools/test.py --tier rest      what "all" adds to "core", on the builds that core left
  tools/test.py --only python    one group of stages

A stage over its budget of seconds (tools/testing/stages.py) is ended and has failed. Budgets are
for two idle cores; --slack 3 gives a slower or busier machine three times as much.

The last line of the output is "N passed, M failed"; the exit status is 0 only where M is 0. The
whole output of each stage is kept in build/test/.
"""

from __future__ import annotations

import argparse
import sys
import time

from testing.lanes import Lanes, show
from testing.stage import Result, Stage
from testing.stages import BUDGET, CORE, REST, stages
from testing.table import table, totals

END_LINES = 8  # of each failed stage's output, under the table
TIERS = {"core": (CORE,), "rest": (REST,), "all": (CORE, REST)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=TIERS, default="core")
    parser.add_argument("--only", default="",
                        help="groups of stages, with commas; --list names them")
    parser.add_argument("--list", action="store_true", help="print the stages, and run none")
    parser.add_argument("--slack", type=float, default=1, help="multiplies every budget")
    parser.add_argument("--fuzz-seconds", type=int, default=30)
    parser.add_argument("--share", type=int, default=1, choices=range(1, 7), metavar="N",
                        help="of exhaustive Python tests, and of chips to compile for, take one of "
                        "N, by the commit; the names of such stages say so (default: all)")
    return parser.parse_args()


def chosen(given: argparse.Namespace) -> list[Stage]:
    """The stages that were asked for, and the build of each."""
    known = [stage for tier in TIERS[given.tier]
             for stage in stages(tier, given.fuzz_seconds, given.share)]
    groups = set(filter(None, given.only.split(",")))
    unknown = groups - {stage.group for stage in known}
    if unknown:
        sys.exit(f"test.py: --only {given.only}: tier {given.tier} has no {', '.join(unknown)}")
    if not groups:
        return known
    wanted = [stage for stage in known if stage.group in groups]
    needed = {name for stage in wanted for name in stage.needs}
    return [stage for stage in known if stage in wanted or stage.name in needed]


def over_budget(seconds: float, budget: float) -> list[Result]:
    """The failure of a run that took too long as a whole, though each stage did not."""
    if not budget or seconds <= budget:
        return []
    whole = Stage("all stages together", "", [], budget=int(budget))
    return [Result(whole, 0, 1, seconds, note="over the budget of them all")]


def main() -> int:
    given = arguments()
    run = chosen(given)
    if given.list:
        for stage in run:
            show(f"{stage.group:<10} {stage.budget:>5} s  {stage.name}")
        return 0
    lanes = Lanes(given.slack)
    began = time.monotonic()
    lanes.run(run)
    seconds = time.monotonic() - began
    whole = given.tier == "core" and not given.only
    budget = BUDGET * given.slack if whole else 0
    results = lanes.results + over_budget(seconds, budget)
    passed, failed = totals(results)
    show("\n" + table(results, given.slack, seconds, budget) + "\n")
    for result in lanes.results:
        if result.failed and result.seconds:
            show(f"{result.stage.name} ended with:\n{result.stage.tail(END_LINES)}")
    show(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
