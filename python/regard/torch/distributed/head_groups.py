"""Calls over some heads at a time, so that keys of the next heads arrive while these are computed.

Heads do not depend on each other: results are those of one call, on the CPU to the bit. The first
group of a pass waits for its keys, and in backward the last one for its sums, so these are small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...gradients import Gradients
from . import call_keys
from .call import Call, Pair, Tensors
from .dealt_rows import BLOCK

_BUSY = 256  # tiles of 128 rows, which two for each multiprocessor of an H100 nearly are; of 128 keys
# twice as many, because their work differs more


class Group(NamedTuple):
    """Some heads of a call: query heads q, and heads of keys kv. first: where dropout counts heads;
    None for all heads of the call."""

    q: slice
    kv: slice
    first: int | None

    def of(self, tensors: Tensors) -> Tensors:
        """These heads of all tensors."""
        if self.first is None:
            return tensors
        sink, slopes = (None if x is None else x[..., self.q]
                        for x in (tensors.sink, tensors.alibi_slopes))
        bias, mask, spans = (None if x is None else self._of_scores(x)
                             for x in (tensors.bias, tensors.mask, tensors.row_spans))
        return Tensors(tensors.q[:, self.q], tensors.k[:, self.kv], tensors.v[:, self.kv], bias, sink,
                       mask, spans, slopes)

    def results(self, *results: Tensor | None) -> tuple[Tensor | None, ...]:
        """These heads of dout, dlse, out and lse."""
        return tuple(None if x is None else x[:, self.q] for x in results)

    def gradients(self, made: Gradients, sums: Pair | None, dbias: Tensor | None) -> Gradients:
        """For a call to write to: these heads of dq and dsink; sums for its keys; its dbias."""
        dk, dv = sums or (None, None)
        return Gradients(None if made.dq is None else made.dq[:, self.q], dk, dv, dbias,
                         None if made.dsink is None else made.dsink[self.q])

    def keys(self, made: Gradients) -> Pair:
        """These heads of dk and dv."""
        return Pair(made.dk[:, self.kv], made.dv[:, self.kv])

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Those of a call over all heads, for these."""
        if self.first is None:
            return options
        found = options | {"head_begin": self.first}
        spans = options.get("row_spans")
        return found if spans is None else found | {"row_spans": self._of_scores(spans)}

    def _of_scores(self, x: Tensor) -> Tensor:
        """Of what broadcasts to (B, Hq, rows, n)."""
        return x[..., self.q, :, :] if x.dim() > 2 and x.shape[-3] > 1 else x


def forward(call: Call, tensors: Tensors) -> list[Group]:
    heads = tensors.k.shape[1]
    share, rows = tensors.q.shape[1] // heads, max(call.plan.dealt.counts)
    few = _few(call, tensors, _BUSY, share * (rows // BLOCK), heads // 4)
    return _groups(call, tensors, [few, heads - few])


def backward(call: Call, tensors: Tensors, wants_bias: bool) -> list[Group]:
    """wants_bias: its gradient may be the sum of several heads', which then are one group."""
    heads, keys = tensors.k.shape[1], max(call_keys.counts(call.plan, call_keys.name_of(call)))
    few = 0 if wants_bias else _few(call, tensors, 2 * _BUSY, keys // BLOCK, heads // 2)
    return _groups(call, tensors, [few, heads - 2 * few, few])


def _few(call: Call, tensors: Tensors, busy: int, tiles: int, most: int) -> int:
    """How many heads of keys make a small group, equal on all ranks: as many as keep a GPU busy, by
    the tiles that one has in a batch entry; but at most so many."""
    if call.overlaps != "heads" or tensors.k.shape[1] < 2:
        return 0
    return min(-(-busy // max(1, tensors.k.shape[0] * tiles)), max(1, most))


def _groups(call: Call, tensors: Tensors, counts: list[int]) -> list[Group]:
    """counts: of heads of keys; zeros do not count."""
    counts = [count for count in counts if count]
    if len(counts) <= 1:
        return [Group(slice(None), slice(None), None)]
    share, groups, begin = tensors.q.shape[1] // tensors.k.shape[1], [], 0
    for count in counts:
        q = slice(begin * share, (begin + count) * share)
        groups.append(Group(q, slice(begin, begin + count),
                            call.options.get("head_begin", 0) + q.start))
        begin += count
    return groups
