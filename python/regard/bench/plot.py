"""Draws results from their JSON lines: bars for a CPU, curves for a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from .tables import Row, is_ours  # noqa: E402

INK, FAINT, GRID = "#26242b", "#6f6b66", "#e6e3dd"
# Okabe and Ito's colours, which the colour-blind tell apart too; markers say the same again.
STYLES: dict[str, tuple[str, str, str]] = {  # label, colour, marker
    "ours": ("Regard", "#d55e00", "o"),
    "torch": ("PyTorch", "#0072b2", "s"),
    "openvino": ("OpenVINO", "#009e73", "^"),
    "onnx-rt": ("ONNX Runtime", "#b8860b", "D"),
    "cudnn": ("cuDNN", "#009e73", "^"),
    "flash": ("FlashAttention-2", "#0072b2", "s"),
    "efficient": ("PyTorch memory-efficient", "#b8860b", "D"),
    "math": ("PyTorch unfused", "#7f7f7f", "v"),
    "jax-cudnn": ("JAX, cuDNN", "#56b4e9", "P"),
    "jax": ("JAX, XLA", "#cc79a7", "X"),
    "numpy": ("NumPy unfused", "#8c8c8c", "v"),
}
TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
PASSES = {"fwd": "forward", "bwd": "backward"}
MASKS = ("full", "causal")
HEAD = 0.92  # inches over the panels, for title and legend


def read(path: Path) -> list[Row]:
    """The benchmark's rows. Errors: OSError; ValueError for a file with other lines."""
    try:
        return [with_rates(json.loads(line)) for line in path.read_text().splitlines()]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the benchmark's JSON lines ({error!r})") from None


def with_rates(row: Row) -> Row:
    """rate: FLOP/s by "ours" and peers; share: of the CPU's peak, or None."""
    rate: dict[str, float] = {}
    share = None
    for name, value in row["tflops"].items():
        key = "ours" if is_ours(name) else name
        if 1e12 * value > rate.get(key, 0.0):  # the best of our backends, where several were timed
            rate[key] = 1e12 * value
            share = row.get("share", {}).get(name, share) if key == "ours" else share
    return row | {"rate": rate, "share": share}


def draw_file(results: Path, out: Path) -> Path:
    """Draws one file of results; returns out. Errors: ValueError where nothing can be drawn."""
    rows = [row for row in read(results) if row["group"] == "grid" and row["rate"]]
    if not rows:
        raise ValueError(f"{results}: no rows of the grid, which the plot shows")
    out.parent.mkdir(parents=True, exist_ok=True)
    style: Any = {"svg.hashsalt": "regard", "svg.fonttype": "none"}  # stable and small
    with plt.rc_context(style):
        figure = draw_cpu(rows) if "threads" in rows[0] else draw_gpu(rows)
        figure.savefig(out, dpi=110, facecolor="white",
                       metadata={"Date": None} if out.suffix == ".svg" else None)
        plt.close(figure)
    return out


# --------------------------------------------------------------------------------------- both kinds


def names_in(rows: list[Row]) -> list[str]:
    return [name for name in STYLES if any(name in row["rate"] for row in rows)]


def plain_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, size=9.5, color=INK, loc="left", pad=5)
    axes.tick_params(length=0, labelsize=7.5, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", color=GRID, linewidth=0.7)


def with_head(figure: Figure, title: str, note: str, handles: list[Any], labels: list[str]) -> None:
    """The title, a line of description and the legend, above the panels."""
    height = figure.get_figheight()
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0.006, 0.004, 0.988, 1 - HEAD / height), hspace=0.05, wspace=0.03)
    figure.text(0.012, 1 - 0.2 / height, title, size=14, color=INK, va="center")
    figure.text(0.012, 1 - 0.44 / height, note, size=8.5, color=FAINT, va="center")
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.004, 1 - 0.54 / height),
                  ncols=len(labels), frameon=False, fontsize=8.5, handlelength=1.5,
                  columnspacing=1.6, labelcolor=INK)


# ------------------------------------------------------------------------------------------- a CPU


def pale(colour: str) -> tuple[float, ...]:
    """Half way to white."""
    return tuple(0.5 + 0.5 * part for part in matplotlib.colors.to_rgb(colour))


def draw_cpu(rows: list[Row]) -> Figure:
    types = [name for name in TYPES if any(row["type"] == name for row in rows)]
    figure, grid = plt.subplots(len(types), 2, figsize=(11, HEAD + 2.35 * len(types)),
                                squeeze=False, layout="constrained")
    names = names_in(rows)
    for line, name in zip(grid, types, strict=True):
        for axes, which in zip(line, PASSES, strict=True):
            chosen = [row for row in rows if row["type"] == name and row["pass"] == which]
            if chosen:
                bars(axes, chosen, [n for n in names if any(n in row["rate"] for row in chosen)])
            plain_axes(axes, f"{TYPES[name]}, {PASSES[which]}")
        line[0].set_ylabel("GFLOP/s", size=8, color=INK)
    first = rows[0]
    kernels = ", ".join(f"{type} {backend_of(rows, type)}" for type in types)
    versions = [f"{label} {first[key]}" for key, label in
                (("torch", "PyTorch"), ("openvino", "OpenVINO"), ("onnxruntime", "ONNX Runtime"),
                 ("jax", "JAX"), ("numpy", "NumPy")) if first.get(key)]
    handles = [Rectangle((0, 0), 1, 1, color=STYLES[name][1]) for name in names]
    handles.append(Rectangle((0, 0), 1, 1, color="#c9c6c1"))
    with_head(figure, "Attention on a CPU",
              f"{first['device']}, {first['threads']} threads ({kernels}); "
              f"{', '.join(versions)}. Higher is better; numbers: ours over the best other",
              handles, [STYLES[name][0] for name in names] + ["pale: causal"])
    return figure


def backend_of(rows: list[Row], type: str) -> str:
    """The backend of ours that ran the most cases of a type."""
    names = [name for row in rows if row["type"] == type
             for name in ([row["backend"]] if isinstance(row["backend"], str) else
                          row["backend"].values())]
    return max(set(names), key=names.count).partition(":")[2] if names else "-"


def bars(axes: Axes, rows: list[Row], names: list[str]) -> None:
    """A group a shape: every name's bar, full and then causal."""
    shapes = list(dict.fromkeys(tuple(row["sizes"]) for row in rows))
    width = 0.84 / (2 * len(names))
    tops = [1e-9 * max(row["rate"].values()) for row in rows]
    for row in rows:
        begin = shapes.index(tuple(row["sizes"])) - 0.44 + (0.46 if row["mask"] == "causal" else 0)
        for index, name in enumerate(names):
            colour = STYLES[name][1]
            axes.bar(begin + index * width, 1e-9 * row["rate"].get(name, 0), 0.92 * width,
                     align="edge", color=pale(colour) if row["mask"] == "causal" else colour)
        others = [rate for name, rate in row["rate"].items() if name != "ours"]
        if others and "ours" in row["rate"]:
            axes.text(begin + width / 2, 1e-9 * row["rate"]["ours"] + 0.012 * max(tops),
                      f"{row['rate']['ours'] / max(others):.1f}×", size=6.5, color=INK,
                      ha="center", va="bottom")
    peaks = [row["rate"]["ours"] / row["share"] for row in rows if row.get("share")]
    if peaks:
        peak = 1e-9 * sum(peaks) / len(peaks)
        axes.axhline(peak, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.text(len(shapes) - 0.47, peak, "peak of the instruction", size=7, color=FAINT,
                  ha="right", va="bottom", zorder=3,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})
        tops.append(peak)
    axes.set(ylim=(0, 1.13 * max(tops)), xlim=(-0.5, len(shapes) - 0.46))
    labels = [f"{b} × {h} heads\n{length} × {dim}" for b, h, _, length, _, dim in shapes]
    axes.set_xticks(range(len(shapes)), labels)


# ------------------------------------------------------------------------------------------- a GPU


def draw_gpu(rows: list[Row]) -> Figure:
    """A column a head size; a row for each pass and mask."""
    dims = sorted({row["sizes"][5] for row in rows})
    kinds = [(which, mask) for which in PASSES for mask in MASKS
             if any((row["pass"], row["mask"]) == (which, mask) for row in rows)]
    figure, grid = plt.subplots(len(kinds), len(dims), squeeze=False, layout="constrained",
                                sharex=True, sharey=True,
                                figsize=(max(7.4, 3.7 * len(dims)), HEAD + 1.95 * len(kinds)))
    lengths = sorted({row["sizes"][4] for row in rows})
    top = max(rate for row in rows for rate in row["rate"].values())
    for line, (which, mask) in zip(grid, kinds, strict=True):
        for axes, dim in zip(line, dims, strict=True):
            curves(axes, [row for row in rows if (row["pass"], row["mask"], row["sizes"][5]) ==
                          (which, mask, dim)])
            plain_axes(axes, f"{PASSES[which]}, {mask}, head size {dim}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
            axes.minorticks_off()
            axes.set_ylim(0, 1.06e-12 * top)
        line[0].set_ylabel("TFLOP/s", size=8, color=INK)
    names, first = names_in(rows), rows[0]
    handles = [Line2D([], [], color=STYLES[name][1], marker=STYLES[name][2], markersize=4.5,
                          linewidth=2.4 if name == "ours" else 1.3) for name in names]
    number = int(first["cudnn"])
    cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    versions = f"PyTorch {first['torch']}, cuDNN {cudnn}" + (
        f", JAX {first['jax']}" if first.get("jax") else "")
    with_head(figure, "Attention on a GPU",
              f"{first['device']}; bfloat16, 16384 tokens, heads × head size = 2048; over the "
              f"sequence length, higher is better; {versions}",
              handles, [STYLES[name][0] for name in names])
    return figure


def curves(axes: Axes, rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: int(row["sizes"][4]))
    for name in reversed(names_in(rows)):  # ours on top
        points = [(row["sizes"][4], 1e-12 * row["rate"][name]) for row in rows
                  if name in row["rate"]]
        _, colour, marker = STYLES[name]
        ours = name == "ours"
        axes.plot(*zip(*points), color=colour, marker=marker, markersize=4.5 if ours else 3.5,
                  linewidth=2.4 if ours else 1.3, markeredgewidth=0)
