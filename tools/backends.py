"""Names the backends that the built library offers on this machine, through its C ABI."""

from __future__ import annotations

import ctypes
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def library(preset: str = "release") -> Path:
    return ROOT / "build" / preset / "libregard.so"


def available(prefix: str = "cpu", preset: str = "release") -> list[str]:
    """Best first; prefix "cpu" leaves out "reference"."""
    regard = ctypes.CDLL(str(library(preset)))
    regard.regard_backend_name.restype = ctypes.c_char_p
    names = [
        regard.regard_backend_name(index).decode()
        for index in range(regard.regard_backend_count())
        if regard.regard_backend_available(index)
    ]
    concrete = [name for name in names if name.startswith(f"{prefix}:")]
    return concrete or [name for name in names if name.startswith(prefix)]
