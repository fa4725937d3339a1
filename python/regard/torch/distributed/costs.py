"""How many bytes a plan moves, how long a step takes by that, and which scheme takes the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from . import heads

if TYPE_CHECKING:
    from .plan_value import Plan


class Moved(NamedTuple):
    """Bytes that one rank receives from the others in a pass.

    all_gather: how many of both passes' bytes all-gathers bring. All-to-alls bring the others, with
    "ring" the rank before it. Copies between GPUs bring the same bytes, without the rows that pad
    ranks to equal numbers in an all-gather.
    """

    forward: int
    backward: int
    all_gather: int = 0


@dataclass(frozen=True)
class Bandwidth:
    """What a rank receives in a second, in bytes, while all ranks communicate."""

    all_gather: float
    all_to_all: float


# Where nothing was measured: of a GPU with NVLink, and of its part of a network.
ASSUMED_BANDWIDTH = Bandwidth(all_gather=3e11, all_to_all=3e11)
ASSUMED_NETWORK = Bandwidth(all_gather=4e10, all_to_all=4e10)
ASSUMED_FLOPS = 5e14


@dataclass(frozen=True)
class Rates:
    """What a rank receives while all communicate, and within its node while nodes do not; and what
    it computes in a second."""

    bandwidth: Bandwidth
    node_bandwidth: Bandwidth
    flops: float
    measured: bool = True  # whether the caller gave any of them


def moved(plan: Plan, rank: int) -> Moved:
    if plan.world_size == 1:
        return Moved(0, 0)
    if plan.nodes is not None:
        return _by_levels(plan, rank)
    return {"gather": _by_keys, "halo": _by_keys, "ring": _by_ring, "ulysses": _by_heads}[
        plan.scheme](plan, rank)


def _row_of_keys(plan: Plan, element_bytes: int) -> int:
    """The bytes of one key and its value, for all batch entries and heads."""
    sizes = plan.sizes
    return sizes.batch * sizes.heads_kv * (sizes.head_size + sizes.head_size_v) * element_bytes


def _by_keys(plan: Plan, rank: int) -> Moved:
    """Keys come in forward, and again in backward, after which sums for own keys come."""
    keys, sums = (of_ranks[rank] for of_ranks in plan.needed.moved)
    if plan.moves_all:  # parts of equal size, padded
        keys = (plan.world_size - 1) * max(plan.dealt.counts)
    came = keys * _row_of_keys(plan, plan.sizes.element_bytes)
    return Moved(came, came + sums * _row_of_keys(plan, plan.sizes.sum_bytes),
                 2 * came if plan.moves_all else 0)


def _by_ring(plan: Plan, rank: int) -> Moved:
    """Keys pass by; in backward with their sums, which come home at the end."""
    others = plan.sizes.length - plan.rows(rank)
    came = others * _row_of_keys(plan, plan.sizes.element_bytes)
    return Moved(came, came + plan.sizes.length * _row_of_keys(plan, plan.sizes.sum_bytes))


def _by_heads(plan: Plan, rank: int) -> Moved:
    """Forward: q, k, v of own heads come, and out of own rows. Backward: dout of own heads comes,
    and dq, dk, dv of own rows, the last two as sums. lse and dlse are not counted."""
    sizes = plan.sizes
    dealt = heads.dealt(sizes.heads_q, plan.world_size)
    keys = [len(heads.of_keys(own, sizes.heads_q, sizes.heads_kv)) for own in dealt]
    both = sizes.head_size + sizes.head_size_v
    rows, other_rows = plan.rows(rank), sizes.length - plan.rows(rank)
    own, other = len(dealt[rank]), sizes.heads_q - len(dealt[rank])
    came = other_rows * (own * sizes.head_size + keys[rank] * both) * sizes.element_bytes
    outs = sizes.head_size_v * sizes.element_bytes  # of one row and head
    back = rows * (other * sizes.head_size * sizes.element_bytes
                   + (sum(keys) - keys[rank]) * both * sizes.sum_bytes)
    return Moved(sizes.batch * (came + rows * other * outs),
                 sizes.batch * (other_rows * own * outs + back))


def _by_levels(plan: Plan, rank: int) -> Moved:
    """Heads within the node, and keys of own heads among nodes."""
    assert plan.nodes is not None and plan.ranks_per_node is not None
    node, place = divmod(rank, plan.ranks_per_node)
    sizes, own = plan.sizes, heads.dealt(plan.sizes.heads_q, plan.ranks_per_node)[place]
    places = heads.repeats(own, sizes.heads_q, sizes.heads_kv)
    keys = len(heads.of_keys(own, sizes.heads_q, sizes.heads_kv) if places is None else places)
    within = moved(plan.within_node(node), place)
    among = moved(plan.nodes, node)  # of all heads of keys
    return Moved(*(one + other // sizes.heads_kv * keys for one, other in zip(within, among)))


def seconds(plan: Plan, rates: Rates) -> float:
    """Of one forward and one backward pass, without overlap: the largest visible area, and the
    rank that receives for the longest time."""
    return _computing(plan, rates) + _longest_receiving(plan, rates)


def moves_long(plan: Plan, rates: Rates) -> bool:
    """Whether receiving takes long enough to be hidden behind computation.

    With several key heads a rank: more than 0.8 ms in both passes (each extra call costs the host
    0.1 ms) and more than 2 % of the computing time. With one key head: more than 10 %, because
    merging partial results costs 4 % forward and 8 % backward on two H100. False for schemes
    without overlap. Figures: docs/notes/distributed.md.
    """
    if plan.scheme.rpartition("+")[2] not in ("gather", "halo"):
        return False
    receiving, computing = _longest_receiving(plan, rates), _computing(plan, rates)
    if has_heads(plan):
        return receiving > max(0.8e-3, 0.02 * computing)
    return receiving > 0.1 * computing


def _computing(plan: Plan, rates: Rates) -> float:
    return _flops(plan) / rates.flops


def _flops(plan: Plan) -> float:
    """Of a forward and a backward pass of the rank that has the most."""
    sizes = plan.sizes
    pair = 2 * (4 * sizes.head_size + 3 * sizes.head_size_v) * sizes.heads_q * sizes.batch
    return max(plan.areas) * pair


def overlap_on_gpus(plan: Plan, by_position: bool = False, has_scores: bool = False) -> str:
    """`Call.overlaps` where `overlap` is None. by_position: alibi_slopes or dropout are given;
    has_scores: a bias, mask or spans."""
    inner = plan.nodes or plan
    if inner.world_size == 1 or inner.scheme not in ("gather", "halo"):
        return ""
    if plan.has_whole_documents and not by_position and not has_scores and takes_long(plan):
        return "documents"
    if not plan.moves_long:
        return ""
    return "heads" if has_heads(plan) else "" if by_position else "keys"


def has_heads(plan: Plan) -> bool:
    """Whether each rank that has heads has several of keys."""
    dealt = heads.dealt(plan.sizes.heads_q, plan.ranks_per_node or 1)
    return min(len(heads.of_keys(own, plan.sizes.heads_q, plan.sizes.heads_kv))
               for own in dealt if own) > 1


def takes_long(plan: Plan) -> bool:
    """Whether a GPU computes for so long that another call, which takes the host 0.1 ms in each
    pass, costs nothing: 1 ms at the assumed rate."""
    return _flops(plan) > 1e-3 * ASSUMED_FLOPS


def _longest_receiving(plan: Plan, rates: Rates) -> float:
    return max(_receiving(plan, rank, rates) for rank in range(plan.world_size))


def _receiving(plan: Plan, rank: int, rates: Rates) -> float:
    """Seconds in which the rank receives. With two levels, what comes from its node comes first."""
    whole = plan.moved(rank)
    if plan.nodes is None or plan.ranks_per_node is None:
        return _at(whole, rates.bandwidth)
    node, place = divmod(rank, plan.ranks_per_node)
    within = plan.within_node(node).moved(place)
    among = Moved(*(one - other for one, other in zip(whole, within)))
    return _at(within, rates.node_bandwidth) + _at(among, rates.bandwidth)


def _at(moved: Moved, bandwidth: Bandwidth) -> float:
    by_all_to_all = moved.forward + moved.backward - moved.all_gather
    return moved.all_gather / bandwidth.all_gather + by_all_to_all / bandwidth.all_to_all


def fastest(plans: Sequence[Plan], rates: Rates) -> Plan:
    """The plan that takes the least time; of equals the first."""
    return min(plans, key=lambda one: seconds(one, rates))
