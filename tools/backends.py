"""Names the backends that the built library offers on this machine, through its C ABI."""

from __future__ import annotations

import ctypes
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def library(preset: str = "release") -> Path:
    return ROOT / "build" / preset / "libregard.so"


def emulated_amx() -> Path:
    """The library with AMX on emulated tiles, and AVX-512 by AVX2."""
    return ROOT / "build/release/emulated_amx/libregard.so"


def available(prefix: str = "cpu", preset: str = "release", of: Path | None = None) -> list[str]:
    """Best first; prefix "cpu" leaves out "reference". of: another library than the preset's."""
    regard = ctypes.CDLL(str(of or library(preset)))
    regard.regard_backend_name.restype = ctypes.c_char_p
    names = [
        regard.regard_backend_name(index).decode()
        for index in range(regard.regard_backend_count())
        if regard.regard_backend_available(index)
    ]
    concrete = [name for name in names if name.startswith(f"{prefix}:")]
    return concrete or [name for name in names if name.startswith(prefix)]
