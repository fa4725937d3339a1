"""Two levels, for several machines: Ulysses among the ranks of a node, another scheme among nodes.

A node's ranks exchange their rows so that each has all rows of the node for some of the heads. With
these heads it then takes part in the plan of nodes, next to the ranks of the other nodes that have
the same heads. Little moves between nodes: only keys of a rank's own heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...gradients import Gradients
from . import call as one
from . import schemes, ulysses
from .call import Call, Kept, Tensors, Wanted
from .ranks import NodeRanks


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs: tensors of own heads and the node's rows."""
    within, among = _levels(call)
    local = ulysses.of_heads(within, tensors, ulysses.to_heads)
    if local.q.shape[1]:
        keyed = ulysses.repeated(within, local)._replace(row_spans=local.row_spans)
        out, lse, kept = schemes.module_of(among).forward(among, keyed)
    else:
        out = local.q.new_empty((*local.q.shape[:-1], local.v.shape[-1]), dtype=call.out_type)
        lse, kept = local.q.new_empty(local.q.shape[:-1], dtype=one.sums_type(local.q)), ()
    heads = ulysses.heads_q(within)
    own_lse = (ulysses.to_rows(within, lse[..., None], heads)[..., 0] if call.return_lse else
               tensors.q.new_empty(tensors.q.shape[:-1], dtype=lse.dtype))
    return ulysses.to_rows(within, out, heads), own_lse, (tensors.bias, *local, *kept)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    within, among = _levels(call)
    given_bias, count = kept[0], len(Tensors._fields)
    local, rest = Tensors(*kept[1:1 + count]), kept[1 + count:]  # type: ignore[arg-type]
    heads, heads_kv = ulysses.heads_q(within), ulysses.heads_kv(within)
    dout = ulysses.to_heads(within, dout, heads)
    if dlse is not None:
        dlse = ulysses.to_heads(within, dlse[..., None], heads)[..., 0]
    found = (schemes.module_of(among).backward(among, rest, dout, dlse, wanted) if local.q.shape[1]
             else _nothing(local, wanted))
    dq = None if found.dq is None else ulysses.to_rows(within, found.dq.to(local.q.dtype), heads)
    dk, dv = (None if x is None or not wanted.keys else
              ulysses.to_rows(within, ulysses.unrepeated(within, x), heads_kv)
              for x in (found.dk, found.dv))
    dbias = None
    if found.dbias is not None and given_bias is not None:
        dbias = ulysses.to_rows(within, found.dbias.to(one.sums_type(given_bias)),
                                ulysses.heads_of(within, given_bias))
        dbias = dbias.sum_to_size(given_bias.shape)
    return Gradients(dq, dk, dv, dbias, ulysses.of_all_heads(within, found.dsink))


def _levels(call: Call) -> tuple[Call, Call]:
    """The exchange of heads within the node, and the call among the nodes with these heads."""
    plan, ranks = call.plan, call.ranks
    assert plan.nodes is not None and isinstance(ranks, NodeRanks)
    within = replace(call, plan=plan.within_node(ranks.among.rank), ranks=ranks.within)
    own = ulysses.heads_q(within)[ranks.within.rank]
    return within, replace(call, plan=plan.nodes, ranks=ranks.among,
                           options=call.options | {"head_begin": own.start}, wide_sums=True)


def _nothing(local: Tensors, wanted: Wanted) -> Gradients:
    """Of a rank without heads."""
    def like(x: Tensor | None, is_wanted: bool) -> Tensor | None:
        return torch.zeros_like(x, dtype=one.sums_type(x)) if x is not None and is_wanted else None

    return Gradients(like(local.q, wanted.q), like(local.k, wanted.keys),
                     like(local.v, wanted.keys), like(local.bias, wanted.bias),
                     like(local.sink, wanted.sink))
