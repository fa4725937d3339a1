"""The value of a plan: which rows each rank has, what it sees of the others' keys, what moves."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks import integer
from ...errors import refuse
from ...mask_value import Mask
from . import costs, heads, plan_names, report
from .dealing import Blocks, contiguous
from .dealt_rows import BLOCK, DealtRows
from .memo import AcceptedCalls, Memo
from .needed_keys import NeededKeys
from .ranks import AnyRanks, Group, ranks_of
from .visibility import plain
from .visible_keys import VisibleKeys


class Sizes(NamedTuple):
    """Of the tensors that a plan is made for. element_bytes is the size of one element of q."""

    length: int
    batch: int
    heads_q: int
    heads_kv: int
    head_size: int
    head_size_v: int
    element_bytes: int

    @property
    def sum_bytes(self) -> int:
        """The size of an element in which gradients are summed: float32, or float64."""
        return max(4, self.element_bytes)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """How the rows of one sequence are spread over ranks. `plan` makes it; print it.

    It holds no process group and no device, and is the same value on every rank. Rows are dealt in
    blocks of 128 rows of the whole sequence, the last of which may be shorter. A rank's rows are
    its blocks in ascending order: row i is row `first_positions(rank)[i // 128] + i % 128` of the
    sequence. A rank may have no rows. Tensors that it returns are its own, and not to be changed.

    Attributes:
        sizes: of the whole tensors: length, batch, heads and head sizes, bytes of an element.
        world_size: how many ranks there are.
        visible: which pairs are visible; its `mask` is the plan's.
        scheme: "gather", "halo", "ulysses" or "ring"; with two levels "ulysses+" and another one.
        dealing: "contiguous", "contiguous by area", "zigzag", "documents" or "greedy".
        blocks: the numbers of each rank's blocks.
        moves_all: gather: whether every rank receives all keys, or those that its rows see.
        reasons: why, as sentences.
        name: equal for equal plans; by it a compiled program finds the plan.
        nodes: with two levels the plan among nodes, of their rows; else None.
        ranks_per_node: with two levels; else None.
        moves_long: whether receiving takes so long, by the rates that the plan was made for, that
            gather and halo hide it on GPUs: `overlap` of `attention`.
        has_whole_documents: gather and halo: whether a quarter of the visible pairs is of documents
            that are whole on a rank.
        memo: what was made once for it.
        accepted_calls: what was checked.
    """

    sizes: Sizes
    world_size: int
    visible: VisibleKeys
    scheme: str
    dealing: str
    blocks: Blocks
    moves_all: bool = True
    reasons: tuple[str, ...] = ()
    name: str = ""
    nodes: Plan | None = None
    ranks_per_node: int | None = None
    moves_long: bool = False
    has_whole_documents: bool = False
    memo: Memo = field(default_factory=Memo, init=False)
    accepted_calls: AcceptedCalls = field(default_factory=AcceptedCalls, init=False)

    @property
    def mask(self) -> Mask | None:
        """A Mask with row_spans, causal and window; None shows every pair."""
        return self.visible.mask

    # --------------------------------------------------------------------------------------- rows

    @cached_property
    def dealt(self) -> DealtRows:
        """Which rows each rank has."""
        return DealtRows(self.sizes.length, self.blocks)

    def rows(self, rank: int) -> int:
        """How many rows of the sequence the rank has."""
        self._require_rank(rank)
        return self.dealt.counts[rank]

    def positions(self, rank: int, device: Any = "cpu") -> Tensor:
        """(rows) int64, ascending: the row of the sequence that each local row is, for rotary
        embeddings and the like."""
        self._require_rank(rank)
        return self.dealt.positions(rank, device)

    def first_positions(self, rank: int, device: Any = "cpu") -> Tensor:
        """(ceil(rows / 128)) int32: the position of the first row of each block of the rank."""
        self._require_rank(rank)
        return self.dealt.first_positions(rank, device)

    def is_for_all_rows(self, x: Tensor) -> bool:
        """Whether a rank's bias, mask or spans (..., rows, n) broadcast over rows. False on every
        rank where some rank has one row only: that rank could not tell."""
        return (x.dim() < 2 or x.shape[-2] == 1) and 1 not in self.dealt.counts

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """The rank's rows of a whole tensor, a differentiable copy. Errors: InvalidArgument where x
        has another number of rows along dim."""
        if x.shape[dim] != self.sizes.length:
            raise refuse("x", f"a tensor of shape {tuple(x.shape)}",
                         f"must have {self.sizes.length} rows along dim {dim}")
        return x.index_select(dim, self.positions(rank, x.device))

    def unshard(self, local: Tensor, group: Group, dim: int) -> Tensor:
        """The whole tensor on every rank, from the rows of each; it carries no gradient.

        A collective: every rank calls it with its rows, of one shape apart from their number, and
        of one type. Errors: InvalidArgument for other ranks or rows, before anything is sent.
        """
        ranks = ranks_of(group, self.world_size, self.ranks_per_node)
        ranks.require_size(self.world_size)
        if local.shape[dim] != self.rows(ranks.rank):
            raise refuse("local", f"a tensor of shape {tuple(local.shape)}",
                         f"rank {ranks.rank} has {self.rows(ranks.rank)} rows, along dim {dim}")
        rows_first = local.detach().movedim(dim, 0)
        return self.begin_gathered(ranks, rows_first)().movedim(0, dim).contiguous()

    def begin_gathered(self, ranks: AnyRanks, rows: Tensor, wanted: Tensor | None = None
                       ) -> Callable[[], Tensor]:
        """(length, ...) of each rank's (rows, ...), in the order of the sequence, begun; the result
        waits for it. wanted: (n) int64, the rows of the sequence that it returns; None is all."""
        most, padded = max(self.dealt.counts), rows
        if len(rows) < most:
            padded = rows.new_zeros((most, *rows.shape[1:]))
            padded[:len(rows)] = rows
        places = self.dealt.places(rows.device)
        places = places if wanted is None else places.index_select(0, wanted)
        coming = ranks.begin_all_gather(padded)
        return lambda: coming().index_select(0, places)

    def _require_rank(self, rank: int) -> None:
        integer("rank", rank, 0, self.world_size - 1)

    # --------------------------------------------------------------------------------------- keys

    @cached_property
    def needed(self) -> NeededKeys:
        """Which keys each rank needs of which rank."""
        return NeededKeys(self.dealt, self.visible, self.moves_all)

    def keys(self, rank: int, device: Any = "cpu") -> Tensor:
        """(n) int64, ascending: the positions of the keys that the rank's call has with "gather"
        and "halo". Every key that some row of the rank sees is among them."""
        self._require_rank(rank)
        return self.needed.positions(rank, device)

    @cached_property
    @plain
    def areas(self) -> tuple[float, ...]:
        """How many pairs are visible to the rows of each rank; with "ulysses", to its heads. The
        mean over batch entries and heads."""
        if self.nodes is not None and self.ranks_per_node is not None:
            dealt = heads.dealt(self.sizes.heads_q, self.ranks_per_node)
            return tuple(area * len(own) / self.sizes.heads_q
                         for area in self.nodes.areas for own in dealt)
        rows = self.visible.row_areas
        if self.scheme == "ulysses":
            dealt = heads.dealt(self.sizes.heads_q, self.world_size)
            return tuple(float(rows.sum()) * len(own) / self.sizes.heads_q for own in dealt)
        sums = torch.zeros(self.world_size, dtype=torch.float64)
        return tuple(sums.index_add_(0, self.dealt.owners, rows).tolist())

    @property
    def balance(self) -> float:
        """The largest of `areas` over their mean: 1 where the work is spread evenly."""
        total = sum(self.areas)
        return max(self.areas) * self.world_size / total if total else 1.0

    def moved(self, rank: int) -> costs.Moved:
        """The bytes that the rank receives in one forward and in one backward pass."""
        return costs.moved(self, rank)

    # ------------------------------------------------------------------------------------- levels

    def within_node(self, node: int) -> Plan:
        """How a node's ranks exchange heads: its rows, as if they were a sequence."""
        assert self.nodes is not None and self.ranks_per_node is not None
        rows, ranks = self.nodes.rows(node), self.ranks_per_node

        def found() -> Plan:
            blocks = contiguous(-(-rows // BLOCK), ranks)
            return Plan(self.sizes._replace(length=rows), ranks, VisibleKeys(None, rows), "ulysses",
                        "contiguous", blocks)

        made: Plan = self.memo.value(("within node", rows), found)
        return made

    # --------------------------------------------------------------------------------- as a value

    def explain(self) -> str:
        """The rows, bytes and visible pairs of each rank, the balance, the scheme and why."""
        return report.text(self)

    def named(self, moves_long: bool, has_whole_documents: bool) -> Plan:
        """This plan, once all else of it is known, with its digest as its name."""
        object.__setattr__(self, "moves_long", moves_long)
        object.__setattr__(self, "has_whole_documents", has_whole_documents)
        object.__setattr__(self, "name", self.digest.hex())
        plan_names.remember(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.name:
            plan_names.remember(self)

    def __repr__(self) -> str:
        return f"Plan({report.title(self)})"

    def __str__(self) -> str:
        return self.explain()

    @cached_property
    def digest(self) -> bytes:
        """Equal for plans that make the same calls; ranks compare it."""
        spans = self.visible.spans
        facts = repr((self.sizes, self.world_size, self.scheme, self.blocks, self.moves_all,
                      self.ranks_per_node, self.nodes and self.nodes.moves_all, self.moves_long,
                      None if spans is None else tuple(spans.shape)))
        found = hashlib.sha256(facts.encode())
        if spans is not None:
            spans = spans.contiguous()
            found.update(ctypes.string_at(spans.data_ptr(), 4 * spans.numel()))
        return found.digest()[:16]
