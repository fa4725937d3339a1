"""Scripts that run on the tests' own GPUs, each in a process of its own, because the driver is found
by LD_LIBRARY_PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
BUILD = FOLDER.parent.parent / "build/release"


def run(script, *arguments, folders, **environment):
    """folders: of build/release, with the libraries that stand for a GPU's."""
    if not (BUILD / folders[0] / "libcuda.so.1").exists():
        pytest.skip(f"needs {folders[0]} of build/release")
    environment |= {"LD_LIBRARY_PATH": ":".join(str(BUILD / folder) for folder in folders)}
    done = subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True,
                          env=os.environ | environment, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
