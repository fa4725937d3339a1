"""Keys and sums of a pass by collectives of the group: all-gathers and all-to-alls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from . import call as one
from . import call_keys, others
from .call import Call, Tensors
from .ranks import completing


class Exchange:
    """One pass, whose calls have the heads of `parts`, one after the other."""

    def __init__(self, call: Call, parts: Sequence[Tensors]) -> None:
        self._call, self._parts = call, parts
        self._name = call_keys.name_of(call)
        self._keys = call_keys.positions(call.plan, call.ranks.rank, self._name)

    def begin_keys(self, part: int) -> Callable[[], Tensor]:
        """Sends own keys and values; the result waits for those of others, and returns (keys, B,
        Hkv, D + Dv) in the order of the sequence, with zeros between those that some row sees."""
        call, tensors, keys = self._call, self._parts[part], self._keys
        if keys is None:
            return call.plan.begin_gathered(call.ranks, one.packed(tensors.k, tensors.v))
        k, v = tensors.k, tensors.v
        make = k.new_zeros if call.by_position else k.new_empty
        rows: Tensor = make((len(keys), *k.shape[:2], k.shape[-1] + v.shape[-1]))
        coming = others.begin_keys(call, tensors)
        with completing([coming]):
            others.put_own(call, tensors, rows, keys, self._name)
        return lambda: rows.index_copy_(
            0, others.places(call, keys, self._name, rows.device), coming())

    def begin_sums(self, part: int, sums: Tensor, finish: Callable[[Sequence[Tensor]], None]
                   ) -> Callable[[], None]:
        """Sends sums for keys of others, of (keys, ...), to these; the result waits for those of
        others for own keys, and gives them to `finish`: of each rank (rows, ...)."""
        coming = others.begin_sums(self._call, sums, self._keys, self._name)
        return lambda: finish(others.by_rank(self._call, coming()))
