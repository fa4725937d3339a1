"""The gradients of a call: which ones exist, and which ones are wanted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _core
from .call import Call
from .checks import shown
from .errors import WrongType, refuse

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")


@dataclass(frozen=True)
class Gradients:
    """The results of `attention_backward`; None for a gradient that was not asked for."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink: Any = None


def wanted_gradients(gradients: Iterable[str] | None, call: Call,
                     into: Gradients | None = None) -> list[str]:
    """Errors: InvalidArgument for an unknown name, or the gradient of an absent array."""
    if into is not None and not isinstance(into, Gradients):
        raise refuse("into", shown(into), "must be regard.Gradients of the arrays to write to",
                     WrongType)
    if gradients is None:
        if into is not None:
            return [name for name in GRADIENTS if getattr(into, name) is not None]
        return [name for name in GRADIENTS if call.options.get(name[1:], True) is not None]
    if not isinstance(gradients, Iterable) or hasattr(gradients, "shape"):
        raise refuse("gradients", shown(gradients), f"must be names of {', '.join(GRADIENTS)}",
                     WrongType)
    wanted = [gradients] if isinstance(gradients, str) else list(gradients)
    for name in wanted:
        if not isinstance(name, str) or name not in GRADIENTS:
            raise refuse("gradients", repr(name), f"must be of {', '.join(GRADIENTS)}")
        if call.options.get(name[1:], True) is None:
            raise refuse("gradients", repr(name), f"there is no {name[1:]}")
        if into is not None and getattr(into, name) is None:
            raise refuse("into", f"without {name}", "must hold every gradient that is asked for")
    return [name for name in GRADIENTS if name in wanted]


def sums_type(problem: _core.Problem) -> str:
    """The type of lse and dlse."""
    return "f64" if problem.type == "f64" else "f32"
