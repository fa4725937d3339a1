"""Gather and halo of documents: rows whose documents are whole on the rank are calls of their own,
on q, k and v where they lie, while keys of other documents arrive, and in backward while sums for them
travel. Where the calls of a backward pass may be under way at once, they do so while keys arrive as well.

All other rows are a call over their own and the received keys, as in gather.py. Gradients of a key
are those of one call, or the sum of all ranks' in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gradients import Gradients
from . import call_keys, gather, key_sums, local_pass, packing, whole_rows
from .call import Call, Kept, Pair, Tensors, Wanted
from .ranks import completing
from .runs import neighbours


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs."""
    out, lse = local_pass.empty_results(call, tensors)
    shared, whole = _parts(call, tensors.q)
    coming = gather.exchange(call, tensors, [tensors], has_sums=False).begin_keys(0)
    with completing([coming]):
        for run, options in whole:
            local_pass.forward_into(call, _of_run(tensors, run), options, out[:, :, run], lse[:, :, run],
                             continue_from=False)
    local = shared.tensors(tensors, coming())
    results = shared.of(out), shared.of(lse)
    local_pass.forward_into(call, local, shared.options, *results, continue_from=False)
    shared.put(out, results[0])
    shared.put(lse, results[1])
    return out, lse, (out, lse, *tensors)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    out, lse, *rest = kept
    tensors = Tensors(*rest)  # type: ignore[arg-type]
    results = dout, dlse, out, lse
    shared, whole = _parts(call, tensors.q)
    made = gather.empty_gradients(call, tensors, wanted)
    sinks = [] if made.dsink is None else [torch.empty_like(made.dsink) for _ in (shared, *whole)]
    exchange = gather.exchange(call, tensors, [tensors], wanted.keys)
    coming = exchange.begin_keys(0)
    returning: list[Callable[[], None]] = []

    def of_whole() -> None:
        for n, (run, options) in enumerate(whole):
            dq, dk, dv = (None if x is None else x[:, :, run] for x in (made.dq, made.dk, made.dv))
            into = Gradients(dq, dk, dv, None, sinks[1 + n] if sinks else None)
            local_pass.backward(call, _of_run(tensors, run), options, tuple(
                None if x is None else x[:, :, run] for x in results), into)

    def of_shared() -> None:
        local = shared.tensors(tensors, coming())
        dq = None if made.dq is None else shared.of(made.dq)
        dk, dv = sums or (None, None)
        local_pass.backward(call, local, shared.options, tuple(
            None if x is None else shared.of(x) for x in results),
            Gradients(dq, dk, dv, None, sinks[0] if sinks else None))
        if made.dq is not None and dq is not None:
            shared.put(made.dq, dq)
        if sums is not None:
            returning.append(exchange.begin_sums(0, sums, partial(
                key_sums.write_sums, call, call_keys.SHARED, Pair(made.dk, made.dv), sums)))

    with completing([coming]), completing(returning):
        sums = exchange.empty_sums(0) if wanted.keys else None
        with exchange.side_by_side(2) as lane:
            calls = [(0, of_shared), (1, of_whole)]  # by their priorities
            for number, attend in reversed(calls) if exchange.at_once else calls:
                with lane(number):
                    attend()
    for wait in returning:
        wait()
    if made.dsink is not None:
        made.dsink.copy_(torch.stack(sinks).sum(0))
    return made


class _Shared(NamedTuple):
    """The rows that are not of whole documents. run: of them, if they are neighbours. places: (n)
    int64, on the device."""

    run: slice | None
    places: Tensor
    options: dict[str, Any]

    def of(self, x: Tensor) -> Tensor:
        """These rows of (B, H, rows, ...), a view if they are neighbours."""
        return x.index_select(2, self.places) if self.run is None else x[:, :, self.run]

    def put(self, to: Tensor, x: Tensor) -> None:
        """Writes what `of` returned of `to`, where it is no view."""
        if self.run is None:
            to.index_copy_(2, self.places, x)

    def tensors(self, tensors: Tensors, rows: Pair) -> Tensors:
        return tensors._replace(q=self.of(tensors.q), k=rows.k, v=rows.v)


def _of_run(tensors: Tensors, run: slice) -> Tensors:
    return tensors._replace(q=tensors.q[:, :, run], k=tensors.k[:, :, run], v=tensors.v[:, :, run])


def _parts(call: Call, q: Tensor) -> tuple[_Shared, list[tuple[slice, dict[str, Any]]]]:
    """The shared rows, and the runs of whole ones with the options of their calls."""
    plan, rank, device = call.plan, call.ranks.rank, q.device

    def seen(name: Any, spans: Callable[[Any], Tensor], keys: int) -> dict[str, Any]:
        if len(q) == 1:
            return packing.options_of(plan, (name, rank), spans, keys, device)
        return {"row_spans": spans(device)}

    def made() -> tuple[_Shared, list[tuple[slice, dict[str, Any]]]]:
        rows = whole_rows.shared_rows(plan, rank)
        cuts = neighbours(rows)
        run = slice(0, 0) if not cuts else slice(int(rows[0]), int(rows[-1]) + 1)
        shared = _Shared(run if len(cuts) <= 1 else None, rows.to(device), seen(
            "shared", partial(whole_rows.shared_spans, plan, rank),
            len(whole_rows.shared_keys(plan, rank))))
        return shared, [(run, seen(("run", run.start), partial(
            whole_rows.spans_of_run, plan, rank, run), run.stop - run.start))
            for run in whole_rows.runs(plan, rank)]

    return call.kept("parts", made)
