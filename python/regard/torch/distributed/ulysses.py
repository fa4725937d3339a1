"""Each rank attends to all rows of some heads; head_exchange.py brings them, and the results' rows
back.

The local call is ordinary: it has the whole sequence, in order, with the mask's own causal, window
and spans.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...gradients import Gradients
from . import head_exchange, local_pass
from .call import Call, Kept, Tensors, Wanted, sums_type
from .visibility import intersection


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs: tensors, out and lse of own heads and all rows."""
    def attend(local: Tensors) -> tuple[Tensor, Tensor, Kept]:
        out, lse = local_pass.forward(call, _keyed(call, local), _options(call, local), call.out_type)
        return out, lse, (out, lse)

    return head_exchange.forward(call, tensors, attend)


def without_data(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """Tensors of the shapes and strides that `forward` returns, for the compiler."""
    def empty(call: Call, x: Tensor, dealt: list[range]) -> Tensor:
        rows = x.new_empty(call.plan.sizes.length, x.shape[0], len(dealt[call.ranks.rank]),
                           x.shape[3])
        return rows.permute(1, 2, 0, 3)

    def by_rows(count: int, width: int, dtype: torch.dtype | None) -> Tensor:
        rows = tensors.q.new_empty((tensors.q.shape[2], len(tensors.q), count, width), dtype=dtype)
        return rows.permute(1, 2, 0, 3)

    local, sums = head_exchange.of_heads(call, tensors, empty), sums_type(tensors.q)
    count, width = tensors.q.shape[1], tensors.v.shape[-1]
    results = local_pass.empty_results(call, local) if local.q.shape[1] else ()
    own_lse = (by_rows(count, 1, sums)[..., 0] if call.return_lse else
               tensors.q.new_empty(tensors.q.shape[:-1], dtype=sums))
    return by_rows(count, width, call.out_type), own_lse, (tensors.bias, *local, *results)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    def differentiate(local: Tensors, results: Kept, dout: Tensor, dlse: Tensor | None) -> Gradients:
        keyed = _keyed(call, local)
        into = head_exchange.empty_gradients(keyed, wanted)
        local_pass.backward(call, keyed, _options(call, local), (dout, dlse, *results), into)
        return into

    return head_exchange.backward(call, kept, dout, dlse, wanted, differentiate)


def _keyed(call: Call, local: Tensors) -> Tensors:
    """The tensors of the local call, whose spans are among its options."""
    return head_exchange.repeated(call, local)._replace(row_spans=None)


def _options(call: Call, local: Tensors) -> dict[str, Any]:
    """The plan's mask and the caller's spans, as options of a call over the whole sequence."""
    mask, own = call.plan.mask, head_exchange.heads_q(call)[call.ranks.rank]
    options: dict[str, Any] = {"head_begin": own.start}  # where dropout counts heads
    spans = local.row_spans
    if mask is not None:
        causal = "bottom_right" if mask.causal is True else mask.causal
        options |= {"causal": causal, "window": mask.window}
        planned = mask.row_spans
        if planned is not None:
            if planned.dim() > 2 and planned.shape[-3] > 1:
                planned = planned[..., own.start:own.stop, :, :]
            planned = call.plan.memo.tensor(("ulysses spans", call.ranks.rank), local.q.device,
                                     planned.contiguous)
            spans = planned if spans is None else intersection(planned, spans)
    return options if spans is None else options | {"row_spans": spans}
