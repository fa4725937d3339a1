#!/usr/bin/env python3
"""Draws the bars of bench/results/cpu_*.jsonl: ours beside PyTorch's, and the measured peak."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
INK, FAINT = "#26242b", "#8d877f"
OURS = {"full": "#c4512d", "causal": "#e3a06d"}
TORCH = {"full": "#6f7782", "causal": "#b3b9c0"}
TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
Row = dict[str, object]


def newest(folder: Path) -> Path:
    return max(folder.glob("cpu_*.jsonl"), key=lambda path: path.stat().st_mtime)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def peak_of(rows: list[Row]) -> float | None:
    shares = [row["gflops"] / row["share"] for row in rows if row["share"]]
    return sum(shares) / len(shares) if shares else None


def panel(axes: Axes, rows: list[Row], title: str) -> None:
    """Four bars a shape: full ours, full torch, causal ours, causal torch."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for row in rows:
        left = cases.index(row["case"]) + (-0.42 if row["mask"] == "full" else 0.02)
        axes.bar(left, row["gflops"], 0.2, align="edge", color=OURS[row["mask"]])
        axes.bar(left + 0.2, row["torch_gflops"], 0.2, align="edge", color=TORCH[row["mask"]])
        ratio = row["gflops"] / row["torch_gflops"]
        axes.text(
            left + 0.1,
            row["gflops"],
            f"{ratio:.1f}x",
            size=6.5,
            ha="center",
            va="bottom",
            color=INK,
        )
    peak = peak_of(rows)
    if peak:
        axes.axhline(peak, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(
            len(cases) - 0.48, peak, "measured peak", size=7, color=FAINT, ha="right", va="bottom"
        )
    top = max(peak or 0, *(max(row["gflops"], row["torch_gflops"]) for row in rows))
    axes.set(ylim=(0, 1.12 * top), xlim=(-0.55, len(cases) - 0.45))
    axes.set_title(title, size=10, color=INK, loc="left")
    axes.set_xticks(range(len(cases)), [str(case).replace(",", "·") for case in cases], size=7.5)
    axes.tick_params(length=0, labelsize=7.5, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e8e5df", linewidth=0.7)


def legend(figure: plt.Figure) -> None:
    entries = {
        "Regard, full": OURS["full"],
        "PyTorch, full": TORCH["full"],
        "Regard, causal": OURS["causal"],
        "PyTorch, causal": TORCH["causal"],
    }
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in entries.values()]
    figure.legend(
        handles,
        entries,
        loc="upper right",
        bbox_to_anchor=(0.985, 0.985),
        ncols=4,
        frameon=False,
        fontsize=8.5,
        handlelength=1,
        handleheight=1,
        columnspacing=1.4,
    )


def draw(rows: list[Row]) -> plt.Figure:
    types = [name for name in TYPES if any(row["type"] == name for row in rows)]
    figure, grid = plt.subplots(
        len(types), 2, figsize=(11, 0.9 + 2.5 * len(types)), squeeze=False, layout="constrained"
    )
    figure.get_layout_engine().set(
        rect=(0.005, 0.0, 0.99, 1 - 0.62 / figure.get_figheight()), hspace=0.06
    )
    for line, name in zip(grid, types, strict=True):
        for axes, which in zip(line, ("forward", "backward"), strict=True):
            chosen = [row for row in rows if row["type"] == name and row["pass"] == which]
            panel(axes, chosen, f"{TYPES[name]}, {which}")
        line[0].set_ylabel("GFLOP/s", size=8, color=INK)
    first = rows[0]
    figure.text(
        0.012,
        1 - 0.17 / figure.get_figheight(),
        "Attention on the CPU",
        size=14,
        color=INK,
        va="center",
    )
    figure.text(
        0.012,
        1 - 0.42 / figure.get_figheight(),
        f"{first['device']}, {first['threads']} threads, {first['backend']}; PyTorch "
        f"{first['torch']}; shapes are B·H·S·D; higher is better",
        size=8.5,
        color=FAINT,
        va="center",
    )
    legend(figure)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "results", type=Path, nargs="?", help="default: the newest in bench/results"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "bench/images/cpu.svg",
        help=".svg or .png (default %(default)s)",
    )
    arguments = parser.parse_args()
    rows = read(arguments.results or newest(ROOT / "bench/results"))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "regard", "svg.fonttype": "none"})  # stable and small
    draw(rows).savefig(
        arguments.out,
        dpi=110,
        facecolor="white",
        metadata={"Date": None} if arguments.out.suffix == ".svg" else None,
    )
    print(f"plot: {arguments.out}")


if __name__ == "__main__":
    main()
