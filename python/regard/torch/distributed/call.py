"""One call of one rank: its tensors, its options, and which gradients are wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .plan_value import Plan
from .visibility import plain


T = TypeVar("T")
Kept = tuple[Tensor | None, ...]  # what forward keeps for backward


class Tensors(NamedTuple):
    """Of one rank: (B, H, rows, D), and what broadcasts to (B, Hq, rows, keys); None if absent."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None
    mask: Tensor | None
    row_spans: Tensor | None
    alibi_slopes: Tensor | None


class Pair(NamedTuple):
    """Of keys and of values, (B, Hkv, n, D) and (B, Hkv, n, Dv): these, their gradients or sums."""

    k: Tensor
    v: Tensor


class Wanted(NamedTuple):
    """Which gradients autograd needs."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sink: bool

    @property
    def keys(self) -> bool:
        return self.k or self.v


@dataclass(frozen=True)
class Call:
    """What does not change between forward and backward.

    options: scale, softcap, precision, deterministic and those of dropout, as `regard.attention`
    takes them. by_position: whether local calls have to know where their rows and keys stand.
    return_lse: whether the caller sees the lse. where: threads and backend.
    overlaps: gather and halo: what is computed while keys of others arrive: "heads": heads whose
    keys are there; "keys": own keys; "documents": rows of whole documents; "": nothing.
    sums_sink: whether the sink's gradient is summed over the ranks.
    wide_sums: whether gradients of keys keep the type of sums, because more is added to them.
    cache: shared by the calls of a plan on this rank that have equal shapes, types and options.
    """

    plan: Plan
    ranks: Any  # Ranks; with two levels NodeRanks
    options: dict[str, Any]
    by_position: bool
    where: dict[str, Any]
    out_type: torch.dtype | None
    return_lse: bool
    sums_sink: bool
    overlaps: str
    wide_sums: bool = False
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def of(self, plan: Plan, ranks: Any, options: dict[str, Any]) -> Call:
        """The same with these; dataclasses.replace takes several times as long."""
        return Call(plan, ranks, options, self.by_position, self.where, self.out_type,
                    self.return_lse, self.sums_sink, self.overlaps, self.wide_sums, self.cache)

    def kept(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returns, made once for all calls with these shapes, types and options."""
        if key not in self.cache:
            self.cache[key] = plain(make)()
        found: T = self.cache[key]
        return found


def sums_type(x: Tensor) -> torch.dtype:
    """The type in which partial results of x are kept: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)
