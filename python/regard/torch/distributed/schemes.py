"""Which module makes a call's passes."""

from __future__ import annotations

from types import ModuleType

from . import documents, gather, ring, stages, ulysses
from .call import Call

_SCHEMES: dict[str, ModuleType] = {"gather": gather, "halo": gather, "ring": ring,
                                   "ulysses": ulysses}
_OVERLAPPING: dict[str, ModuleType] = {"keys": stages, "documents": documents}


def module_of(call: Call) -> ModuleType:
    """Of a plan with one level: with the functions `forward` and `backward`."""
    return _OVERLAPPING.get(call.overlaps, _SCHEMES[call.plan.scheme])
