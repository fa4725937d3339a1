"""Rows of other ranks: how keys that a rank's rows see arrive, and how sums for them return.

Rows travel in the order of their owners, own rows not at all. `among` says where they belong: the
ascending positions of the keys that a call has, None for the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import call as one
from . import call_keys
from .call import Call, Tensors
from .copies import copy
from .runs import neighbours, placed

_MOST_RUNS = 16  # of own rows, each of which is copied by itself


def begin_keys(call: Call, tensors: Tensors) -> Callable[[], Tensor]:
    """Sends own keys and values to the ranks whose rows see them; the result waits for those of
    others, (keys, B, Hkv, D + Dv)."""
    plan, rank, device = call.plan, call.ranks.rank, tensors.k.device
    sent = plan.kept(("sent to others", rank), device, lambda: joined(
        plan.needed_rows(other, rank) for other in range(plan.world_size) if other != rank))
    rows = one.packed(*(x.index_select(2, sent) for x in (tensors.k, tensors.v)))
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


def add_sums(call: Call, total: Tensor, came: Sequence[Tensor]) -> Tensor:
    """Adds to own sums those of others, in the order of ranks."""
    plan, rank = call.plan, call.ranks.rank
    for other, part in enumerate(came):
        if len(part) == len(total):
            total += part
        elif len(part):
            total.index_add_(0, plan.needed_rows(other, rank, total.device), part)
    return total


def write_sums(call: Call, among: Tensor | None, name: str, into: tuple[Tensor, Tensor],
               sums: Tensor, came: Sequence[Tensor]) -> None:
    """Writes the gradients of own keys and values, (B, Hkv, rows, D and Dv): own sums, those of
    (keys, ...), and then those of others, (rows, ...), in the order of ranks."""
    rows, runs = call.plan.rows(call.ranks.rank), own_runs(call, among, name)
    pieces = [(first, sums[place:place + count]) for first, place, count in runs]
    are_whole = all(len(part) in (0, rows) for part in came)
    if len(runs) > _MOST_RUNS or sum(len(x) for _, x in pieces) < rows or not are_whole:
        pieces = [(0, add_sums(call, own_sums(call, sums, among, name), came))]
        came = []
    came = [part for part in came if len(part)]
    for first, total in pieces:
        parts = [part[first:first + len(total)] for part in came]
        for part in parts[:-1]:
            total += part
        terms = [one.unpacked(x, into[0].shape[-1]) for x in (total, *parts[-1:])]
        for to, own, *last in zip(into, *terms):
            to = to[:, :, first:first + len(total)]
            torch.add(own, *last, out=to) if last else to.copy_(own)


def places(call: Call, among: Tensor | None, name: str, device: Any) -> Tensor:
    """For each row that comes from others its place. name: of what `among` is, for which this is
    kept."""
    plan, rank = call.plan, call.ranks.rank

    def found() -> Tensor:
        came = joined(plan.positions(other)[plan.needed_rows(rank, other)]
                      for other in range(plan.world_size) if other != rank)
        return placed(among, came)

    return plan.kept(("places of others", rank, name), device, found)


def put_own(call: Call, tensors: Tensors, rows: Tensor, among: Tensor | None, name: str) -> None:
    """Copies those own keys and values that own rows see to their places in `rows`."""
    size = tensors.k.shape[-1]
    runs = own_runs(call, among, name)
    if len(runs) > _MOST_RUNS:
        own, to = _own_places(call, among, name, rows.device)
        rows.index_copy_(0, to, one.packed(*(x.index_select(2, own) for x in (tensors.k, tensors.v))))
        return
    for first, place, count in runs:
        for x, to in zip((tensors.k, tensors.v), one.unpacked(rows[place:place + count], size)):
            copy(to, x[:, :, first:first + count])


def own_sums(call: Call, sums: Tensor, among: Tensor | None, name: str) -> Tensor:
    """(own rows, ...) of sums (keys, ...), a view where they lie together; zeros for keys that no
    own row sees."""
    rows = call.plan.rows(call.ranks.rank)
    runs = own_runs(call, among, name)
    if sum(count for _, _, count in runs) == rows and len(runs) <= _MOST_RUNS:
        parts = [sums[place:place + count] for _, place, count in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else sums[:0]
    own, at = _own_places(call, among, name, sums.device)
    return sums.new_zeros((rows, *sums.shape[1:])).index_copy_(0, own, sums.index_select(0, at))


def _own_places(call: Call, among: Tensor | None, name: str, device: Any) -> tuple[Tensor, Tensor]:
    """(n): own rows that own rows see, and their places."""
    plan, rank = call.plan, call.ranks.rank
    own = call_keys.own_rows(plan, rank, name, device)
    return own, plan.kept(("places of own", rank, name), device, lambda: placed(
        among, plan.positions(rank)[call_keys.own_rows(plan, rank, name)]))


def own_runs(call: Call, among: Tensor | None, name: str) -> tuple[tuple[int, int, int], ...]:
    """Neighbouring ones of `_own_places`: the first row, its place, how many they are."""
    def found() -> tuple[tuple[int, int, int], ...]:
        own, to = _own_places(call, among, name, "cpu")
        return tuple((int(own[begin]), int(to[begin]), end - begin)
                     for begin, end in neighbours(own, to))

    made: tuple[tuple[int, int, int], ...] = call.plan.kept_value(
        ("runs of own", call.ranks.rank, name), found)
    return made


def _counts(call: Call) -> tuple[list[int], list[int]]:
    """How many own rows each other rank needs, and how many of its rows this one needs."""
    def found() -> tuple[list[int], list[int]]:
        counts, rank = call.plan.needed_counts.clone().fill_diagonal_(0), call.ranks.rank
        return counts[:, rank].tolist(), counts[rank].tolist()

    made: tuple[list[int], list[int]] = call.plan.kept_value(("counts", call.ranks.rank), found)
    return made


def joined(parts: Any) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
