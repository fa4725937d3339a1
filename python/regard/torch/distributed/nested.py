"""Two levels, for several machines: Ulysses among the ranks of a node, another scheme among nodes.

A node's ranks exchange their rows so that each has all rows of the node for some of the heads. With
these heads it then takes part in the plan of nodes, next to the ranks of the other nodes that have
the same heads. Little moves between nodes: only keys of a rank's own heads.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...gradients import Gradients
from . import head_exchange, schemes
from .call import Call, Kept, Tensors, Wanted
from .ranks import NodeRanks


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs: tensors of own heads and the node's rows."""
    within, among = _levels(call)

    def attend(local: Tensors) -> tuple[Tensor, Tensor, Kept]:
        found: tuple[Tensor, Tensor, Kept] = schemes.module_of(among).forward(
            among, head_exchange.repeated(within, local))
        return found

    return head_exchange.forward(within, tensors, attend)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    within, among = _levels(call)

    def differentiate(local: Tensors, rest: Kept, dout: Tensor, dlse: Tensor | None) -> Gradients:
        found: Gradients = schemes.module_of(among).backward(among, rest, dout, dlse, wanted)
        return found

    return head_exchange.backward(within, kept, dout, dlse, wanted, differentiate)


def _levels(call: Call) -> tuple[Call, Call]:
    """The exchange of heads within the node, and the call among the nodes with these heads."""
    plan, ranks = call.plan, call.ranks
    assert plan.nodes is not None and isinstance(ranks, NodeRanks)
    within = replace(call, plan=plan.within_node(ranks.among.rank), ranks=ranks.within)
    own = head_exchange.heads_q(within)[ranks.within.rank]
    return within, replace(call, plan=plan.nodes, ranks=ranks.among,
                           options=call.options | {"head_begin": own.start}, wide_sums=True)
