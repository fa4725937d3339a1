"""`plan`: from sizes and a mask to a Plan, with the reasons for what it chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from torch import Tensor

from ...checks import integer, number, one_of, shown
from ...checks import window as window_form
from ...errors import Unsupported, WrongType, refuse
from ...mask_value import Mask
from ...masks.band import Band, band_of
from ...options import Causal, Window
from . import dealing, whole_rows
from .dealing import Blocks
from .costs import (ASSUMED_BANDWIDTH, ASSUMED_FLOPS, ASSUMED_NETWORK, Bandwidth, Rates, fastest,
                    moves_long, seconds)
from .dealt_rows import BLOCK
from .plan_value import Plan, Sizes
from .visibility import combined, length_of, plain
from .visible_keys import VisibleKeys

SCHEMES = ("gather", "halo", "ulysses", "ring")
NESTED = tuple(f"ulysses+{scheme}" for scheme in SCHEMES if scheme != "ulysses")
_MOST = 2**31 - 1
_EVEN = 1.08  # the largest area over the mean that is even enough
_SHARES = (1, 1.5, 2, 3)  # of dealing.documents


@plain
def plan(length: int | None = None, *, world_size: int, heads_q: int, head_size: int,
         heads_kv: int | None = None, head_size_v: int | None = None, batch: int = 1,
         element_bytes: int = 2, cu_seqlens: Sequence[int] | Tensor | None = None,
         causal: Causal = False, window: Window = None, mask: Mask | None = None,
         scheme: str = "auto", rows: str = "equal", ranks_per_node: int | None = None,
         bandwidth: Bandwidth | None = None, node_bandwidth: Bandwidth | None = None,
         flops: float | None = None) -> Plan:
    """How to spread self-attention over one sequence, or packed documents, over ranks.

    A pure function: it needs no process group and no device, and gives equal plans on all ranks for
    equal arguments.

    Args:
        length: S, the rows of the whole sequence, which are its keys too; None is where the last
            document ends.
        world_size: how many ranks there are. Nothing has to divide by it.
        heads_q, heads_kv: of the whole; heads_q is a multiple of heads_kv, whose default it is.
        head_size, head_size_v: D and Dv, of values; None is head_size.
        batch: B, entries that share length and mask, for the number of bytes.
        element_bytes: of an element of q, k and v: 8, 4 or 2.
        cu_seqlens: (n + 1) integers, where each packed document begins and where the last one ends;
            a row sees keys of its document. Rows after the last document see nothing.
        causal: True: a row sees keys up to itself.
        window: (left, right): a row sees keys from left before it to right after it; None or -1 is
            unbounded.
        mask: a Mask of S x S made of row_spans, causal and window; what everything given shows is
            visible.
        scheme: "gather": each rank receives the keys and values that its rows see. "halo": the same
            with contiguous rows, for windows and short documents. "ulysses": each rank receives all
            rows of some heads. "ring": keys and values pass from rank to rank, one part at a time.
            "ulysses+gather", "ulysses+halo", "ulysses+ring": the ranks of a node exchange heads,
            and nodes keys of these heads. "auto": of the first three, and with ranks_per_node also
            of the first two with two levels, the one that should take the least time.
        rows: of "halo": "equal": all ranks have as many rows, to a block of 128. "by_area": rows are
            cut where visible areas are even, so that ranks have different numbers of them. The other
            schemes have even areas with equal rows.
        ranks_per_node: for two levels; divides world_size. Ranks are counted node by node.
        bandwidth: of all ranks, as `measure_bandwidth` returns it; None assumes 300 GB/s, and 40
            among several nodes.
        node_bandwidth: within a node; None assumes 300 GB/s.
        flops: what one rank computes in a second; None assumes 5e14.

    Returns:
        Plan.

    Raises:
        InvalidArgument, WrongType, or Unsupported; each names the argument and its value.
    """
    length = _length(length, cu_seqlens)
    sizes = _sizes(length, batch, heads_q, heads_kv, head_size, head_size_v, element_bytes)
    world_size = integer("world_size", world_size, 1, 4096)
    scheme = one_of("auto", *SCHEMES, *NESTED)("scheme", scheme)
    by_area = one_of("equal", "by_area")("rows", rows) == "by_area"
    _require_nodes(scheme, world_size, ranks_per_node)
    several = ranks_per_node is not None and ranks_per_node < world_size
    rates = _rates(bandwidth, node_bandwidth, flops, several)
    whole = combined(length, cu_seqlens, causal, window, mask)
    # By what is given: the same window may hide nothing of a shorter sequence.
    sides = window_form("window", window)
    is_near = sides[0] >= 0 or (not causal and sides[1] >= 0)
    if scheme.endswith("halo") and cu_seqlens is None and mask is None and not is_near:
        raise refuse("scheme", scheme, "needs a window, cu_seqlens or a mask of row_spans, so that "
                     "rows see near keys only", Unsupported)
    if whole is not None and whole.heads not in (1, heads_q):
        raise refuse("mask", mask, f"must be for {heads_q} heads, or for 1")
    base = Plan(sizes, world_size, VisibleKeys(whole, length), "", "", ())
    if scheme == "auto":
        found = _chosen(base, rates, ranks_per_node if several else None, by_area)
    else:
        found = (_of_scheme(base, scheme, by_area) if ranks_per_node is None else
                 _nested(base, scheme, ranks_per_node, by_area))
        found = replace(found, reasons=(*found.reasons, f"{scheme}: as asked for"))
    return found.named(moves_long(found, rates), whole_rows.are_many(found.nodes or found))


def _rates(bandwidth: Any, node_bandwidth: Any, flops: Any, several: bool) -> Rates:
    """several: whether there is more than one node."""
    given = {"bandwidth": bandwidth, "node_bandwidth": node_bandwidth}
    for name, value in given.items():
        if value is not None and not isinstance(value, Bandwidth):
            raise refuse(name, shown(value), "must be what measure_bandwidth returned", WrongType)
        if value is not None and not (0 < value.all_gather < inf and 0 < value.all_to_all < inf):
            raise refuse(name, value, "must have rates above 0")
    within = node_bandwidth or ASSUMED_BANDWIDTH
    found = Rates(bandwidth or (ASSUMED_NETWORK if several else within), within,
                  ASSUMED_FLOPS if flops is None else number("flops", flops),
                  any(x is not None for x in (*given.values(), flops)))
    if not found.flops > 0:
        raise refuse("flops", flops, "must be above 0")
    return found


def _length(length: Any, cu_seqlens: Any) -> int:
    if length is None:
        if cu_seqlens is None:
            raise refuse("length", None, "must be given, or cu_seqlens")
        length = length_of(cu_seqlens)
    return integer("length", length, 1, _MOST)


def _sizes(length: int, batch: Any, heads_q: Any, heads_kv: Any, head_size: Any, head_size_v: Any,
           element_bytes: Any) -> Sizes:
    sizes = Sizes(
        length, integer("batch", batch, 0, _MOST), integer("heads_q", heads_q, 1, _MOST),
        integer("heads_kv", heads_q if heads_kv is None else heads_kv, 1, _MOST),
        integer("head_size", head_size, 1, _MOST),
        integer("head_size_v", head_size if head_size_v is None else head_size_v, 1, _MOST),
        integer("element_bytes", element_bytes, 2, 8))
    if sizes.element_bytes not in (8, 4, 2):
        raise refuse("element_bytes", element_bytes, "must be 8, 4 or 2")
    if sizes.heads_q % sizes.heads_kv:
        raise refuse("heads_q", sizes.heads_q, f"must be a multiple of heads_kv, {sizes.heads_kv}")
    return sizes


def _require_nodes(scheme: str, world_size: int, ranks_per_node: Any) -> None:
    if ranks_per_node is None and scheme in NESTED:
        raise refuse("ranks_per_node", None, f'must be given for "{scheme}"')
    if ranks_per_node is not None and scheme not in ("auto", *NESTED):
        raise refuse("ranks_per_node", ranks_per_node, f'is for "auto" and {", ".join(NESTED)}; not '
                     f'for "{scheme}"')
    if ranks_per_node is not None:
        integer("ranks_per_node", ranks_per_node, 1, world_size)
        if world_size % ranks_per_node:
            raise refuse("ranks_per_node", ranks_per_node, f"must divide world_size, {world_size}")


def _nested(base: Plan, scheme: str, ranks_per_node: int, by_area: bool) -> Plan:
    """The rows of each node, as the plan among nodes deals them, in contiguous parts to its ranks."""
    if base.mask is not None and base.mask.heads != 1:
        raise refuse("mask", base.mask, "must be for 1 head: ranks of a node have different heads",
                     Unsupported)
    nodes = _of_scheme(replace(base, world_size=base.world_size // ranks_per_node),
                       scheme.partition("+")[2], by_area)
    parts = (dealing.contiguous(len(blocks), ranks_per_node) for blocks in nodes.blocks)
    blocks = tuple(tuple(of_node[place] for place in own)
                   for of_node, split in zip(nodes.blocks, parts) for own in split)
    return replace(base, scheme=scheme, dealing=nodes.dealing, blocks=blocks, nodes=nodes,
                   ranks_per_node=ranks_per_node, reasons=(
                       f"{nodes.world_size} nodes of {ranks_per_node} ranks exchange keys of heads",
                       *(f"among nodes: {reason}" for reason in nodes.reasons)))


def _chosen(base: Plan, rates: Rates, ranks_per_node: int | None, by_area: bool) -> Plan:
    """The fastest of the schemes that can take the mask and the heads. ranks_per_node: of several
    nodes; else None."""
    if base.world_size == 1:
        return _of_scheme(base, "gather", by_area)
    names = ["gather"]
    if base.mask is not None and not _is_plain_causal(base.mask):
        names.append("halo")
    plans = [_of_scheme(base, name, by_area) for name in names]
    if base.sizes.heads_q >= base.world_size:
        plans.append(_of_scheme(base, "ulysses", by_area))
    has_levels = ranks_per_node is not None and ranks_per_node <= base.sizes.heads_q and (
        base.mask is None or base.mask.heads == 1)
    if has_levels and ranks_per_node is not None:
        plans += [_nested(base, f"ulysses+{name}", ranks_per_node, by_area) for name in names]
    found = fastest(plans, rates)
    times = ", ".join(f"{one.scheme} {1e3 * seconds(one, rates):.3g} ms" for one in plans)
    assumed = "" if rates.measured else " (assumed rates)"
    reason = f"{found.scheme}: the least time of a forward and backward pass{assumed}: {times}"
    return replace(found, reasons=(*found.reasons, reason))


def _is_plain_causal(mask: Mask) -> bool:
    return mask.row_spans is None and band_of(mask) == Band(None, 0)


def _of_scheme(base: Plan, scheme: str, by_area: bool) -> Plan:
    """base has no scheme, blocks and reasons yet. by_area: how halo cuts rows."""
    plain_causal = base.mask is not None and _is_plain_causal(base.mask)
    count = -(-base.sizes.length // BLOCK)
    if scheme == "halo" and by_area:
        name, blocks = "contiguous by area", dealing.by_area(base.visible.block_areas, base.world_size)
        reason = "contiguous rows, cut where areas are even: near keys have few owners"
    elif base.mask is None or scheme in ("halo", "ulysses"):
        name, blocks = "contiguous", dealing.contiguous(count, base.world_size)
        reason = ("contiguous rows: near keys have few owners" if scheme == "halo" else
                  "contiguous rows: each rank has all rows of its heads" if scheme == "ulysses" else
                  "contiguous rows: all rows see as many keys")
    elif plain_causal:
        name, blocks = "zigzag", dealing.zigzag(base.visible.block_areas, base.world_size)
        reason = "zigzag rows: late rows of a causal mask see more keys"
    elif base.visible.documents is not None:
        name, blocks = "documents", _documents(base, base.visible.documents)
        reason = "rows by documents: each has few owners, and areas are even"
    else:
        name, blocks = "greedy", dealing.greedy(base.visible.block_areas, base.world_size)
        reason = "greedy rows: blocks of rows differ in visible pairs"
    made = replace(base, scheme=scheme, dealing=name, blocks=blocks, moves_all=False,
                   reasons=(reason,))
    if base.world_size == 1:
        return replace(made, moves_all=True, reasons=("one rank: nothing moves",))
    if scheme != "gather":
        return replace(made, moves_all=scheme == "ring")
    return _with_exchange(made)


def _documents(base: Plan, labels: list[int]) -> Blocks:
    """Over as few ranks for a document as make areas even."""
    areas = base.visible.block_areas
    found: dict[float, Blocks] = {}
    for shares in _SHARES:
        blocks = dealing.documents(areas, labels, base.world_size, shares)
        largest = max(sum(areas[block] for block in own) for own in blocks)
        if largest * base.world_size <= _EVEN * sum(areas):
            return blocks
        found.setdefault(largest, blocks)
    return found[min(found)]


def _with_exchange(made: Plan) -> Plan:
    """gather: all keys to all ranks, unless twice as many as any rank needs would move."""
    whole = replace(made, moves_all=True)
    needed, all_keys = (max(one.moved(rank).forward for rank in range(made.world_size))
                        for one in (made, whole))
    if 2 * needed > all_keys:
        return replace(whole, reasons=(*made.reasons, "one all-gather: rows of some rank see more "
                                       "than half of the others' keys"))
    return replace(made, reasons=(*made.reasons, "keys are sent to the ranks that see them: "
                                  f"{needed} instead of {all_keys} bytes in forward"))
