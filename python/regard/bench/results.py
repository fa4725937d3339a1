"""The files that results and plots go to, checked before anything is measured."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

PICTURES = (".svg", ".png")


def new_file(text: str) -> Path:
    """A file that can be written; its folders may have to be made. An argparse type."""
    path = Path(text)
    place = path if path.exists() else next(p for p in path.absolute().parents if p.exists())
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if place != path and not place.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {place} is no folder")
    if not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: {place} cannot be written")
    return path


def new_file_or_folder(text: str) -> Path:
    """A file of JSON lines, or a folder for one. An argparse type."""
    path = Path(text)
    new_file(str(path if path.suffix == ".jsonl" else path / "results.jsonl"))
    return path


def new_picture(text: str) -> Path:
    """A file that a plot can be drawn to. An argparse type."""
    path = new_file(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: must end in {' or '.join(PICTURES)}")
    need_matplotlib()
    return path


def need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('needs matplotlib: pip install "regard[bench]"')


def write(rows: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
