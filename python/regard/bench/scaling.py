"""python -m regard.bench scaling: one problem on a CPU, on more and more threads.

Each number of threads is a run of the benchmark in a process of its own, because libraries take
their threads once. The table has GFLOP/s, and the efficiency: the rate over that of the side on the
fewest threads, times their number over the threads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import results
from .cases import PASSES
from .tables import Row, is_ours

SHAPE = "1x16x2048x64"


def counts_up_to(cores: int) -> list[int]:
    """1, 2, 4 ... and the cores."""
    return [n for n in (2**k for k in range(16)) if n < cores] + [cores]


def measured(arguments: Sequence[str], threads: int) -> list[Row]:
    """The rows of one run. Errors: exits with the run's status where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        done = subprocess.run([sys.executable, "-m", "regard.bench", "--device", "cpu", "--threads",
                               str(threads), "--out", str(out), *arguments],
                              stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            print(done.stdout)
            sys.exit(done.returncode)
        return [json.loads(line) for line in out.read_text().splitlines()]


def rates(rows: list[Row]) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """GFLOP/s by type and pass, side and threads. Ours is "ours"."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        sides = found.setdefault((row["type"], row["pass"]), {})
        for name, value in row["tflops"].items():
            key = "ours" if is_ours(name) else name
            sides.setdefault(key, {})[row["threads"]] = 1e3 * value
    return found


def efficiency(by_threads: dict[int, float]) -> dict[int, float]:
    fewest = min(by_threads)
    unit = by_threads[fewest] / fewest
    return {n: rate / (n * unit) for n, rate in sorted(by_threads.items())}


def table(rows: list[Row]) -> str:
    lines = []
    for (type, which), sides in rates(rows).items():
        counts = sorted({n for found in sides.values() for n in found})
        lines.append(f"\n{type}, {PASSES[which]}: GFLOP/s (efficiency)")
        lines.append(f"{'threads':<12}" + "".join(f"{n:>15}" for n in counts))
        for name, found in sides.items():
            parts = efficiency(found)
            cells = [f"{found[n]:8.1f} ({parts[n]:4.2f})" if n in found else "-" for n in counts]
            lines.append(f"{name:<12}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def draw(rows: list[Row], out: Path) -> None:
    """A panel for each type and pass: efficiency over threads."""
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    from . import plot

    found = rates(rows)
    lines = -(-len(found) // 4)
    columns = -(-len(found) // lines)
    if lines > 1:  # forward above backward
        found = dict(sorted(found.items(), key=lambda panel: [*PASSES].index(panel[0][1])))
    with plt.rc_context({"svg.hashsalt": "regard", "svg.fonttype": "none"}):
        figure, grid = plt.subplots(
            lines, columns, squeeze=False, sharex=True, sharey=True, layout="constrained",
            figsize=(max(7.4, 2.9 * columns), plot.HEAD + 2.5 * lines))
        counts = sorted({row["threads"] for row in rows})
        top = 1.08 * max(part for sides in found.values() for side in sides.values()
                         for part in efficiency(side).values())
        for axes, ((type, which), sides) in zip(grid.flat, found.items()):
            for name in reversed([name for name in plot.STYLES if name in sides]):
                points = efficiency(sides[name])
                _, colour, marker = plot.STYLES[name]
                axes.plot([*points], [*points.values()], color=colour, marker=marker, markersize=4,
                          linewidth=2.4 if name == "ours" else 1.3, markeredgewidth=0)
            plot.plain_axes(axes, f"{plot.TYPES[type]}, {PASSES[which]}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(n) for n in counts])
            axes.minorticks_off()
            axes.set_ylim(0, top)
        for axes in grid.flat[len(found):]:
            axes.set_axis_off()
        for line in grid:
            line[0].set_ylabel("efficiency", size=8, color=plot.INK)
        for axes in grid[-1]:
            axes.set_xlabel("threads", size=8, color=plot.INK)
        names = [name for name in plot.STYLES if any(name in sides for sides in found.values())]
        handles = [Line2D([], [], color=plot.STYLES[name][1], marker=plot.STYLES[name][2],
                               markersize=4.5, linewidth=2.4 if name == "ours" else 1.3)
                   for name in names]
        first, (batch, heads, _, length, _, dim) = rows[0], rows[0]["sizes"][:6]
        plot.with_head(figure, "Attention on more threads",
                       f"{first['device']}; {batch} x {heads} heads, {length} tokens of {dim}, "
                       f"{first['mask']}; speed per thread, relative to the fewest threads",
                       handles, [plot.STYLES[name][0] for name in names])
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=110, facecolor="white",
                       metadata={"Date": None} if out.suffix == ".svg" else None)
        plt.close(figure)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regard.bench scaling", description=(__doc__ or "").split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("--threads", default=",".join(map(str, counts_up_to(cores))),
        help="numbers with commas between (default: %(default)s)")
    add("--q", default=SHAPE, metavar="BxHxSxD", help="sizes of q (default: %(default)s)")
    add("--type", default="f32,bf16", help="(default: %(default)s)")
    add("--with", dest="options", nargs="+", default=[], metavar="OPTION",
        help="as the benchmark takes them")
    add("--peers", default="all", metavar="NAMES", help="(default: all that are installed)")
    add("--seconds", default="0.5", help="of timing a case and pass (default: %(default)s)")
    add("--out", type=results.new_file, metavar="FILE", help="JSON lines (default: none)")
    add("--plot", type=results.new_picture, metavar="SVG", help="draw the efficiency as well")
    add("--from", dest="earlier", type=Path, metavar="FILE",
        help="print and draw what an earlier run wrote to --out, and measure nothing")
    a = parser.parse_args(argv)
    try:
        a.counts = sorted({int(n) for n in a.threads.split(",")})
    except ValueError:
        parser.error(f"--threads = {a.threads}: must be numbers with commas between")
    if not 1 <= a.counts[0] <= a.counts[-1] <= cores:
        parser.error(f"--threads = {a.threads}: must be 1 to {cores}")
    return a


def measured_on_all(a: argparse.Namespace) -> list[Row]:
    """Measures and writes, number by number."""
    arguments: list[Any] = ["--q", a.q, "--type", a.type, "--peers", a.peers, "--seconds", a.seconds]
    if a.options:
        arguments += ["--with", *a.options]
    rows: list[Row] = []
    for count in a.counts:
        found = measured(arguments, count)
        rows += found
        if a.out:
            results.write(rows, a.out)
        best = [f"{row['type']} {row['pass']} {1e3 * max(row['tflops'].values()):.0f}"
                for row in found if row["tflops"]]
        print(f"{count} threads: {', '.join(best)} GFLOP/s", file=sys.stderr, flush=True)
    return rows


def read(path: Path) -> list[Row]:
    """The rows of an earlier run. Errors: exits where the file cannot be read, or has other lines."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rates(rows)
    except OSError as error:
        sys.exit(f"--from = {path}: {error.strerror}")
    except (KeyError, TypeError, ValueError) as error:
        sys.exit(f"--from = {path}: not the lines of such a run ({error!r})")
    return rows or sys.exit(f"--from = {path}: has no rows")


def main(argv: Sequence[str]) -> int:
    a = parse(argv)
    rows = read(a.earlier) if a.earlier else measured_on_all(a)
    print(f"{rows[0]['device']}; regard {rows[0]['regard']}" + "".join(
        f", {name} {rows[0][name]}" for name in ("torch", "openvino", "onnxruntime", "jax", "numpy")
        if name in rows[0]))
    print(table(rows))
    if a.out and not a.earlier:
        print(f"\n{len(rows)} rows written to {a.out}")
    if a.plot:
        draw(rows, a.plot)
        print(f"plot: {a.plot}")
    return 0
