"""The arrays of a case, which all sides share, and the arrays for Regard's results."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ..call import call_of
from ..options import ARRAYS
from .cases import Case
from .memory import Memory, NoMemory

SEQUSED_SHORTER = 37  # keys that the case "seqused" leaves out of each sequence


class Problem:
    """given: q, k, v (B, H, S, D), packed (B * S, H, D); options: as `regard.attention` takes them.

    `core` is the prepared call: timing it includes one call from Python into the library.
    """

    def __init__(self, case: Case, memory: Memory | NoMemory) -> None:
        self.case = case
        self.memory = cast(Memory, memory)  # of NoMemory only what `core` needs is used
        options = dict(case.options)
        packed = options.pop("packed", False)  # True, or the lengths of the sequences of q and k
        self.packed = bool(packed)
        self.lengths = packed if isinstance(packed, tuple) else (
            (case.rows,) * case.batch, (case.columns,) * case.batch)
        self.unaligned = options.pop("unaligned", False)
        self.no_dbias = options.pop("no_dbias", False)
        self.wide = "f32" if options.pop("f32_outputs", False) else case.type
        self.has_dlse = options.pop("dlse", False)
        kv = case.batch, case.heads_kv, case.columns
        self.given = {"q": self._heads((*self.shape_rows, case.dim)),
                      "k": self._heads((*kv, case.dim), keys=True),
                      "v": self._heads((*kv, case.columns_out), keys=True)}
        self.options = self._options(options)
        q, k, v = self.given.values()
        self.call = call_of(q, k, v, self.memory.view, self.options)
        self.core = self.call.problem()
        if not isinstance(memory, NoMemory):
            self._make_results(memory)

    @property
    def shape_rows(self) -> tuple[int, int, int]:
        return self.case.batch, self.case.heads, self.case.rows

    def _make_results(self, memory: Memory) -> None:
        case, xp = self.case, memory.xp
        self.dout = self._heads((*self.shape_rows, case.columns_out), type=self.wide)
        self.dlse = memory.normal(self.shape_rows, "f32") if self.has_dlse else None
        self.out = self._like(self.dout, self.wide)
        rows = (case.heads, sum(self.lengths[0])) if self.packed else self.shape_rows
        self.lse = memory.empty(rows, "f32")
        self.gradients = {"d" + name: self._like(x, self.wide) for name, x in self.given.items()}
        if "bias" in self.options and not self.no_dbias:
            self.gradients["dbias"] = xp.empty_like(self.options["bias"])
        if "sink" in self.options:
            self.gradients["dsink"] = xp.empty_like(self.options["sink"])

    def arrays(self) -> dict[str, Any]:
        """What a call reads, by name."""
        extras = {name: self.options[name] for name in ARRAYS if name in self.options}
        gradients = {"dout": self.dout} | ({} if self.dlse is None else {"dlse": self.dlse})
        return self.given | extras | gradients

    def _heads(self, shape: tuple[int, ...], keys: bool = False, type: str = "") -> Any:
        if self.packed:
            total, (_, heads, _, dim) = sum(self.lengths[keys]), shape
            return self.memory.normal((total, heads, dim), type or self.case.type)
        x = self.memory.heads(shape, type or self.case.type)
        return self.memory.loosened(x) if self.unaligned else x

    def _like(self, x: Any, type: str) -> Any:
        """Of x's shape and order of memory, filled with NaN."""
        other = self.memory.empty((1,), type)
        result = self.memory.xp.empty_like(x, dtype=other.dtype)
        result[...] = float("nan")
        return result

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The case's options, with arrays for their shapes and flags."""
        case, memory = self.case, self.memory
        sizes = {"b": case.batch, "h": case.heads, "q": case.rows, "k": case.columns, "1": 1}
        if "bias" in options:
            shape = [sizes[letter] for letter in options["bias"]]
            options["bias"] = memory.normal(shape, case.type)
        if "mask" in options:
            options["mask"] = memory.kept([sizes[letter] for letter in options["mask"]], 0.9)
        if options.pop("alibi", False):
            power = np.arange(1, case.heads + 1, dtype=np.float32)
            options["alibi_slopes"] = memory.placed(
                (2.0 ** (-8.0 * power / case.heads)).astype(np.float32))
        if "sink" in options:
            options["sink"] = memory.normal((case.heads,), "f32")
        if self.packed:
            for side, lengths in zip("qk", self.lengths):
                begins = np.cumsum((0, *lengths), dtype=np.int32)
                options["cu_seqlens_" + side] = memory.placed(begins)
                options["max_seqlen_" + side] = max(lengths)
        if used := options.pop("seqused", False):  # True, or how many of each sequence
            lengths = used if isinstance(used, tuple) else case.columns - SEQUSED_SHORTER
            options["seqused_k"] = memory.placed(np.full(case.batch, lengths, np.int32))
        if case.causal:
            options["causal"] = "bottom_right"
        return options
