"""Which rows of a rank a call of another one has, as runs of neighbours: what is copied at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import call_keys
from .plan_value import Plan

MOST_RUNS = 64  # that a rank gives and takes in one pass


class Run(NamedTuple):
    """Neighbouring keys. own: the first one's place among the owner's rows; row: among those that it
    gives to this rank; place: among the keys of the call that has it."""

    own: int
    row: int
    place: int
    size: int


def between(plan: Plan, receiver: int, owner: int, name: str) -> tuple[Run, ...]:
    """The rows of another rank that a call of the receiver with keys of this name has."""
    def found() -> tuple[Run, ...]:
        rows = plan.needed.rows(receiver, owner)
        places = placed(call_keys.positions(plan, receiver, name), plan.positions(owner)[rows])
        return tuple(Run(int(rows[begin]), begin, int(places[begin]), end - begin)
                     for begin, end in neighbours(rows, places))

    made: tuple[Run, ...] = plan.memo.value(("runs", receiver, owner, name), found)
    return made


def are_few(plan: Plan, name: str) -> bool:
    """Whether no rank has more than MOST_RUNS."""
    def found() -> bool:
        counts = [0] * plan.world_size
        for receiver in range(plan.world_size):
            for owner in range(plan.world_size):
                if owner != receiver:
                    count = len(between(plan, receiver, owner, name))
                    counts[receiver] += count
                    counts[owner] += count
        return max(counts) <= MOST_RUNS

    made: bool = plan.memo.value(("runs are few", name), found)
    return made


def placed(keys: Tensor | None, positions: Tensor) -> Tensor:
    """The places of these positions among the keys; None is the whole sequence."""
    return positions if keys is None else torch.searchsorted(keys.cpu(), positions)


def neighbours(*places: Tensor) -> list[tuple[int, int]]:
    """Where runs begin and end in which each of these rises by one."""
    if not len(places[0]):
        return []
    jumps = torch.stack([x.diff() != 1 for x in places]).any(0)
    begins = [0, *(jumps.nonzero()[:, 0] + 1).tolist()]
    return list(zip(begins, [*begins[1:], len(places[0])]))
