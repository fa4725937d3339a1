"""The passes of a rank over some of the keys, without communication, and their options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..._core import Problem
from ...arrays import framework_of
from ...attention import attention, attention_backward
from ...call import checked_options
from ...gradients import Gradients
from .. import direct
from ..kernels import array_of, dense, where_of
from ..surface import attention as attention_of_one
from . import packing
from .call import Call, Tensors, sums_type
from .visibility import among, intersection


def visibility_options(call: Call, given: Tensor | None, owner: int | None, device: Any,
                       rows: slice = slice(None), may_pack: bool = False) -> dict[str, Any]:
    """The options by which a call over `rows` of `plan.needed.part(rank, owner)` knows what is visible, and
    where its rows and keys stand. This is the one place for them.

    Keys that follow each other stand by their positions, which a causal mask and windows go by, as
    do ALiBi and dropout; other keys are seen by spans, or as packed sequences where that is the same.

    given: the caller's spans, of positions in the whole sequence. may_pack: whether the call is over all
    of the part's keys, and has one batch entry, no bias and no mask. Errors: InvalidArgument where n of
    the plan's spans times n of the caller's is more than 8."""
    plan, rank = call.plan, call.ranks.rank
    first = plan.memo.value(
        ("first of adjacent", rank, owner, call.by_position, rows.start, rows.stop),
        lambda: plan.needed.first_if_adjacent(rank, owner, call.by_position, rows))
    has_band = first is not None and plan.visible.band is not None
    if may_pack and given is None and plan.visible.spans is not None and not (has_band or call.by_position):
        return packing.options_of_part(plan, rank, owner, device)
    spans = None if has_band else plan.needed.spans_of_part(rank, owner, device, call.by_position)
    if given is not None:
        keys = plan.needed.part(rank, owner, device, call.by_position)
        given = given.expand(*given.shape[:-2], plan.rows(rank), -1)
        given = given if keys is None else among(given, keys.int())
        spans = given if spans is None else intersection(spans, given)
    options: dict[str, Any] = {}
    if spans is not None:  # ends outside of the rows are cut
        options["row_spans"] = spans - rows.start if rows.start else spans
    if has_band or call.by_position:
        options |= {"q_positions": plan.first_positions(rank, device), "k_position": first or 0}
    return options | (plan.visible.band or {}) if has_band else options


def empty_results(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Memory for out and lse of one call; out is laid out as q is."""
    return (dense(tensors.q, tensors.v.shape[-1], call.out_type),
            tensors.q.new_empty(tensors.q.shape[:-1], dtype=sums_type(tensors.q)))


def empty_merged(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Memory for out and lse while parts of the keys are merged into them."""
    type_ = sums_type(tensors.q)
    out = tensors.q.new_empty((*tensors.q.shape[:-1], tensors.v.shape[-1]), dtype=type_)
    return out, tensors.q.new_empty(tensors.q.shape[:-1], dtype=type_)


def forward(call: Call, tensors: Tensors, more: dict[str, Any], out_type: torch.dtype | None
            ) -> tuple[Tensor, Tensor]:
    """out and lse of these tensors, whose k and v may be any part of the keys; no communication.

    more: options of this scheme, such as causal."""
    arrays = {name: x for name, x in tensors._asdict().items() if x is not None}
    found: Any = attention_of_one(**arrays, **call.options | more, **call.where,
                                  out_type=out_type, return_lse=True)
    return found  # type: ignore[no-any-return]


def forward_into(call: Call, tensors: Tensors, more: dict[str, Any], out: Tensor, lse: Tensor,
                 continue_from: bool) -> None:
    """Writes out and lse, or continues the result over other keys that they hold."""
    if "cu_seqlens_q" in more:
        tensors, out, lse = _of_sequences(tensors), _rows_first(out), lse[0]
    q, k, v = tensors[:3]
    arrays = _arrays(tensors)
    options = call.options | more
    if tensors.mask is not None:  # its tile map is made, or found, by `attention`
        attention(q, k, v, **arrays, **options, **call.where, out=out, lse=lse,
                  continue_from=continue_from)
    elif not direct.forward_into(q, k, v, arrays | options, out, lse, continue_from, **call.where):
        _problem(tensors, arrays | options).forward(
            array_of(out, "out"), array_of(lse, "lse"), continue_from=continue_from,
            **where_of(q, **call.where))


def backward(call: Call, tensors: Tensors, more: dict[str, Any], results: Sequence[Tensor | None],
             into: Gradients, accumulate: bool = False) -> None:
    """Writes the gradients of a part of the keys into `into`, or adds them to what it holds.

    results: dout, dlse or None, out and lse; out and lse are those over all keys.
    """
    dout, dlse, out, lse = results
    assert dout is not None and out is not None and lse is not None
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    if "cu_seqlens_q" in more:
        tensors, dout, out, lse = (_of_sequences(tensors), _rows_first(dout), _rows_first(out), lse[0])
        dlse = None if dlse is None else dlse[0]
        into = replace(into, **{name: _rows_first(x) for name, x in (
            ("dq", into.dq), ("dk", into.dk), ("dv", into.dv)) if x is not None})
    q, k, v = tensors[:3]
    arrays = _arrays(tensors)
    options = call.options | more
    if tensors.mask is not None:
        attention_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, into=into,
                           accumulate=accumulate, **arrays, **options, **call.where)
        return
    gradients = {f"d{name}": x for name, x in (
        ("q", into.dq), ("k", into.dk), ("v", into.dv), ("bias", into.dbias), ("sink", into.dsink))
        if x is not None}
    if not gradients or direct.backward_into(
            dout, dlse, out, lse, q, k, v, arrays | options, gradients, accumulate, **call.where):
        return
    made = {name: array_of(x, name) for name, x in gradients.items()}
    _problem(tensors, arrays | options).backward(
        array_of(out, "out"), array_of(lse, "lse"), array_of(dout, "dout"),
        None if dlse is None else array_of(dlse, "dlse"), accumulate=accumulate, **made,
        **where_of(q, **call.where))


def _of_sequences(tensors: Tensors) -> Tensors:
    """As calls take packed sequences. Such calls have no bias and no mask."""
    q, k, v = map(_rows_first, tensors[:3])
    return tensors._replace(q=q, k=k, v=v)


def _rows_first(x: Tensor) -> Tensor:
    """(rows, H, D) of (1, H, rows, D)."""
    return x[0].transpose(0, 1)


def _arrays(tensors: Tensors) -> dict[str, Any]:
    """All but q, k and v."""
    return {name: x for name, x in zip(tensors._fields[3:], tensors[3:]) if x is not None}


def _problem(tensors: Tensors, given: dict[str, Any]) -> Any:
    """What a direct call cannot take: empty tensors, seeds in memory, an older PyTorch."""
    seed = given.get("dropout_seed")
    options = checked_options(tensors.q, tensors.k, tensors.v, {
        name: x for name, x in given.items() if name != "dropout_seed"})
    del options["layout"]
    made = {name: array_of(x, name) if isinstance(x, Tensor) else x for name, x in options.items()}
    if seed is not None:
        made["dropout_seed"] = (seed if isinstance(seed, int) else
                                framework_of(seed, "dropout_seed").seed(seed, "dropout_seed"))
    return Problem(array_of(tensors.q, "q"), array_of(tensors.k, "k"), array_of(tensors.v, "v"), made)
