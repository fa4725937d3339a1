"""python -m regard.bench: times Regard and every attention that is installed.

    python -m regard.bench [--preset quick|small|full] [--only REGEX] [--plot]
    python -m regard.bench --q 1x16x2048x64 --type f32,bf16 --with causal softcap=30
    python -m regard.bench --tune --case d128-causal-16384-bwd \\
        --backends "cuda:mma;cuda:mma@rows=64,keys=128,warps=8"
    python -m regard.bench host [--device cuda:0] [--compiled]
    python -m regard.bench behind [--type bf16] [--threads 2]
    python -m regard.bench scaling [--threads 1,2,4]
    python -m regard.bench map [--device cuda:0] --seed 1 --seconds 110
    python -m regard.bench plot gpu_h200.jsonl --out gpu.svg
    python -m regard.bench compare old/libregard.so new/libregard.so

Each result is compared with float64 before it is timed; a wrong result of Regard makes the status
1.
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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import info
from . import results
from .cases import FLAGS, VALUES, Case, cases_of, given_cases
from .environment import prepare_environment, prepare_torch
from .watch import INTERRUPTED, Progress, interrupt_once, watch


def default_device() -> str:
    return "cuda:0" if info().gpus else "cpu"


def parser_of_run() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m regard.bench", description=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default=default_device(), help="cpu or cuda:0 (default: %(default)s)")
    add("--preset", default="small", choices=["quick", "small", "full"],
        help="which cases (default: %(default)s, a minute or two on two cores)")
    add("--quick", dest="preset", action="store_const", const="quick", help="--preset quick")
    add("--only", default="", metavar="REGEX", help='of "case-pass" in the preset')
    add("--list", action="store_true", help="name the preset's cases")
    add("--peers", default="all", metavar="NAMES",
        help="with commas between, of those installed (default: all); none")
    add("--backends", default="", help='ours, with ";" between (default: the library chooses): '
        '"cuda:mma;cuda:mma@rows=64,keys=128,warps=8"')
    add("--tune", action="store_true", help="sort our backends on one case; without peers")
    add("--case", default="", help='with --tune: "d128-causal-16384-bwd"')
    add("--seconds", type=float,
        help="of timing a case and pass (default: 1 on a CPU, 0.3 on a GPU)")
    add("--pause", type=float, default=0.0, metavar="SECONDS",
        help="GPU: idle before each turn of about 4 ms, for the figures of short bursts")
    add("--threads", type=int, default=0, help="of the CPU, for every side (default: all)")
    add("--out", type=results.new_file_or_folder, metavar="PATH",
        help="JSON lines: a file, or a folder for cpu_ISA.jsonl, gpu_NAME.jsonl (default: none; "
        "here with --plot)")
    add("--plot", type=results.new_picture, nargs="?", const=Path(), metavar="SVG",
        help="draw the results as well (default: next to them)")
    add("--one-process", action="store_true", help="do not outlive a peer that hangs or crashes")
    one = parser.add_argument_group("one problem instead of a preset").add_argument
    one("--q", default="", metavar="BxHxSxD", help="sizes of q: 1x16x2048x64")
    one("--type", default="", help="f32, f16, bf16, with commas between (default: bf16)")
    for name, what in (("--kv-heads", "heads"), ("--kv-len", "length"), ("--dim-v", "head size")):
        one(name, type=int, metavar="N", help=f"default: q's {what}")
    one("--with", dest="options", nargs="+", default=[], metavar="OPTION",
        help=", ".join([*FLAGS, *(f"{name}={example}" for name, (example, _) in VALUES.items())]))
    for name in ("--progress", "--done"):
        add(name, default="", help=argparse.SUPPRESS)
    add("--lost", action="append", default=[], help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of_run()
    a = parser.parse_args(argv)
    if not re.fullmatch(r"cpu|cuda:\d+", a.device):
        parser.error(f"--device = {a.device}: must be cpu or cuda:NUMBER")
    try:
        re.compile(a.only)
    except re.error as error:
        parser.error(f"--only = {a.only}: {error}")
    a.kind = a.device.partition(":")[0]
    cores = len(os.sched_getaffinity(0))
    a.threads = a.threads or cores
    if not 1 <= a.threads <= cores:
        parser.error(f"--threads = {a.threads}: must be 1 to {cores}")
    if not 0 <= a.pause < math.inf or (a.pause and a.kind == "cpu"):
        parser.error(f"--pause = {a.pause}: must be 0 or, on a GPU, above it")
    if a.seconds is None:
        a.seconds = 1.0 if a.kind == "cpu" else 0.3
    if not 0 < a.seconds < math.inf:
        parser.error(f"--seconds = {a.seconds}: must be above 0")
    a.backends = [name.strip() for name in a.backends.split(";") if name.strip()] or [a.kind]
    if a.tune:
        a.preset, a.peers = "full", "none" if a.peers == "all" else a.peers
        if not a.case:
            parser.error("--tune needs --case; --list names them")
    elif a.case:
        parser.error("--case needs --tune; --only chooses otherwise")
    for option, value in (("--type", a.type), ("--with", a.options), ("--kv-heads", a.kv_heads),
                          ("--kv-len", a.kv_len), ("--dim-v", a.dim_v)):
        if value not in (None, "", []) and not a.q:
            parser.error(f"{option} needs --q; a preset's cases have their own")
        if isinstance(value, int) and value < 1:
            parser.error(f"{option} = {value}: must be 1 or more")
    try:
        a.cases = selected(a)
    except ValueError as error:
        parser.error(str(error))
    if not a.cases:
        parser.error(f"no case of preset {a.preset} is called {a.case or a.only}; see --list")
    if a.plot is not None:
        check_plot(parser, a)
    return a


def check_plot(parser: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    if a.tune or not any(case.group == "grid" for case in a.cases):
        parser.error("--plot shows the grid of a preset, of which nothing would be timed")
    try:
        results.need_matplotlib()
    except argparse.ArgumentTypeError as error:
        parser.error(f"--plot {error}")
    a.out = a.out or Path()


def selected(a: argparse.Namespace) -> list[Case]:
    cases = cases_of(a.kind, a.preset)
    if a.q:
        cases = given_cases(a.q, a.type or "bf16", a.kv_heads or 0, a.kv_len or 0, a.dim_v or 0,
                            a.options)
    elif a.tune:
        base = re.sub(r"-(fwd|bwd)$", "", a.case)
        a.only = re.escape(a.case) if base != a.case else f"^{re.escape(base)}-(fwd|bwd)$"
        cases = [case for case in cases if case.name == base]
    return [case for case in cases
            if any(re.search(a.only, f"{case.name}-{which}") for which in case.passes)]


def chosen_peers(a: argparse.Namespace) -> dict[str, str]:
    """Peers and their versions. Errors: exits for a peer that is not installed."""
    from .sides import installed

    if a.peers == "all":
        return installed(a.kind)
    names = [] if a.peers == "none" else [name.strip() for name in a.peers.split(",")]
    found = installed(a.kind, names)
    for name in names:
        if name not in found:
            sys.exit(f"--peers = {name}: not to be had here; there are "
                     f"{', '.join(installed(a.kind)) or 'none'}")
    return found


def work(a: argparse.Namespace) -> int:
    """Runs all cases in this process; writes each row as soon as it is measured, and the results at
    the end, also where SIGINT or SIGTERM is the end."""
    interrupt_once()
    prepare_environment(a.kind, a.threads)
    from . import facts, tables
    from .measure import Bench, say

    warnings.filterwarnings("ignore")  # PyTorch warns at length when one of its kernels cannot run
    peers = chosen_peers(a)
    if a.kind == "cuda" or "torch" in peers:
        prepare_torch(a.device, a.threads)
    bench = Bench(a.device, a.backends, list(peers), a.threads, a.seconds, a.pause,
                  a.only, Progress(a.progress, a.lost))
    known = facts.facts(bench.memory, a.threads, peers)
    if a.pause:
        known["pause"] = a.pause
    begun = json.loads(Path(a.done).read_text()) if a.done else []
    rows: list[tables.Row] = list(begun)
    cases = [case for case in a.cases if not any(row["case"] == case.name for row in rows)]
    if not begun and not a.lost:
        libraries = ("regard", "torch", "openvino", "onnxruntime", "jax", "numpy", "cudnn")
        say(f"{known['device']}, " + (f"{a.threads} threads" if a.kind == "cpu" else a.device)
            + "; " + ", ".join(f"{name} {known[name]}" for name in libraries if name in known))
        say(f"at the beginning: {facts.load(bench.memory)[0]}")
    began = time.perf_counter()
    if count := bench.compile(cases):
        say(f"kernels of {count} problems compiled in {time.perf_counter() - began:.1f} s")
    broken = [what for what in a.lost if what.endswith("|timing")]
    interrupted = False
    try:
        measure_all(a, bench, cases, peers, known, rows, broken)
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted")
    text, rates = facts.load(bench.memory)
    say(f"\nat the end: {text}")
    rows = begun + [row | rates for row in rows[len(begun):]]
    ended = finish(a, rows, len(broken), facts.results_name(bench.memory))
    return INTERRUPTED if interrupted else ended


def measure_all(a: argparse.Namespace, bench: Any, cases: Sequence[Case], peers: Iterable[str],
                known: dict[str, Any], rows: list[Any], broken: list[str]) -> None:
    """Appends each case's rows, with what is known of the run, or its name to `broken`."""
    from . import tables
    from .measure import say, status
    from .side import reason

    group = None
    for index, case in enumerate(cases):
        status(f"[{index + 1}/{len(cases)}] {case.name}")
        try:
            measured = bench.rows(case)
        except Exception as error:  # noqa: BLE001 - too little memory, say: the other cases go on
            say(f"{case.name}: {reason(error)}")
            bench.look_for_fault(error, case.name)
            broken.append(case.name)
            continue
        for row in measured:
            rows.append(row | known)
            columns = a.backends + [name for name in peers if name in {
                peer for one in cases if one.group == case.group for peer in one.peers}]
            if a.tune:
                say(tables.tuned_table(rows[-1]))
                continue
            if case.group != group:
                group = case.group
                say("\n" + tables.header(columns, tables.rates(rows[-1])[0]))
            say(tables.line_of(rows[-1], columns))
        if a.done:
            Path(a.done).write_text(json.dumps(rows))


def finish(a: argparse.Namespace, rows: list[Any], broken: int, name: str) -> int:
    """Writes and draws the rows; returns the exit status. broken: how many cases failed."""
    from . import tables
    from .measure import say

    features = [row for row in rows if row["group"] == "features"]
    if features and not a.tune:
        say(tables.feature_table(features))
    if text := tables.left_out(rows):
        say(text)
    wrong = sum(bool(row["wrong"]) for row in rows)
    failed = broken + sum(any(map(tables.is_ours, row["why_not"])) for row in rows)
    if not a.tune:
        say(f"\n{len(rows)} rows, {wrong} with a wrong result, {failed} that we could not run")
    if rows and a.out and not a.tune:
        path = a.out if a.out.suffix == ".jsonl" else a.out / name
        results.write(rows, path)
        say(f"written to {path}")
        if a.plot is not None:
            from .plot import draw_file

            say(f"plot: {draw_file(path, a.plot if a.plot.name else path.with_suffix('.svg'))}")
    return 1 if wrong or failed and not a.tune else 0


def plot_main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m regard.bench plot",
                                     description="Draws results from their JSON lines.")
    parser.add_argument("results", type=Path, help="a file of JSON lines that the benchmark wrote")
    parser.add_argument("--out", type=results.new_picture,
                        help=".svg or .png (default: next to the results)")
    a = parser.parse_args(argv)
    try:
        a.out = a.out or results.new_picture(str(a.results.with_suffix(".svg")))
        from .plot import draw_file

        print(f"plot: {draw_file(a.results, a.out)}")
    except (argparse.ArgumentTypeError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["plot"]:
        return plot_main(argv[1:])
    if argv[:1] == ["host"]:
        from .host import main as host_main

        return host_main(argv[1:])
    if argv[:1] == ["behind"]:
        from .behind import main as behind_main

        return behind_main(argv[1:])
    if argv[:1] == ["scaling"]:
        from .scaling import main as scaling_main

        return scaling_main(argv[1:])
    if argv[:1] == ["map"]:
        from .map.main import main as map_main

        return map_main(argv[1:])
    if argv[:1] == ["compare"]:
        from .compare import main as compare_main

        return compare_main(argv[1:])
    a = parse(argv)
    if a.list:
        for case in a.cases:
            print(" ".join(f"{case.name}-{which}" for which in case.passes))
        return 0
    if a.one_process or a.progress:
        return work(a)
    return watch([sys.executable, "-m", "regard.bench", *argv])


if __name__ == "__main__":
    sys.exit(main())
