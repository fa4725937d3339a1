"""The look of the pictures: readable on light and dark pages, told apart without colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

# Okabe and Ito's colours, which the colour-blind tell apart; lines differ in their dashes as well.
COLOURS = {"stock": "#E69F00", "regard": "#0072B2", "reversed": "#555555"}
DASHES: dict[str, Any] = {"stock": "-", "regard": (0, (3, 2)), "reversed": ":"}
MARKERS = {"stock": "o", "regard": "x", "reversed": "."}
NAMES = {"stock": "PyTorch's attention", "regard": "Regard", "reversed": "PyTorch's, keys reversed"}


def figure(rows: int, columns: int) -> tuple[Any, Any]:
    """A white sheet and its axes, always as rows of columns."""
    pyplot.rcParams.update({
        "svg.hashsalt": "regard", "font.size": 10, "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True,
        "axes.axisbelow": True, "grid.color": "#dddddd", "lines.linewidth": 1.8})
    return pyplot.subplots(rows, columns, figsize=(4.6 * columns, 2.7 * rows), squeeze=False,
                           layout="constrained", facecolor="white")


def finish(sheet: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(sheet)
