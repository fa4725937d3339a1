"""What a call's rows see as packed sequences, where spans say the same: kernels then know where each
sequence ends, and need no map of tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .plan_value import Plan


class Cuts(NamedTuple):
    """cu_seqlens of rows and of keys, (n + 1) int32 on the CPU; the longest sequence of each; whether
    rows see keys up to the one that is as far from the end of their sequence."""

    q: Tensor
    k: Tensor
    most_q: int
    most_k: int
    is_causal: bool


def options_of(plan: Plan, name: Any, spans: Callable[[Any], Tensor], keys: int, device: Any
               ) -> dict[str, Any]:
    """Options of a call with one batch entry, without bias and mask, whose rows see these spans, of so
    many keys.

    name: of the spans, for which cuts are kept. spans: gives them on a device."""
    cuts: Cuts | None = plan.memo.value(("cuts", name), lambda: cuts_of(spans("cpu"), keys))
    if cuts is None:
        return {"row_spans": spans(device)}
    q, k = (plan.memo.tensor(("cuts of", which, name), device, lambda: found)
            for which, found in (("q", cuts.q), ("k", cuts.k)))
    return {"cu_seqlens_q": q, "cu_seqlens_k": k, "max_seqlen_q": cuts.most_q,
            "max_seqlen_k": cuts.most_k, "causal": "bottom_right" if cuts.is_causal else "none"}


def options_of_part(plan: Plan, rank: int, owner: int | None, device: Any) -> dict[str, Any]:
    """Those of a call over `plan.part`, of a plan with spans."""
    def spans(on: Any) -> Tensor:
        found = plan.needed.spans_of_part(rank, owner, on)
        assert found is not None
        return found

    keys = plan.needed.part(rank, owner, "cpu")
    count = plan.sizes.length if keys is None else len(keys)
    return options_of(plan, ("part", rank, owner), spans, count, device)


def cuts_of(spans: Tensor, keys: int) -> Cuts | None:
    """(1 or B, 1 or Hq, rows, 2 n) spans of so many keys as packed sequences; None where they are not
    those of any."""
    if spans.shape[:2] != (1, 1) or spans.shape[-1] != 2 or not spans.shape[2]:
        return None
    begin, end = spans[0, 0].long().unbind(-1)
    for is_causal in (False, True):
        found = _sequences(begin, end, keys, is_causal)
        if found is not None:
            q, k = (torch.tensor(places, dtype=torch.int32) for places in found)
            return Cuts(q, k, int(q.diff().max()), int(k.diff().max()), is_causal)
    return None


def _sequences(begin: Tensor, end: Tensor, keys: int, is_causal: bool
               ) -> tuple[list[int], list[int]] | None:
    """Where sequences end among rows and among keys, from 0 on. Rows that see nothing are sequences
    without keys, and keys that no row sees are sequences without rows."""
    sees = end > begin
    goes_on = (begin[1:] == begin[:-1]) & (end[1:] == end[:-1] + int(is_causal))
    goes_on = torch.where(sees[1:] & sees[:-1], goes_on, ~sees[1:] & ~sees[:-1])
    first = torch.cat([torch.zeros(1, dtype=torch.int64), (~goes_on).nonzero()[:, 0] + 1])
    last = torch.cat([first[1:], torch.tensor([len(begin)])]) - 1
    seen = sees[first]
    if (begin[first[seen]][1:] < end[last[seen]][:-1]).any():
        return None
    q, k = [0], [0]
    for row, sees_some, key, stop in zip((last + 1).tolist(), seen.tolist(),
                                         begin[first].tolist(), end[last].tolist()):
        if sees_some and key > k[-1]:
            q.append(q[-1])
            k.append(key)
        q.append(row)
        k.append(stop if sees_some else k[-1])
    if k[-1] < keys:
        q.append(q[-1])
        k.append(keys)
    return q, k
