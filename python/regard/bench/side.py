"""A side that is timed: one implementation of a case and pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import Error


class LeftOut(Exception):
    """A peer cannot take a case; the text says why."""


@dataclass
class Side:
    """One implementation of one case and pass.

    results: the results of the call, in the memory, shapes and layout of the problem.
    wait: for a library with its own queue: blocks until the work of the call is done.
    on: makes the call for a CUDA stream; None: the call uses PyTorch's current stream.
    times: how many passes one call runs.
    turn: how many calls fit into a turn of the GPU's clock; 0: not known yet.
    """

    name: str
    call: Callable[[], Any]
    results: Callable[[], dict[str, Any]]
    backend: str = ""
    kernel: str = ""
    around: Callable[[], Any] = contextlib.nullcontext
    wait: Callable[[], Any] | None = None
    on: Callable[[int], Callable[[], Any]] | None = None
    times: int = 1
    turn: int = 0
    keep: object = None


def reason(error: Exception) -> str:
    """One line on why a side cannot run."""
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, (LeftOut, Error)) else f"{type(error).__name__}: "
    return (kind + text)[:160] if text else type(error).__name__
