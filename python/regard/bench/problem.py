"""The arrays of a case, as everybody who is timed gets them, and room for Regard's results."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from .. import _core
from .cases import Case
from .memory import Memory, NoMemory

SEQUSED_SHORTER = 37  # keys that the case "seqused" leaves out of each sequence


class Problem:
    """given: q, k, v (B, H, S, D), packed (B * S, H, D), and dout; extras: optional arrays by name.

    `core` is the prepared call of the library: between Python and it lies one function call.
    """

    def __init__(self, case: Case, memory: Memory | NoMemory) -> None:
        self.case = case
        self.memory = cast(Memory, memory)  # without memory, nothing but `core` is used
        options = dict(case.options)
        self.packed = options.pop("packed", False)
        self.unaligned = options.pop("unaligned", False)
        self.no_dbias = options.pop("no_dbias", False)
        self.wide = "f32" if options.pop("f32_outputs", False) else case.type
        self.has_dlse = options.pop("dlse", False)
        kv = case.batch, case.heads_kv, case.columns
        self.given = {"q": self._heads((*self.shape_rows, case.dim)),
                      "k": self._heads((*kv, case.dim)),
                      "v": self._heads((*kv, case.columns_out))}
        self.dropout: tuple[float, int, int] | None = options.pop("dropout", None)
        self.settings: dict[str, Any] = {}
        self.extras = self._extras(options)
        self.settings |= options  # window, softcap, deterministic
        if case.causal:
            self.settings["causal"] = "bottom_right"
        if self.dropout:
            names = ("dropout_p", "dropout_seed", "dropout_offset")
            self.settings |= dict(zip(names, self.dropout))
        q, k, v = (memory.view(self.given[name], name) for name in "qkv")
        extras = {name: memory.view(x, name) for name, x in self.extras.items()}
        self.core = _core.Problem(q, k, v, extras, **self.settings)
        if not isinstance(memory, NoMemory):
            self._make_results(memory)

    @property
    def shape_rows(self) -> tuple[int, int, int]:
        return self.case.batch, self.case.heads, self.case.rows

    def _make_results(self, memory: Memory) -> None:
        case, xp = self.case, memory.xp
        self.dout = self._heads((*self.shape_rows, case.columns_out), self.wide)
        self.dlse = memory.normal(self.shape_rows, "f32") if self.has_dlse else None
        self.out = self._like(self.dout, self.wide)
        rows = (case.heads, case.batch * case.rows) if self.packed else self.shape_rows
        self.lse = memory.empty(rows, "f32")
        self.gradients = {"d" + name: self._like(x, self.wide) for name, x in self.given.items()}
        if "bias" in self.extras and not self.no_dbias:
            self.gradients["dbias"] = xp.empty_like(self.extras["bias"])
        if "sink" in self.extras:
            self.gradients["dsink"] = xp.empty_like(self.extras["sink"])

    def _heads(self, shape: tuple[int, ...], type: str | None = None) -> Any:
        batch, heads, length, dim = shape
        if self.packed:
            return self.memory.normal((batch * length, heads, dim), type or self.case.type)
        x = self.memory.heads(shape, type or self.case.type)
        return self.memory.loosened(x) if self.unaligned else x

    def _like(self, x: Any, type: str) -> Any:
        """Of x's shape and order of memory, filled with NaN."""
        other = self.memory.empty((1,), type)
        result = self.memory.xp.empty_like(x, dtype=other.dtype)
        result[...] = float("nan")
        return result

    def _extras(self, options: dict[str, Any]) -> dict[str, Any]:
        """Arrays where the case has shapes and flags; takes these out of options."""
        case, memory = self.case, self.memory
        sizes = {"b": case.batch, "h": case.heads, "q": case.rows, "k": case.columns, "1": 1}
        extras: dict[str, Any] = {}
        if "bias" in options:
            shape = [sizes[letter] for letter in options.pop("bias")]
            extras["bias"] = memory.normal(shape, case.type)
        if "mask" in options:
            extras["mask"] = memory.kept([sizes[letter] for letter in options.pop("mask")], 0.9)
        if options.pop("alibi", False):
            power = np.arange(1, case.heads + 1, dtype=np.float32)
            extras["alibi_slopes"] = memory.placed(
                (2.0 ** (-8.0 * power / case.heads)).astype(np.float32))
        if options.pop("sink", False):
            extras["sink"] = memory.normal((case.heads,), "f32")
        if self.packed:
            for side, length in (("q", case.rows), ("k", case.columns)):
                begins = length * np.arange(case.batch + 1, dtype=np.int32)
                extras["cu_seqlens_" + side] = memory.placed(begins)
                self.settings["max_seqlen_" + side] = length
        if options.pop("seqused", False):
            used = np.full(case.batch, case.columns - SEQUSED_SHORTER, np.int32)
            extras["seqused_k"] = memory.placed(used)
        return extras

    # ------------------------------------------------------------------------ one head of an array

    def head(self, x: Any, b: int, h: int) -> Any:
        """(S, ...) of one head; of a packed array, of one sequence of equal ones."""
        if not self.packed:
            return x[b, h]
        length = len(x) // self.case.batch
        return x[b * length : (b + 1) * length, h]

    def head_lse(self, x: Any, b: int, h: int) -> Any:
        """(Sq) of lse or dlse."""
        rows = self.case.rows
        return x[h, b * rows : (b + 1) * rows] if self.packed else x[b, h]
