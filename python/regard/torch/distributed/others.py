"""Rows of other ranks: how keys that a rank's rows see arrive, and how sums for them return.

Rows travel in the order of their owners, own rows not at all. `among` says where they belong: the
ascending positions of the keys that a call has, None for the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import call_keys, key_rows
from .call import Call, Tensors
from .copies import copy
from .runs import neighbours, placed

MOST_PIECES = 16  # of rows, each of which is copied by itself


def begin_keys(call: Call, tensors: Tensors) -> Callable[[], Tensor]:
    """Sends own keys and values to the ranks whose rows see them; the result waits for those of
    others, (keys, B, Hkv, D + Dv)."""
    plan, rank, device = call.plan, call.ranks.rank, tensors.k.device
    sent = plan.memo.tensor(("sent to others", rank), device, lambda: joined(
        plan.needed.rows(other, rank) for other in range(plan.world_size) if other != rank))
    rows = key_rows.packed(*(x.index_select(2, sent) for x in (tensors.k, tensors.v)))
    coming: Callable[[], Tensor] = call.ranks.begin_all_to_all(rows, *_counts(call))
    return coming


def begin_sums(call: Call, sums: Tensor, among: Tensor | None, name: str) -> Callable[[], Tensor]:
    """Sends sums for keys of others, of (keys, ...), to their owners; the result waits for those of
    others for own keys."""
    given, taken = _counts(call)
    rows = sums.index_select(0, places(call, among, name, sums.device))
    coming: Callable[[], Tensor] = call.ranks.begin_all_to_all(rows, taken, given)
    return coming


def by_rank(call: Call, came: Tensor) -> tuple[Tensor, ...]:
    """What came from each rank."""
    return torch.split(came, _counts(call)[0])


def add_sums(call: Call, total: Tensor, came: Sequence[Tensor | None], dim: int = 0) -> None:
    """Adds to own sums those of others, in the order of ranks. dim: the axis of rows."""
    plan, rank = call.plan, call.ranks.rank
    for other, part in enumerate(came):
        if part is None or not part.shape[dim]:
            continue
        if part.shape[dim] == total.shape[dim]:
            total += part
        else:
            total.index_add_(dim, plan.needed.rows(other, rank, total.device), part)


def places(call: Call, among: Tensor | None, name: str, device: Any) -> Tensor:
    """For each row that comes from others its place. name: of what `among` is, for which this is
    kept."""
    plan, rank = call.plan, call.ranks.rank

    def found() -> Tensor:
        came = joined(plan.positions(other)[plan.needed.rows(rank, other)]
                      for other in range(plan.world_size) if other != rank)
        return placed(among, came)

    return plan.memo.tensor(("places of others", rank, name), device, found)


def put_own(call: Call, tensors: Tensors, rows: Tensor, name: str) -> None:
    """Copies those own keys and values that own rows see to their places in `rows`."""
    size = tensors.k.shape[-1]
    runs = own_runs(call, name)
    if len(runs) > MOST_PIECES:
        own, to = own_places(call, name, rows.device)
        rows.index_copy_(0, to, key_rows.packed(*(x.index_select(2, own) for x in (tensors.k, tensors.v))))
        return
    for first, place, count in runs:
        for x, to in zip((tensors.k, tensors.v), key_rows.unpacked(rows[place:place + count], size)):
            copy(to, x[:, :, first:first + count])


def own_places(call: Call, name: str, device: Any) -> tuple[Tensor, Tensor]:
    """(n): own rows whose keys are among those of this name, and their places."""
    plan, rank = call.plan, call.ranks.rank
    own = call_keys.own_rows(plan, rank, name, device)
    return own, plan.memo.tensor(("places of own", rank, name), device, lambda: placed(
        call_keys.positions(plan, rank, name),
        plan.positions(rank)[call_keys.own_rows(plan, rank, name)]))


def own_runs(call: Call, name: str) -> tuple[tuple[int, int, int], ...]:
    """Neighbouring ones of `own_places`: the first row, its place, how many they are."""
    def found() -> tuple[tuple[int, int, int], ...]:
        own, to = own_places(call, name, "cpu")
        return tuple((int(own[begin]), int(to[begin]), end - begin)
                     for begin, end in neighbours(own, to))

    made: tuple[tuple[int, int, int], ...] = call.plan.memo.value(
        ("runs of own", call.ranks.rank, name), found)
    return made


def _counts(call: Call) -> tuple[list[int], list[int]]:
    """How many own rows each other rank needs, and how many of its rows this one needs."""
    def found() -> tuple[list[int], list[int]]:
        counts, rank = call.plan.needed.counts.clone().fill_diagonal_(0), call.ranks.rank
        return counts[:, rank].tolist(), counts[rank].tolist()

    made: tuple[list[int], list[int]] = call.plan.memo.value(("counts", call.ranks.rank), found)
    return made


def joined(parts: Any) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
