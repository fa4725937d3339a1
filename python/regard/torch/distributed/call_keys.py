"""Which keys a rank's call has, by a name.

"all": those of `Plan.part`. "filled": also the positions between them, where keys have to follow each
other. "shared": of a call that has no rows of whole documents (whole_rows.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import whole_rows
from .call import Call
from .plan_value import Plan

ALL, FILLED, SHARED = "all", "filled", "shared"


def name_of(call: Call) -> str:
    if call.overlaps == "documents":
        return SHARED
    return FILLED if call.by_position else ALL


def positions(plan: Plan, rank: int, name: str, device: Any = "cpu") -> Tensor | None:
    """(n) int64, ascending; None for the whole sequence."""
    if name == SHARED:
        return whole_rows.shared_keys(plan, rank, device)
    return plan.needed.part(rank, None, device, name == FILLED)


def counts(plan: Plan, name: str) -> list[int]:
    """How many keys the calls of each rank have."""
    def found() -> list[int]:
        of_ranks = (positions(plan, rank, name) for rank in range(plan.world_size))
        return [plan.sizes.length if x is None else len(x) for x in of_ranks]

    made: list[int] = plan.memo.value(("counts of keys", name), found)
    return made


def own_rows(plan: Plan, rank: int, name: str, device: Any = "cpu") -> Tensor:
    """(n) int64, ascending: the rank's rows whose keys are among them."""
    if name == SHARED:
        return whole_rows.shared_rows(plan, rank, device)
    return plan.needed.rows(rank, rank, device)
