"""Rows of a rank whose documents are whole on it: no other rank has to do with them or their keys.

Positions of a sequence are in one component if a row of one of them sees a key of another one, or
of a position beyond it: components are runs of positions, such as packed documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .plan_value import Plan
from .visibility import among

_MOST_RUNS = 4  # of whole rows, each of which is a call
_LEAST_SHARE = 0.25  # of all visible pairs


def are_many(plan: Plan) -> bool:
    """Whether "gather" and "halo" can have calls of their own for them: they see a quarter of all
    visible pairs."""
    if plan.scheme not in ("gather", "halo") or plan.moves_all or plan.visible.spans is None:
        return False
    seen = plan.visible.row_areas
    whole = sum(float(seen[plan.positions(rank)[run]].sum())
                for rank in range(plan.world_size) for run in runs(plan, rank))
    return whole > 0 and whole >= _LEAST_SHARE * float(seen.sum())


def runs(plan: Plan, rank: int) -> tuple[slice, ...]:
    """The rank's whole rows, by their places among its own; the longest runs of them."""
    def found() -> tuple[slice, ...]:
        rows = _is_whole(plan)[plan.positions(rank)].int()
        edges = torch.diff(rows, prepend=rows.new_zeros(1), append=rows.new_zeros(1))
        begins, ends = ((edges == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
        longest = sorted(zip(begins, ends), key=lambda run: run[0] - run[1])[:_MOST_RUNS]
        return tuple(slice(begin, end) for begin, end in sorted(longest))

    made: tuple[slice, ...] = plan.memo.value(("whole rows", rank), found)
    return made


def shared_rows(plan: Plan, rank: int, device: Any = "cpu") -> Tensor:
    """(n) int64, ascending: the rank's other rows."""
    def found() -> Tensor:
        is_shared = torch.ones(plan.rows(rank), dtype=torch.bool)
        for run in runs(plan, rank):
            is_shared[run] = False
        return is_shared.nonzero()[:, 0]

    return plan.memo.tensor(("shared rows", rank), device, found)


def shared_keys(plan: Plan, rank: int, device: Any = "cpu") -> Tensor:
    """(n) int64, ascending: the positions of the keys that a call of the shared rows has, which are
    their own and all that the rank receives."""
    def found() -> Tensor:
        own = plan.positions(rank)[shared_rows(plan, rank)]
        received = [plan.positions(other)[plan.needed.rows(rank, other)]
                    for other in range(plan.world_size) if other != rank]
        return torch.cat([own, *received]).sort().values

    return plan.memo.tensor(("shared keys", rank), device, found)


def spans_of_run(plan: Plan, rank: int, run: slice, device: Any) -> Tensor:
    """(1 or B, 1 or Hq, n, 2 m) int32: what a run of whole rows sees, by places in the run."""
    return _spans(plan, ("run", rank, run.start), device, lambda: (
        plan.positions(rank)[run], plan.positions(rank)[run]))


def shared_spans(plan: Plan, rank: int, device: Any) -> Tensor:
    """Likewise what the shared rows see, by places in `shared_keys`."""
    return _spans(plan, ("shared", rank), device, lambda: (
        plan.positions(rank)[shared_rows(plan, rank)], shared_keys(plan, rank)))


def _spans(plan: Plan, name: Any, device: Any, rows_and_keys: Any) -> Tensor:
    def found() -> Tensor:
        assert plan.visible.spans is not None
        rows, keys = rows_and_keys()
        return among(plan.visible.spans.index_select(-2, rows), keys.int())

    return plan.memo.tensor(("spans of", name), device, found)


def _is_whole(plan: Plan) -> Tensor:
    """(S) bool: whether one rank has all positions of a position's component."""
    def found() -> Tensor:
        component, owners = _components(plan), plan.dealt.owners
        first, last = (torch.zeros(int(component[-1]) + 1, dtype=torch.int64).scatter_reduce(
            0, component, owners, how, include_self=False) for how in ("amin", "amax"))
        return (first == last)[component]

    return plan.memo.tensor("whole positions", "cpu", found)


def _components(plan: Plan) -> Tensor:
    """(S) int64: the number of each position's component, from 0 on."""
    def found() -> Tensor:
        assert plan.visible.spans is not None
        length = plan.sizes.length
        begin, end = plan.visible.spans[..., 0::2].long(), plan.visible.spans[..., 1::2].long()
        is_empty, row = end <= begin, torch.arange(length)[:, None]
        first = torch.minimum(torch.where(is_empty, row, begin), row).amin(dim=(0, 1, 3))
        last = torch.maximum(torch.where(is_empty, row, end - 1), row).amax(dim=(0, 1, 3))
        ends = torch.zeros(length + 1, dtype=torch.int64)
        one = torch.ones(length, dtype=torch.int64)
        ends.index_add_(0, first + 1, one).index_add_(0, last + 1, -one)
        # How many rows reach from before a position to it: a component begins where none does.
        return (ends.cumsum(0)[:length] == 0).cumsum(0) - 1

    return plan.memo.tensor("components", "cpu", found)
