"""docs/kernels.md maps every primitive of the kernels to PTX."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRIMITIVE = re.compile(r"^REGARD_DEVICE [^(=]*?(\w+)(?:<\w+>)?\(", re.MULTILINE)


def primitives() -> set[str]:
    files = (ROOT / "src/cuda/kernels" / name for name in ("ptx.cuh", "ptx_hopper.cuh"))
    return {name for file in files for name in PRIMITIVE.findall(file.read_text(encoding="utf-8"))}


def rows() -> set[str]:
    """The names in the table's first column."""
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    table = page.partition("## Primitives and their PTX\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_each_primitive_has_a_row() -> None:
    assert rows() == primitives()
