"""python -m regard.bench map: random problems, against every attention of PyTorch.

    python -m regard.bench map --device cuda:0 --seed 1 --seconds 110 --out map.jsonl
    python -m regard.bench map --device cuda:0 --seed 1 --problem 17

A problem is drawn from the seed and its number: lengths and batches log-uniform, head sizes 32 to
256, 1 to 32 query heads a key head, f16, bf16, f32, causal or not; Sq = Sk, Sq != Sk, decode, and on
a GPU packed sequences and windows. Results are compared with a peer's, and with float64 where no
peer agrees; then the sides take turns. Times are those of queued calls (on a GPU behind a busy
kernel: device time) and of single calls from an idle device. The table has the best peer's time
over ours; the ten worst problems follow. A wrong result makes the status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import info
from .. import results
from ..environment import prepare_environment, prepare_torch
from ..watch import Progress, watch
from .draw import drawn

COMPILED_A_SECOND = 0.6  # problems that a GPU's run draws for each second of its time


def parse(argv: Sequence[str]) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m regard.bench map", description=(__doc__ or "").split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda:0" if info().gpus else "cpu",
        help="cpu or cuda:0 (default: %(default)s)")
    add("--seed", type=int, default=1, help="(default: %(default)s)")
    add("--seconds", type=float, default=100.0,
        help="after which no problem begins (default: %(default)s)")
    add("--count", type=int, metavar="N",
        help="problems at most (default: as many as fit; on a GPU, where their kernels are "
        f"compiled first, {COMPILED_A_SECOND} a second)")
    add("--problem", type=int, metavar="NUMBER", help="this one alone")
    add("--threads", type=int, default=cores, help="of the CPU (default: %(default)s)")
    add("--out", type=results.new_file, metavar="FILE",
        help="JSON lines, one for each problem and pass")
    add("--one-process", action="store_true", help="do not outlive a peer that crashes")
    for name in ("--progress", "--done"):
        add(name, default="", help=argparse.SUPPRESS)
    add("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    add("--lost", action="append", default=[], help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    if not re.fullmatch(r"cpu|cuda:\d+", a.device):
        parser.error(f"--device = {a.device}: must be cpu or cuda:NUMBER")
    if not 0 < a.seconds < math.inf:
        parser.error(f"--seconds = {a.seconds}: must be above 0")
    if a.count is not None and a.count < 1:
        parser.error(f"--count = {a.count}: must be 1 or more")
    if not 1 <= a.threads <= cores:
        parser.error(f"--threads = {a.threads}: must be 1 to {cores}")
    a.kind = a.device.partition(":")[0]
    a.until = a.until or time.time() + a.seconds
    return a


def numbers(a: argparse.Namespace) -> range:
    """Of the problems to draw."""
    if a.problem is not None:
        return range(a.problem, a.problem + 1)
    fit = 10**6 if a.kind == "cpu" else max(1, round(COMPILED_A_SECOND * a.seconds))
    return range(a.count or fit)


def work(a: argparse.Namespace) -> int:
    """Measures in this process; keeps each problem's rows as soon as they are there."""
    prepare_environment(a.kind, a.threads)
    from .. import facts
    from ..measure import say, status
    from ..side import reason
    from . import report
    from .measure import Map

    warnings.filterwarnings("ignore")  # PyTorch warns at length when one of its kernels cannot run
    prepare_torch(a.device, a.threads)
    measure = Map(a, Progress(a.progress, a.lost))
    known = facts.facts(measure.bench.memory, a.threads, measure.peers) | {"seed": a.seed}
    rows: list[report.Row] = json.loads(Path(a.done).read_text()) if a.done else []
    begun = {row["number"] for row in rows}
    broken = 0
    left = [number for number in numbers(a) if number not in begun]
    if not begun:
        say(f"{known['device']}, seed {a.seed}, Regard {known['regard']}, commit {known['commit']}")
        if text := measure.compile(left):
            say(text)
        say(report.header())
    for number in left:
        if time.time() > a.until and a.problem is None and rows:
            break
        status(f"[{len(begun) + 1}] {drawn(a.kind, a.seed, number).name}")
        begun.add(number)
        try:
            found = [row | known for row in measure.rows(number)]
        except Exception as error:  # noqa: BLE001 - too little memory, say: the others go on
            say(f"{number}: {reason(error)}")
            measure.bench.look_for_fault(error, str(number))
            broken += 1
            continue
        rows += found
        if found:
            say(report.line_of(found))
        if a.done:
            Path(a.done).write_text(json.dumps(rows))
    return finish(a, rows, broken)


def finish(a: argparse.Namespace, rows: list[dict[str, Any]], broken: int) -> int:
    """Prints and writes the rows; returns the status. broken: how many problems have none."""
    from ..measure import say
    from . import report

    say(f"\n{report.summary(rows)}\n\nthe worst, with a command that repeats each:\n"
        f"{report.worst(rows)}")
    if text := report.left_out(rows):
        say(f"\nleft out:\n{text}")
    written = ""
    if a.out and rows:
        results.write(rows, a.out)
        written = f"; written to {a.out}"
    wrong = sum(bool(row["wrong"]) for row in rows)
    failed = broken + sum(row["ours"] in row["why_not"] for row in rows)
    say(f"\n{len({row['number'] for row in rows})} problems, {len(rows)} passes, {wrong} with a "
        f"wrong result, {failed} that we could not run{written}")
    return 1 if wrong or failed or not rows else 0


def main(argv: Sequence[str]) -> int:
    a = parse(argv)
    if a.one_process or a.progress:
        return work(a)
    return watch([sys.executable, "-m", "regard.bench", "map", *argv, "--until", str(a.until)])
