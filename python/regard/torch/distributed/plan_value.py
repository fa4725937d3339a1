"""The value of a plan: which rows each rank has, what it sees of the others' keys, what moves."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ...checks import integer, shown
from ...errors import refuse
from ...mask_value import Mask
from ...masks.band import band_of, options_of
from . import costs, heads, report
from .dealing import Blocks, contiguous
from .ranks import AnyRanks, Group, ranks_of
from .visibility import among, blocks_seen, plain, rows_areas, spans_of

BLOCK = 128  # rows that are dealt together
_MOST_CALLS = 256  # whose checks are remembered
OTHERS = -1  # in place of an owner: all ranks but the one that asks


_named: WeakSet[Plan] = WeakSet()  # those that have a name
_naming = Lock()  # of the set: a thread may make a plan while another one looks for its own


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
        mask: which pairs are visible, a Mask with row_spans, causal and window; None is every pair.
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
    """

    sizes: Sizes
    world_size: int
    mask: Mask | None
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
    _of_mask: dict[str, Any] = field(default_factory=dict)  # shared by plans of one mask
    _of_nodes: dict[int, Plan] = field(default_factory=dict, init=False)
    _on_device: dict[Any, Tensor] = field(default_factory=dict, init=False)
    _values: dict[Any, Any] = field(default_factory=dict, init=False)
    accepted_calls: dict[Any, Any] = field(default_factory=dict, init=False)  # what was checked

    # --------------------------------------------------------------------------------------- rows

    def rows(self, rank: int) -> int:
        """How many rows of the sequence the rank has."""
        self._require_rank(rank)
        return self.row_counts[rank]

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """`rows` of all ranks."""
        last = -(-self.sizes.length // BLOCK) - 1
        short = (last + 1) * BLOCK - self.sizes.length
        return tuple(len(blocks) * BLOCK - (short if blocks and blocks[-1] == last else 0)
                     for blocks in self.blocks)

    def positions(self, rank: int, device: Any = "cpu") -> Tensor:
        """(rows) int64, ascending: the row of the sequence that each local row is, for rotary
        embeddings and the like."""
        self._require_rank(rank)
        return self.kept(("positions", rank), device, lambda: self._rows_of(self.blocks[rank]))

    def first_positions(self, rank: int, device: Any = "cpu") -> Tensor:
        """(ceil(rows / 128)) int32: the position of the first row of each block of the rank."""
        self._require_rank(rank)
        return self.kept(("first positions", rank), device,
                         lambda: self.positions(rank)[::BLOCK].int())

    def keys(self, rank: int, device: Any = "cpu") -> Tensor:
        """(n) int64, ascending: the positions of the keys that the rank's call has with "gather"
        and "halo". Every key that some row of the rank sees is among them."""
        self._require_rank(rank)
        return self.kept(("keys", rank), device,
                         lambda: self._rows_of(self._needs[rank].nonzero()[:, 0].tolist()))

    def is_for_all_rows(self, x: Tensor) -> bool:
        """Whether a rank's bias, mask or spans (..., rows, n) broadcast over rows. False on every
        rank where some rank has one row only: that rank could not tell."""
        return (x.dim() < 2 or x.shape[-2] == 1) and 1 not in self.row_counts

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
        return self.gathered(ranks, rows_first).movedim(0, dim).contiguous()

    def gathered(self, ranks: AnyRanks, rows: Tensor) -> Tensor:
        """(length, ...) of each rank's (rows, ...), in the order of the sequence."""
        return self.begin_gathered(ranks, rows)()

    def begin_gathered(self, ranks: AnyRanks, rows: Tensor, wanted: Tensor | None = None
                       ) -> Callable[[], Tensor]:
        """The same, begun; the result waits for it. wanted: (n) int64, the rows of the sequence
        that it returns; None is all of them."""
        most, padded = max(self.row_counts), rows
        if len(rows) < most:
            padded = rows.new_zeros((most, *rows.shape[1:]))
            padded[:len(rows)] = rows

        def places() -> Tensor:
            found = torch.empty(self.sizes.length, dtype=torch.int64)
            for rank in range(self.world_size):
                found[self.positions(rank)] = rank * most + torch.arange(self.rows(rank))
            return found

        found = self.kept("places", rows.device, places)
        found = found if wanted is None else found.index_select(0, wanted)
        coming = ranks.begin_all_gather(padded)
        return lambda: coming().index_select(0, found)

    def _rows_of(self, blocks: Any) -> Tensor:
        first = torch.tensor(list(blocks), dtype=torch.int64)[:, None] * BLOCK
        rows = (first + torch.arange(BLOCK)).flatten()
        return rows[rows < self.sizes.length]

    def _require_rank(self, rank: int) -> None:
        integer("rank", rank, 0, self.world_size - 1)

    # --------------------------------------------------------------------------------- visibility

    @cached_property
    @plain
    def spans(self) -> Tensor | None:
        """(1 or B, 1 or Hq, S, 2 n) int32: the keys that each row sees; None is every key."""
        mask = self.mask
        return None if mask is None else self._made_once("spans", lambda: spans_of(mask))

    @property
    def row_areas(self) -> Tensor:
        """(S) float64: how many keys each row sees, the mean over batch entries and heads."""
        return self._made_once("areas", lambda: rows_areas(self.spans, self.sizes.length))

    def _made_once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._of_mask:
            self._of_mask[name] = make()
        found: Tensor = self._of_mask[name]
        return found

    @cached_property
    @plain
    def areas(self) -> tuple[float, ...]:
        """How many pairs are visible to the rows of each rank; with "ulysses", to its heads. The
        mean over batch entries and heads."""
        if self.nodes is not None and self.ranks_per_node is not None:
            dealt = heads.dealt(self.sizes.heads_q, self.ranks_per_node)
            return tuple(area * len(own) / self.sizes.heads_q
                         for area in self.nodes.areas for own in dealt)
        rows = self.row_areas
        if self.scheme == "ulysses":
            dealt = heads.dealt(self.sizes.heads_q, self.world_size)
            return tuple(float(rows.sum()) * len(own) / self.sizes.heads_q for own in dealt)
        sums = torch.zeros(self.world_size, dtype=torch.float64)
        return tuple(sums.index_add_(0, self.owners, rows).tolist())

    @property
    def owners(self) -> Tensor:
        """(S) int64: the rank that has each row."""
        return self._block_owners.repeat_interleave(BLOCK)[:self.sizes.length]

    @property
    def _block_owners(self) -> Tensor:
        """(blocks) int64."""
        found = torch.empty(sum(map(len, self.blocks)), dtype=torch.int64)
        for rank, blocks in enumerate(self.blocks):
            found[list(blocks)] = rank
        return found

    @cached_property
    @plain
    def area_of_blocks(self) -> list[float]:
        """How many pairs are visible to the rows of each block."""
        padded = torch.zeros(-(-self.sizes.length // BLOCK) * BLOCK, dtype=torch.float64)
        padded[:self.sizes.length] = self.row_areas
        found: list[float] = padded.reshape(-1, BLOCK).sum(1).tolist()
        return found

    @cached_property
    @plain
    def documents(self) -> list[int] | None:
        """For each block the first key that its last row sees, the length where it sees none; where
        neighbouring blocks mostly share it, as those of a packed document do; else None."""
        if self.spans is None or self.spans.shape[:2] != (1, 1):
            return None
        last = torch.arange(BLOCK, self.sizes.length + BLOCK, BLOCK).clamp(max=self.sizes.length) - 1
        spans = self.spans[0, 0, last]
        first = spans[:, 0].where(spans[:, 0] < spans[:, 1], self.sizes.length)
        if 2 * int((first.diff() != 0).sum()) >= len(first):
            return None
        labels: list[int] = first.tolist()
        return labels

    @property
    def balance(self) -> float:
        """The largest of `areas` over their mean: 1 where the work is spread evenly."""
        total = sum(self.areas)
        return max(self.areas) * self.world_size / total if total else 1.0

    @cached_property
    @plain
    def sees(self) -> Tensor:
        """(ranks, blocks) bool: whether some row of the rank sees some key of the block."""
        return blocks_seen(self.spans, self.owners, self.world_size, self.sizes.length, BLOCK)

    @plain
    def sees_rank(self, rank: int, other: int) -> bool:
        """Whether some row of the rank sees some key of the other rank."""
        return bool(self.sees[rank, list(self.blocks[other])].any())

    def needed_rows(self, rank: int, owner: int, device: Any = "cpu") -> Tensor:
        """(n) int64, ascending: which local rows of the owner are among `keys` of the rank."""
        def found() -> Tensor:
            is_needed = self._needs[rank].index_select(0, self.positions(owner) // BLOCK)
            return is_needed.nonzero()[:, 0]

        return self.kept(("needed", rank, owner), device, found)

    @cached_property
    @plain
    def needed_counts(self) -> Tensor:
        """(ranks, owners) int64: how many `needed_rows` there are."""
        owners = self._block_owners
        sizes = torch.full_like(owners, BLOCK)
        sizes[-1] -= len(owners) * BLOCK - self.sizes.length
        counts = torch.zeros(self.world_size, self.world_size, dtype=torch.int64)
        return counts.index_add_(1, owners, self._needs * sizes)

    @cached_property
    @plain
    def keys_moved(self) -> tuple[list[int], list[int]]:
        """For each rank, how many keys of others it needs, and how many times others need its own
        keys."""
        others = self.needed_counts.clone().fill_diagonal_(0)
        return others.sum(1).tolist(), others.sum(0).tolist()

    @property
    def _needs(self) -> Tensor:
        """(ranks, blocks) bool: the blocks of `keys`."""
        return torch.ones_like(self.sees) if self.moves_all else self.sees

    @plain
    def part(self, rank: int, owner: int | None, device: Any, filled: bool = False
             ) -> Tensor | None:
        """The positions of the keys that a call of the rank has: those of one owner, with OTHERS
        those of `keys` that are not its own, or with None those of `keys`. None for the whole
        sequence. filled: with None also the positions between them, at which nothing is visible."""
        if owner == OTHERS:
            return self.kept(("keys of others", rank), device, lambda: self._rows_of(
                (self._needs[rank] & (self._block_owners != rank)).nonzero()[:, 0].tolist()))
        if owner is not None:
            return self.positions(owner, device)
        if self.moves_all:
            return None
        keys = self.keys(rank, device)
        if not filled or not len(keys):
            return keys
        whole = self.keys(rank)
        return torch.arange(int(whole[0]), int(whole[-1]) + 1, device=device)

    def spans_of_part(self, rank: int, owner: int | None, device: Any, filled: bool = False
                      ) -> Tensor | None:
        """(1 or B, 1 or Hq, rows, 2 n) int32: what the rank's rows see of `part`, by the places of
        keys in it. None is every key."""
        if self.spans is None:
            return None

        def found() -> Tensor:
            assert self.spans is not None
            spans = self.spans.index_select(-2, self.positions(rank))
            keys = self.part(rank, owner, "cpu", filled)
            return spans if keys is None else among(spans, keys.int())

        return self.kept(("spans", rank, owner, filled), device, found)

    def first_if_adjacent(self, rank: int, owner: int | None, filled: bool, rows: slice
                          ) -> int | None:
        """The position of the first key of `rows` of `part`, where they follow each other in the
        sequence; 0 where there are none."""
        keys = self.part(rank, owner, "cpu", filled)
        if keys is None:
            return rows.start or 0
        keys = keys[rows]
        if not len(keys):
            return 0
        first, last = int(keys[0]), int(keys[-1])
        return first if last - first + 1 == len(keys) else None

    @cached_property
    def band(self) -> dict[str, Any] | None:
        """causal and window of a mask that is nothing else; None for another mask, and for none."""
        if self.mask is None or self.mask.row_spans is not None:
            return None
        return options_of(band_of(self.mask), self.sizes.length, self.sizes.length)

    def runs(self, rank: int) -> list[slice]:
        """The rank's rows, cut where the sequence goes on at another rank."""
        blocks = self.blocks[rank]
        cuts = [n for n in range(1, len(blocks)) if blocks[n] != blocks[n - 1] + 1]
        ends = [min(n * BLOCK, self.rows(rank)) for n in (0, *cuts, len(blocks))]
        return [slice(begin, end) for begin, end in zip(ends, ends[1:])]

    # ------------------------------------------------------------------------------------- levels

    def within_node(self, node: int) -> Plan:
        """How a node's ranks exchange heads: its rows, as if they were a sequence."""
        assert self.nodes is not None and self.ranks_per_node is not None
        rows = self.nodes.rows(node)
        if rows not in self._of_nodes:
            blocks = contiguous(-(-rows // BLOCK), self.ranks_per_node)
            self._of_nodes[rows] = Plan(self.sizes._replace(length=rows), self.ranks_per_node, None,
                                        "ulysses", "contiguous", blocks)
        return self._of_nodes[rows]

    # -------------------------------------------------------------------------------------- other

    def moved(self, rank: int) -> costs.Moved:
        """The bytes that the rank receives in one forward and in one backward pass."""
        return costs.moved(self, rank)

    def explain(self) -> str:
        """The rows, bytes and visible pairs of each rank, the balance, the scheme and why."""
        return report.text(self)

    @staticmethod
    def of_name(name: str) -> Plan:
        """The plan whose `name` this is. Errors: InvalidArgument where there is none any more."""
        with _naming:
            found = next((plan for plan in _named if plan.name == name), None)
        if found is None:
            raise refuse("plan", shown(name), "is not a plan of this process: a compiled program "
                         "needs the plan that it was compiled with, or an equal one, to be there")
        return found

    def named(self, moves_long: bool, has_whole_documents: bool) -> Plan:
        """This plan, once all else of it is known, with a name by which `of_name` finds it as long
        as it lives: its digest."""
        object.__setattr__(self, "moves_long", moves_long)
        object.__setattr__(self, "has_whole_documents", has_whole_documents)
        object.__setattr__(self, "name", self.digest.hex())
        with _naming:
            _named.add(self)
        return self

    def accept(self, key: Any, call: Any) -> None:
        """Keeps what `prepared` made of a call whose arguments were right."""
        if len(self.accepted_calls) >= _MOST_CALLS:
            self.accepted_calls.clear()
        self.accepted_calls[key] = call

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_on_device": {}, "_values": {}, "accepted_calls": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.name:
            with _naming:
                _named.add(self)

    def __repr__(self) -> str:
        return f"Plan({report.title(self)})"

    def __str__(self) -> str:
        return self.explain()

    @cached_property
    def digest(self) -> bytes:
        """Equal for plans that make the same calls; ranks compare it."""
        facts = repr((self.sizes, self.world_size, self.scheme, self.blocks, self.moves_all,
                      self.ranks_per_node, self.nodes and self.nodes.moves_all, self.moves_long,
                      None if self.spans is None else tuple(self.spans.shape)))
        found = hashlib.sha256(facts.encode())
        if self.spans is not None:
            spans = self.spans.contiguous()
            found.update(ctypes.string_at(spans.data_ptr(), 4 * spans.numel()))
        return found.digest()[:16]

    def kept(self, name: Any, device: Any, make: Any) -> Tensor:
        """What `make` returns, on a device, made once."""
        key = name, str(device)
        if key not in self._on_device:
            self._on_device[key] = plain(lambda: make().to(device))()
        return self._on_device[key]

    def kept_value(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once; not to be changed, and no tensor of a GPU: `kept` copies
        those when no stream is in between."""
        if key not in self._values:
            self._values[key] = plain(make)()
        return self._values[key]
