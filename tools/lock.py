#!/usr/bin/env python3
"""Pins what tools/setup.sh installs from PyPI: writes each tools/requirements/*.txt from its *.in.

    pip install uv && python3 tools/lock.py

A lock names every package, those that others require as well, with the hashes of its files for every
Python from 3.11 on and every system.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "requirements"
FIRST = "test"
# Nothing that these require is wanted: one is a compiler, the other is only read as data.
ALONE = {"old-compiler", "model"}
# PyPI's PyTorch for Linux needs libraries of NVIDIA's, some gigabytes; PyTorch's own build for CPUs
# does not. Both are locks of their own: setup.sh takes the second where pip is offered it.
GPU_LIBRARIES = re.compile(r"triton=|(nvidia|cuda)-")
TORCH_CPU = """\
torch==2.13.0+cpu \\
    --hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"""


def locked(source: Path, before: list[str]) -> list[str]:
    """One text for each package: its name, version, marker and hashes. It agrees with the locks
    written before, so that all of them fit into one environment."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-annotate", "--no-header"]
    command += ["--no-deps"] if source.stem in ALONE else []
    for name in before:
        command += ["--constraints", f"{name}.txt"]
    text = subprocess.run([*command, source.name], cwd=FOLDER, check=True, capture_output=True,
                          text=True).stdout
    return re.split(r"\n(?=\S)", text.strip())


def write(name: str, packages: list[str], sources: str) -> None:
    path = FOLDER / f"{name}.txt"
    path.write_text(f"# Written by tools/lock.py from {sources}.\n" + "\n".join(packages) + "\n")
    print(f"{path.relative_to(FOLDER.parent.parent)}: {len(packages)} packages")


def main() -> None:
    torch: dict[str, str] = {}
    written: list[str] = []
    for source in sorted(FOLDER.glob("*.in"), key=lambda path: (path.stem != FIRST, path)):
        wanted = set(source.read_text().split())
        packages = []
        for package in locked(source, written):
            name = package.split(" ")[0]
            if name.startswith("torch=") or (GPU_LIBRARIES.match(name) and name not in wanted):
                torch[name] = package
            else:
                packages.append(package)
        write(source.stem, packages, source.name)
        written.append(source.stem)
    write("torch", [torch[name] for name in sorted(torch)], "torch in test.in and bench.in")
    write("torch-cpu", [TORCH_CPU], "its own text")


if __name__ == "__main__":
    main()
