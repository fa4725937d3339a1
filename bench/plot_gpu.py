#!/usr/bin/env python3
"""Draws bench/results/gpu_*.jsonl: ours and PyTorch's kernels over the length, by head size."""

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
PEERS = {"cudnn": ("cuDNN", "#4b7f52"), "flash": ("FlashAttention-2", "#5a6ea0"),
         "efficient": ("PyTorch efficient", "#b3a06a")}
OURS = "#c4512d"
PASSES = {"fwd": "forward", "bwd": "backward"}
Row = dict[str, object]


def newest(folder: Path) -> Path:
    return max(folder.glob("gpu_*.jsonl"), key=lambda path: path.stat().st_mtime)


def ours_of(row: Row) -> str | None:
    """The best of our backends, where several were timed."""
    names = [name for name in row["tflops"] if name.startswith("cuda")]
    return max(names, key=row["tflops"].get, default=None)


def curves(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """(length, TFLOP/s) by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: row["sizes"][4]):
        for name in PEERS:
            if name in row["tflops"]:
                found.setdefault(name, []).append((row["sizes"][4], row["tflops"][name]))
        if ours_of(row):
            found.setdefault("ours", []).append((row["sizes"][4], row["tflops"][ours_of(row)]))
    return found


def panel(axes: Axes, rows: list[Row], title: str) -> None:
    for mask, line in (("full", "-"), ("causal", (0, (4, 2)))):
        for name, points in curves([row for row in rows if row["mask"] == mask]).items():
            colour = OURS if name == "ours" else PEERS[name][1]
            axes.plot(*zip(*points), color=colour, linestyle=line, marker="o", markersize=2.5,
                      linewidth=2.0 if name == "ours" else 1.1, zorder=3 if name == "ours" else 2)
    axes.set_title(title, size=10, color=INK, loc="left")
    axes.set_xscale("log", base=2)
    lengths = sorted({row["sizes"][4] for row in rows})
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths], size=7.5)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.tick_params(length=0, labelsize=7.5, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e8e5df", linewidth=0.7)


def draw(rows: list[Row]) -> plt.Figure:
    grid = [row for row in rows if row["group"] == "grid"]
    dims = sorted({row["sizes"][5] for row in grid})
    figure, axes = plt.subplots(2, len(dims), figsize=(3.7 * len(dims), 6), squeeze=False,
                                layout="constrained")
    height = figure.get_figheight()
    figure.get_layout_engine().set(rect=(0.005, 0.0, 0.99, 1 - 0.85 / height), hspace=0.06)
    for line, which in zip(axes, PASSES, strict=True):
        for one, dim in zip(line, dims, strict=True):
            panel(one, [row for row in grid if row["pass"] == which and row["sizes"][5] == dim],
                  f"head size {dim}, {PASSES[which]}")
        line[0].set_ylabel("TFLOP/s", size=8, color=INK)
    first = rows[0]
    figure.text(0.012, 1 - 0.2 / height, "Attention on a GPU", size=14, color=INK, va="center")
    figure.text(0.012, 1 - 0.45 / height,
                f"{first['device']}; bf16, 16384 tokens, heads x size = 2048; solid: full, dashed: "
                f"causal; PyTorch {first['torch']}, cuDNN {first['cudnn']}", size=8.5, color=FAINT,
                va="center")
    names = {"Regard": OURS} | {label: colour for label, colour in PEERS.values()}
    handles = [plt.Line2D([], [], color=colour, linewidth=2) for colour in names.values()]
    figure.legend(handles, names, loc="upper left", bbox_to_anchor=(0.005, 1 - 0.55 / height),
                  ncols=len(names), frameon=False, fontsize=8.5, handlelength=1.4,
                  columnspacing=1.6)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?",
                        help="default: the newest in bench/results")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/images/gpu.svg",
                        help=".svg or .png (default %(default)s)")
    arguments = parser.parse_args()
    path = arguments.results or newest(ROOT / "bench/results")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "regard", "svg.fonttype": "none"})  # stable and small
    draw(rows).savefig(arguments.out, dpi=110, facecolor="white",
                       metadata={"Date": None} if arguments.out.suffix == ".svg" else None)
    print(f"plot: {arguments.out}")


if __name__ == "__main__":
    main()
