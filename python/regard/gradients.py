"""The gradients of a call: which there are, which are wanted, and the types of their sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _core
from .call import Call
from .errors import WrongType, refuse
from .options import shown

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")


@dataclass(frozen=True)
class Gradients:
    """What `attention_backward` computed; None where it was not asked for."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink: Any = None


def wanted_gradients(gradients: Iterable[str] | None, call: Call,
                     into: Gradients | None = None) -> list[str]:
    """Errors: InvalidArgument for a name that is none, or a gradient of what is not given."""
    if into is not None and not isinstance(into, Gradients):
        raise refuse("into", shown(into), "must be regard.Gradients of the arrays to write to",
                     WrongType)
    if gradients is None:
        if into is not None:
            return [name for name in GRADIENTS if getattr(into, name) is not None]
        absent = {"dbias": call.extras["bias"] is None, "dsink": call.extras["sink"] is None}
        return [name for name in GRADIENTS if not absent.get(name)]
    if not isinstance(gradients, Iterable):
        raise refuse("gradients", shown(gradients), f"must be names of {', '.join(GRADIENTS)}",
                     WrongType)
    wanted = [gradients] if isinstance(gradients, str) else list(gradients)
    for name in wanted:
        if not isinstance(name, str) or name not in GRADIENTS:
            raise refuse("gradients", repr(name), f"must be of {', '.join(GRADIENTS)}")
        source = name[1:]
        if source in call.extras and call.extras[source] is None:
            raise refuse("gradients", repr(name), f"there is no {source}")
        if into is not None and getattr(into, name) is None:
            raise refuse("into", f"without {name}", "must hold every gradient that is asked for")
    return wanted


def sums_type(problem: _core.Problem) -> str:
    """Of lse and dlse."""
    return "f64" if problem.type == "f64" else "f32"
