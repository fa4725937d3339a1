"""Keys and sums of a pass by collectives of the group: all-gathers and all-to-alls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from . import call_keys, key_rows, others
from .call import Call, Pair, Tensors, sums_type
from .ranks import completing


class Exchange:
    """One pass, whose calls have the heads of `parts`, one after the other.

    at_once: whether calls in the contexts of `side_by_side` may be under way at once."""

    at_once = False

    def __init__(self, call: Call, parts: Sequence[Tensors]) -> None:
        self._call, self._parts = call, parts
        self._name = call_keys.name_of(call)
        self._sums: dict[int, Tensor] = {}
        self._keys = call_keys.positions(call.plan, call.ranks.rank, self._name)

    def begin_keys(self, part: int) -> Callable[[], Pair]:
        """Sends own keys and values; the result waits for those of others, and returns keys and values
        in the order of the sequence, with zeros between those that some row sees."""
        coming, size = self._begin_rows(part), self._parts[part].k.shape[-1]
        return lambda: key_rows.unpacked(coming(), size)

    def _begin_rows(self, part: int) -> Callable[[], Tensor]:
        """Likewise (keys, B, Hkv, D + Dv)."""
        call, tensors, keys = self._call, self._parts[part], self._keys
        if keys is None:
            return call.plan.begin_gathered(call.ranks, key_rows.packed(tensors.k, tensors.v))
        make = tensors.k.new_zeros if call.by_position else tensors.k.new_empty
        rows: Tensor = make(key_rows.packed_shape(len(keys), tensors.k, tensors.v))
        coming = others.begin_keys(call, tensors)
        with completing([coming]):
            others.put_own(call, tensors, rows, self._name)
        return lambda: rows.index_copy_(
            0, others.places(call, keys, self._name, rows.device), coming())

    def side_by_side(self, count: int
                     ) -> AbstractContextManager[Callable[[int], AbstractContextManager[None]]]:
        """As peers.Exchange, but calls are one after the other."""
        return nullcontext(lambda number: nullcontext())

    def empty_sums(self, part: int) -> Pair:
        """For the sums of a call over the keys of `begin_keys`."""
        k, v = self._parts[part].k, self._parts[part].v
        count = call_keys.counts(self._call.plan, self._name)[self._call.ranks.rank]
        self._sums[part] = k.new_empty(key_rows.packed_shape(count, k, v), dtype=sums_type(k))
        return key_rows.unpacked(self._sums[part], k.shape[-1])

    def begin_sums(self, part: int, sums: Pair, finish: Callable[[Sequence[Pair | None]], None]
                   ) -> Callable[[], None]:
        """Sends others the sums for their keys, of what `empty_sums` made; the result waits for those
        for own keys, and gives them to `finish`: of each rank those for the keys that it needs."""
        coming = others.begin_sums(self._call, self._sums.pop(part), self._keys, self._name)
        size = sums.k.shape[-1]

        def wait() -> None:
            came = others.by_rank(self._call, coming())
            finish([key_rows.unpacked(x, size) if len(x) else None for x in came])

        return wait
