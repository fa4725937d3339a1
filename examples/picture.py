"""Draws which words of a sentence look at which: arcs over and under it, and a heat map a head."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.collections import LineCollection  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap, to_rgb  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402
from PIL import Image  # noqa: E402

PAPER, INK, FAINT = "#fbf8f2", "#26242b", "#8d877f"
SERIF = ["STIXGeneral", "DejaVu Serif"]


@dataclass(frozen=True)
class Head:
    """One attention head to show: P (S, S), its light and dark colour, and what it does."""

    name: str
    caption: str
    weights: np.ndarray
    light: str
    dark: str

    @property
    def colours(self) -> LinearSegmentedColormap:
        return LinearSegmentedColormap.from_list(
            self.name, ["#f3eee5", self.light, self.dark, np.array(to_rgb(self.dark)) * 0.55]
        )


def draw(path: Path, title: str, note: str, tokens: list[str], over: Head, under: Head) -> None:
    figure = plt.figure(figsize=(11.5, 11.5), facecolor=PAPER)
    figure.text(0.045, 0.957, title, family=SERIF, size=30, color=INK, va="center")
    figure.text(0.045, 0.922, note, family=SERIF, size=13.5, color=FAINT, va="center")
    _sentence(figure.add_axes((0.045, 0.505, 0.91, 0.405)), tokens, over, under)
    for left, head in ((0.105, over), (0.58, under)):
        _heat_map(figure.add_axes((left, 0.045, 0.375, 0.375)), tokens, head)
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=130, facecolor=PAPER)
    plt.close(figure)
    palette = Image.open(pixels).convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE)
    palette.save(path, optimize=True)


# ------------------------------------------------------------------------------ arcs over the words


def _word_positions(axes: Axes, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Centre and half width of each word, set in one line over the width of the axes."""
    renderer = axes.figure.canvas.get_renderer()
    unit = axes.get_window_extent().width
    widths = []
    for word in words:
        text = axes.text(0, 0, word, family=SERIF, size=19)
        widths.append(text.get_window_extent(renderer).width / unit)
        text.remove()
    sizes = np.array(widths)
    gap = (1 - sizes.sum()) / (len(words) - 1)
    begins = np.cumsum(sizes + gap) - sizes - gap
    return begins + sizes / 2, sizes / 2


def _ribbon(axes: Axes, begin: float, end: float, weight: float, head: Head, up: int) -> None:
    """An arc from the word that asks (light, thin) to the word that answers (dark, wide)."""
    turn = np.linspace(0, np.pi, 120)
    rise = 0.08 + 0.84 * abs(end - begin) ** 0.6
    x = (begin + end) / 2 - (end - begin) / 2 * np.cos(turn)
    y = up * (0.085 + rise * np.sin(turn))
    points = np.stack([x, y], axis=1)
    along = np.linspace(0, 1, len(turn) - 2)[:, None]
    ink = (1 - along) * np.array(to_rgb(head.light)) + along * np.array(to_rgb(head.dark))
    share = min(1.0, 0.22 + 0.95 * weight)  # mixed with the paper: overlapping alpha would bead
    axes.add_collection(
        LineCollection(
            list(np.stack([points[:-2], points[1:-1], points[2:]], axis=1)),
            colors=share * ink + (1 - share) * np.array(to_rgb(PAPER)),
            linewidths=(0.6 + 10 * weight) * (0.35 + 0.65 * along[:, 0]),
            capstyle="butt",
            zorder=1 + weight,
        )
    )


def _sentence(axes: Axes, tokens: list[str], over: Head, under: Head) -> None:
    inner = range(1, len(tokens) - 1)
    axes.set(xlim=(0, 1), ylim=(-0.88, 1.0))
    axes.axis("off")
    centre, half = _word_positions(axes, [tokens[i] for i in inner])
    for head, up in ((over, 1), (under, -1)):
        for i in inner:
            for j in inner:
                weight = float(head.weights[i, j])
                if i != j and weight > 0.07 and tokens[i][0].isalnum():
                    shift = 0.25 * half[j - 1] * np.sign(i - j)
                    _ribbon(axes, centre[i - 1], centre[j - 1] + shift, weight, head, up)
    for i in inner:
        axes.text(
            centre[i - 1],
            0,
            tokens[i],
            family=SERIF,
            size=19,
            color=INK,
            ha="center",
            va="center",
            zorder=5,
        )
    for head, y in ((over, 0.93), (under, -0.68)):
        axes.text(0, y, head.name, family=SERIF, size=16, color=head.dark, va="center")
        axes.text(
            0, y - 0.055, head.caption, family=SERIF, size=13, color=INK, va="top", linespacing=1.25
        )


# -------------------------------------------------------------------------------------- heat maps


def _heat_map(axes: Axes, tokens: list[str], head: Head) -> None:
    count = len(tokens)
    axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), aspect="equal", facecolor=PAPER)
    for i in range(count):
        for j in range(count):
            colour = head.colours(float(head.weights[i, j]) ** 0.7)
            axes.add_patch(
                FancyBboxPatch(
                    (j - 0.41, i - 0.41),
                    0.82,
                    0.82,
                    boxstyle="round,pad=0,rounding_size=0.16",
                    facecolor=colour,
                    edgecolor="none",
                )
            )
            if head.weights[i, j] >= 0.3:
                axes.text(
                    j,
                    i,
                    f"{100 * head.weights[i, j]:.0f}",
                    size=8,
                    color="white",
                    ha="center",
                    va="center_baseline",
                    family=SERIF,
                )
    marks = dict(family=SERIF, size=11.5, color=INK)
    axes.set_xticks(range(count), tokens, rotation=60, ha="left", rotation_mode="anchor", **marks)
    axes.set_yticks(range(count), tokens, **marks)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=2)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.text(
        -0.5,
        count + 0.1,
        f"{head.name}: each row a word that asks; its weights, in per cent",
        family=SERIF,
        size=11.5,
        color=head.dark,
        va="center",
    )
