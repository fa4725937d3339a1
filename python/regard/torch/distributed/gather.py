"""Each rank receives the keys that its rows see, in the order of the sequence, and makes one call;
or one for each group of heads, so that the keys of the next group arrive meanwhile.

dq is local and complete. dk and dv are computed for all of these keys in float32 or wider, sent to
the keys' owners, and summed there in a fixed order: gradients repeat to the bit. Keys are
received again for the backward pass, so that no rank keeps more than its own between the two.
"Halo" is the same code with contiguous rows, where few ranks have to send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gradients import Gradients
from . import call_keys, collectives, head_groups, key_rows, key_sums, local_pass, peers
from .call import Call, Kept, Pair, Tensors, Wanted, sums_type
from .head_groups import Group
from .ranks import completing


def forward(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Kept]:
    """out, lse, and what backward needs."""
    out, lse = local_pass.empty_results(call, tensors)
    calls = _calls(call, tensors, "forward", lambda: head_groups.forward(call, tensors))
    parts = [group.of(tensors) for group in calls.groups]
    passing = exchange(call, tensors, parts, has_sums=False)
    comings: list[Callable[[], Pair]] = []
    with completing(comings):
        comings.extend(passing.begin_keys(n) for n in range(len(parts)))
        for n, (group, part) in enumerate(zip(calls.groups, parts)):
            local = calls.with_keys(part, comings[n]())
            local_pass.forward_into(call, local, calls.options[n], out[:, group.q], lse[:, group.q],
                             continue_from=False)
    return out, lse, (out, lse, *tensors)


def backward(call: Call, kept: Kept, dout: Tensor, dlse: Tensor | None, wanted: Wanted
             ) -> Gradients:
    out, lse, *rest = kept
    tensors = Tensors(*rest)  # type: ignore[arg-type]
    made = empty_gradients(call, tensors, wanted)
    dbias: Tensor | None = None
    calls = _calls(call, tensors, ("backward", wanted.bias),
                   lambda: head_groups.backward(call, tensors, wanted.bias))
    parts = [group.of(tensors) for group in calls.groups]
    passing = exchange(call, tensors, parts, wanted.keys)
    comings: list[Callable[[], Pair]] = []
    returning: list[Callable[[], None]] = []
    with completing(comings), completing(returning):
        comings.extend(passing.begin_keys(n) for n in range(len(parts)))
        all_sums = [passing.empty_sums(n) if wanted.keys else None for n in range(len(parts))]
        with passing.side_by_side(len(parts)) as lane:
            for n, (group, part, sums) in enumerate(zip(calls.groups, parts, all_sums)):
                with lane(n):
                    local = calls.with_keys(part, comings[n]())
                    if wanted.bias and local.bias is not None:
                        dbias = torch.empty_like(local.bias)
                    into = group.gradients(made, sums, dbias)
                    local_pass.backward(call, local, calls.options[n],
                                 group.results(dout, dlse, out, lse), into)
                    if sums is not None:
                        returning.append(passing.begin_sums(n, sums, partial(
                            key_sums.write_sums, call, calls.name, group.keys(made), sums)))
        for wait in returning:
            wait()
    return replace(made, dbias=_whole_bias(dbias, tensors.bias, calls.keys))


class _Calls(NamedTuple):
    """What the calls of a pass have in common with those of other passes over equal shapes.

    options: of each group's call. keys: their positions, on the device; None for the whole
    sequence. name: of these keys.
    """

    groups: list[Group]
    options: list[dict[str, Any]]
    keys: Tensor | None
    name: str

    def with_keys(self, tensors: Tensors, rows: Pair) -> Tensors:
        """The tensors with these keys and values and their part of bias and mask, without the
        caller's spans."""
        return tensors._replace(k=rows.k, v=rows.v, bias=key_rows.columns(tensors.bias, self.keys),
                                mask=key_rows.columns(tensors.mask, self.keys), row_spans=None)


def _calls(call: Call, tensors: Tensors, pass_: Any, groups: Callable[[], list[Group]]) -> _Calls:
    def made() -> _Calls:
        may_pack = tensors.q.shape[0] == 1 and tensors.bias is None and tensors.mask is None
        options = local_pass.visibility_options(call, tensors.row_spans, None, tensors.q.device,
                                         may_pack=may_pack)
        found = groups()
        name = call_keys.name_of(call)
        keys = call_keys.positions(call.plan, call.ranks.rank, name, tensors.q.device)
        return _Calls(found, [group.options(options) for group in found], keys, name)

    return made() if tensors.row_spans is not None else call.kept(("gather", pass_), made)


def exchange(call: Call, tensors: Tensors, parts: Sequence[Tensors], has_sums: bool
             ) -> peers.Exchange | collectives.Exchange:
    return peers.exchange(call, tensors, parts, has_sums) or collectives.Exchange(call, parts)


def empty_gradients(call: Call, tensors: Tensors, wanted: Wanted) -> Gradients:
    """To write to, except dbias."""
    dk, dv = (torch.empty_like(x, dtype=sums_type(x) if call.wide_sums else x.dtype)
              if wanted.keys else None for x in (tensors.k, tensors.v))
    return Gradients(torch.empty_like(tensors.q) if wanted.q else None, dk, dv, None,
                     torch.empty_like(tensors.sink) if wanted.sink and tensors.sink is not None
                     else None)


def _whole_bias(dbias: Tensor | None, bias: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """The gradient over all keys; keys that are not here have none."""
    if dbias is None or bias is None or keys is None or bias.shape[-1] == 1:
        return dbias
    return torch.zeros_like(bias).index_copy_(-1, keys, dbias)
