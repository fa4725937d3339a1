"""A plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import costs

if TYPE_CHECKING:
    from .plan_value import Plan

_OVERLAPS = {"documents": "a call of their own for rows whose documents are whole on a rank",
             "heads": "some heads after the other: receiving takes long",
             "keys": "own keys first, others' when they are there: receiving takes long"}
_MOST_BLOCKS = 4  # runs of blocks that a line shows


def title(plan: Plan) -> str:
    return (f"{plan.scheme} over {plan.world_size} ranks, {plan.sizes.length} rows dealt "
            f"{plan.dealing}, balance {plan.balance:.3f}")


def text(plan: Plan) -> str:
    """A table with a line for each rank, and the reasons."""
    sizes = plan.sizes
    lines = [title(plan),
             f"batch {sizes.batch}, heads {sizes.heads_q}/{sizes.heads_kv}, head sizes "
             f"{sizes.head_size} and {sizes.head_size_v}, {sizes.element_bytes} bytes an element"]
    rows = [("rank", "rows", "visible pairs", "receives forward", "receives backward", "blocks")]
    for rank in range(plan.world_size):
        moved = plan.moved(rank)
        rows.append((str(rank), str(plan.rows(rank)), f"{plan.areas[rank]:.0f}",
                     _bytes(moved.forward), _bytes(moved.backward), _runs(plan.blocks[rank])))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[:-1], widths)]
        lines.append("  ".join([*cells, row[-1]]))
    overlap = costs.overlap_on_gpus(plan)
    reasons = (*plan.reasons, *([f"on GPUs {_OVERLAPS[overlap]}"] if overlap else ()))
    return "\n".join([*lines, *(f"- {reason}" for reason in reasons)])


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _runs(blocks: tuple[int, ...]) -> str:
    """0-3, 9 for the blocks 0, 1, 2, 3, 9."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block - 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    shown = [str(begin) if begin == end else f"{begin}-{end}" for begin, end in runs]
    if len(shown) > _MOST_BLOCKS:
        shown = [*shown[:_MOST_BLOCKS], f"... ({len(blocks)} blocks)"]
    return ", ".join(shown) or "none"
