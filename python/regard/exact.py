"""Attention and its gradients by their definition: the reference of `check` and of the benchmark.

Written from docs/semantics.md with matrices of NumPy, CuPy or PyTorch, a block of rows at a time;
shares no code with the library. The same code in the type of the inputs, with each intermediate
matrix rounded to it, is the unfused computation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .arrays import framework_of
from .call import Call
from .element_types import NAMES
from .gradients import Gradients

_ELEMENTS = 2**22  # of a block's matrices


class Space:
    """The framework and the device of the matrices: NumPy, or CuPy's or PyTorch's device."""

    def __init__(self, like: Any) -> None:
        package = type(like).__module__.partition(".")[0]
        torch = sys.modules.get("torch")
        self.torch = torch is not None and isinstance(like, torch.Tensor)
        self.device = like.device if self.torch else None
        if self.torch:
            self.xp: Any = torch
        elif package == "cupy":
            self.xp = sys.modules["cupy"]
        else:
            import numpy

            self.xp = numpy

    def here(self, x: Any) -> Any:
        """An array of any framework as one of this space, without its gradient."""
        if self.torch:
            return x.detach()
        return x if self.xp.__name__ == "cupy" else self.xp.asarray(x)

    def cast(self, x: Any, type: str) -> Any:
        if self.torch:
            return x.to(getattr(self.xp, NAMES[type]))
        if type == "bf16":
            import ml_dtypes

            return x.astype(ml_dtypes.bfloat16)
        return x.astype(NAMES[type])

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        more = {"device": self.device} if self.torch else {}
        return self.xp.full(tuple(shape), value, dtype=self.xp.float64, **more)

    def order(self, begin: int, end: int) -> Any:
        return self.xp.arange(begin, end, **({"device": self.device} if self.torch else {}))

    def from_numpy(self, x: Any) -> Any:
        if self.torch:
            return self.xp.from_numpy(x).to(self.device)
        return self.xp.asarray(x)


@dataclass
class Exact:
    """One call's results. work: the type of the arithmetic; rounded: applied to each matrix;
    with_terms: also what the gradients' terms sum to in absolute value."""

    call: Call
    space: Space
    dout: Any = None  # None: forward only
    dlse: Any = None
    work: str = "f64"
    rounded: Callable[[Any], Any] = lambda x: x
    with_terms: bool = False
    results: dict[str, Any] = field(default_factory=dict)
    terms: dict[str, Any] = field(default_factory=dict)  # of each gradient, in its shape

    def run(self) -> dict[str, Any]:
        """out, lse, and with dout the gradients, in float64 and the user's layout."""
        call, space = self.call, self.space
        self.results = {"out": space.full(call.out_shape(), 0.0),
                        "lse": space.full(call.lse_shape(), -math.inf)}
        if self.dout is not None:
            for name, x in (("dq", call.q), ("dk", call.k), ("dv", call.v),
                            ("dbias", call.options["bias"]), ("dsink", call.options["sink"])):
                if x is not None:
                    self.results[name] = space.full(x.shape, 0.0)
                    self.terms[name] = space.full(x.shape, 0.0)
        heads = call.q.shape[2 if call.rows_first else 1]
        for b, rows_q, rows_k in self._sequences():
            for h in range(heads):
                self._head(b, h, rows_q, rows_k)
        return self.results

    # ------------------------------------------------------------------------------ parts of arrays

    def _sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """The number of each batch entry, and its rows of q and of k."""
        tables = {name: None if x is None else [int(n) for n in self.space.here(x).tolist()]
                  for name, x in self.call.options.items() if name.startswith(("cu_", "seqused"))}
        begins_q, begins_k = tables["cu_seqlens_q"], tables["cu_seqlens_k"]
        axis = 1 if self.call.layout == "bshd" else 2
        count = self.call.q.shape[0] if begins_q is None else len(begins_q) - 1

        def rows(x: Any, begins: list[int] | None, used: list[int] | None, b: int) -> slice:
            begin, end = (0, x.shape[axis]) if begins is None else (begins[b], begins[b + 1])
            return slice(begin, end if used is None else begin + used[b])

        for b in range(count):
            yield (b, rows(self.call.q, begins_q, tables["seqused_q"], b),
                   rows(self.call.k, begins_k, tables["seqused_k"], b))

    def _at(self, x: Any, b: int, h: int, rows: slice) -> Any:
        """A view of one head's rows."""
        if self.call.packed:
            return x[rows, h]
        return x[b, rows, h] if self.call.rows_first else x[b, h, rows]

    def _sums_at(self, x: Any, b: int, h: int, rows: slice) -> Any:
        return x[h, rows] if self.call.packed else x[b, h, rows]

    def _matrix(self, x: Any) -> Any:
        return self.space.cast(self.space.here(x), self.work)

    def _scores_at(self, x: Any, b: int, h: int, i: slice, n: int) -> Any:
        """The part of a bias or a mask for these rows and n keys, (1 or rows, 1 or n)."""
        x = self.space.here(x)
        x = x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
        x = x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]
        x = x[i] if x.shape[0] > 1 else x
        return x[:, :n] if x.shape[1] > 1 else x

    def _spans_show(self, name: str, b: int, h: int, rows: slice, x: Any) -> Any:
        """Which of the indices x, a row, the spans of each of these rows hold."""
        spans = self.space.here(self.call.options[name])
        if not self.call.packed:
            spans = spans.reshape((1,) * (4 - spans.ndim) + tuple(spans.shape))
            spans = spans[b if spans.shape[0] > 1 else 0]
        spans = spans[h if spans.shape[0] > 1 else 0]
        spans = spans[rows] if spans.shape[0] > 1 else spans
        shown = x < 0
        for n in range(0, spans.shape[1], 2):
            shown = shown | (spans[:, n, None] <= x) & (x < spans[:, n + 1, None])
        return shown

    def _positions(self, b: int, i: slice) -> Any:
        """Where these rows stand, less where key 0 does; None where no positions are given."""
        table, first_key = self.call.options["q_positions"], self.call.options["k_position"]
        row = self.space.order(i.start, i.stop)
        if table is None:
            return row - first_key if first_key else None
        table = self.space.here(table)
        table = table[b] if table.ndim == 2 else table
        return table[row // 128] + row % 128 - first_key

    # ------------------------------------------------------------------------------ the computation

    def _head(self, b: int, h: int, rows_q: slice, rows_k: slice) -> None:
        call, found = self.call, self.results
        heads_axis = 2 if call.rows_first else 1
        g = h // (call.q.shape[heads_axis] // call.k.shape[heads_axis])
        k, v = (self._matrix(self._at(x, b, g, rows_k)) for x in (call.k, call.v))
        length, n = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        step = max(1, _ELEMENTS // max(1, n))
        for begin in range(0, length, step):
            i = slice(begin, min(begin + step, length))
            rows = slice(rows_q.start + i.start, rows_q.start + i.stop)
            block = _Block(self, b, h, i, length, self._matrix(self._at(call.q, b, h, rows)), k, v,
                           rows, rows_k)
            self._at(found["out"], b, h, rows)[...] = block.out
            self._sums_at(found["lse"], b, h, rows)[...] = block.lse
            if self.dout is None:
                continue
            dlse = 0.0 if self.dlse is None else self._matrix(self._sums_at(self.dlse, b, h, rows))
            dout = self._matrix(self._at(self.dout, b, h, rows))
            self._add(found, block.backward(dout, dlse), b, h, g, i, rows, rows_k)
            if self.with_terms:
                self._add(self.terms, block.terms(dout, dlse), b, h, g, i, rows, rows_k)

    def _add(self, to: dict[str, Any], part: Gradients, b: int, h: int, g: int, i: slice,
             rows: slice, rows_k: slice) -> None:
        """Adds what these rows of a head have to the gradients."""
        self._at(to["dq"], b, h, rows)[...] = part.dq
        self._at(to["dk"], b, g, rows_k)[...] += part.dk
        self._at(to["dv"], b, g, rows_k)[...] += part.dv
        if "dsink" in to:
            to["dsink"][h] += part.dsink
        if "dbias" in to:
            dbias, ds = self._scores_at(to["dbias"], b, h, i, rows_k.stop - rows_k.start), part.dbias
            for axis in (0, 1):
                ds = ds.sum(axis, keepdims=True) if dbias.shape[axis] == 1 else ds
            dbias[...] += ds  # a view


class _Block:
    """The scores, weights and results of some rows of one head."""

    def __init__(self, exact: Exact, b: int, h: int, i: slice, length: int, q: Any, k: Any,
                 v: Any, rows: slice, rows_k: slice) -> None:
        xp, rnd, options = exact.space.xp, exact.rounded, exact.call.options
        self.exact, self.q, self.k, self.v = exact, q, k, v
        n = k.shape[0]
        self.scale = q.shape[1] ** -0.5 if options["scale"] is None else options["scale"]
        score = rnd(rnd(q @ k.T) * self.scale)
        self.slope: Any = 1.0
        if options["softcap"] > 0:
            score = rnd(options["softcap"] * xp.tanh(score / options["softcap"]))
            self.slope = 1 - (score / options["softcap"]) ** 2
        if options["bias"] is not None:
            score = rnd(score + exact._matrix(exact._scores_at(options["bias"], b, h, i, n)))
        row = exact.space.order(i.start, i.stop)[:, None]
        column = exact.space.order(0, n)[None, :]
        place = exact._positions(b, i)  # of each row less that of key 0; None without positions
        diagonal = row if options["causal"] == "top_left" else row + n - length
        if place is not None:
            diagonal = place[:, None]
        if options["alibi_slopes"] is not None:
            slopes = exact._matrix(options["alibi_slopes"])
            slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
            distance = (row + n - length if place is None else diagonal) - column
            score = rnd(score - slope * exact._matrix(abs(distance)))
        left, right = options["window"]
        seen = (column >= diagonal - left) if left >= 0 else (column >= 0) | (row < 0)
        seen = seen & (column <= diagonal + right) if right >= 0 else seen
        seen = seen & (column <= diagonal) if options["causal"] != "none" else seen
        if options["mask"] is not None:
            seen = seen & exact._scores_at(options["mask"], b, h, i, n)
        if options["row_spans"] is not None:
            seen = seen & exact._spans_show("row_spans", b, h, rows, column)
        if options["key_spans"] is not None:
            seen = seen & exact._spans_show("key_spans", b, h, rows_k, row[:, 0][None, :]).T
        score = xp.where(seen, score, -math.inf)
        self.sink = None if options["sink"] is None else exact._matrix(options["sink"])[h]
        self.lse = self._log_sum(score)
        weights = xp.exp(score - xp.where(self.lse == -math.inf, 0.0, self.lse)[:, None])
        self.weights = rnd(weights)
        self.factor: Any = 1.0
        if options["dropout_p"] > 0:
            self.factor = exact._matrix(exact.space.from_numpy(_kept(options, b, h, place, i, n)))
        self.dropped = rnd(self.weights * self.factor)
        self.out = rnd(self.dropped @ v)

    def _log_sum(self, score: Any) -> Any:
        """The logarithm of each row's sum of exponentials, including the sink's."""
        xp = self.exact.space.xp
        largest = xp.amax(score, 1) if score.shape[1] else xp.full_like(self.q[:, 0], -math.inf)
        if self.sink is not None:
            largest = xp.where(largest > self.sink, largest, self.sink)
        shift = xp.where(largest == -math.inf, 0.0, largest)
        total = xp.exp(score - shift[:, None]).sum(1)
        if self.sink is not None:
            total = total + xp.exp(self.sink - shift)
        return xp.where(total > 0, xp.log(xp.where(total > 0, total, 1.0)) + shift, -math.inf)

    def backward(self, dout: Any, dlse: Any) -> Gradients:
        """Those of these rows; dbias is that of each pair."""
        delta = self.exact.rounded((dout * self.out).sum(1)) - dlse
        return self._gradients(dout, self.q, self.k, self.v, delta)

    def terms(self, dout: Any, dlse: Any) -> Gradients:
        """The sums of the absolute values of the terms of each gradient."""
        delta = abs(dout * self.out).sum(1) + abs(dlse)
        return self._gradients(abs(dout), abs(self.q), abs(self.k), abs(self.v), -delta)

    def _gradients(self, dout: Any, q: Any, k: Any, v: Any, delta: Any) -> Gradients:
        rnd = self.exact.rounded
        dp = rnd(rnd(dout @ v.T) * self.factor)
        ds = rnd(self.weights * (dp - delta[:, None]))
        dr = rnd(ds * self.slope)
        dsink = None if self.sink is None else -(self._share_of_sink() * delta).sum()
        return Gradients(rnd(self.scale * (dr @ k)), rnd(self.scale * (dr.T @ q)),
                         rnd(self.dropped.T @ dout), ds, dsink)

    def _share_of_sink(self) -> Any:
        xp = self.exact.space.xp
        return xp.exp(self.sink - xp.where(self.lse == -math.inf, math.inf, self.lse))


def _kept(options: dict[str, Any], b: int, h: int, place: Any, rows: slice, columns: int) -> Any:
    """The factors of dropout, 0 or 1 / (1 - p), as a NumPy matrix. place: as of Exact._positions."""
    import numpy as np

    threshold = min(65535, math.floor(65536 * options["dropout_p"] + 0.5))
    seed, offset, low = options["dropout_seed"], options["dropout_offset"], 0xFFFFFFFF
    if not isinstance(seed, int):
        seed = framework_of(seed, "dropout_seed").seed_number(seed, "dropout_seed")
    key = _philox([offset & low, offset >> 32 & low, 0, 0], [seed & low, seed >> 32 & low], 10)[:2]
    first_key = options["k_position"]  # a multiple of 32
    row = np.arange(rows.start, rows.stop)
    if place is not None:
        row = np.asarray(place.tolist()) + first_key
    group = np.arange(-(-columns // 32) * 4, dtype=np.uint64)[None, :] + np.uint64(first_key // 8)
    words = _philox([group, row.astype(np.uint64)[:, None], np.uint64(h + options["head_begin"]),
                     np.uint64(b + options["batch_begin"])], [int(word) for word in key], 7)
    column = np.arange(columns)
    lane = column % 32 // 8 * 2 + column % 2
    word = np.stack(np.broadcast_arrays(*words))[lane // 2, :, column // 32 * 4 + column % 8 // 2]
    sixteen = word.T >> np.uint64(16) * (lane % 2).astype(np.uint64) & np.uint64(0xFFFF)
    return (sixteen >= threshold) / (1 - threshold / 65536)


def _philox(counter: list[Any], key: list[int], rounds: int) -> list[Any]:
    """Philox4x32; each 32-bit word is held in 64 bits."""
    import numpy as np

    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, d = (np.asarray(word, np.uint64) for word in counter)
    for n in range(rounds):
        first, second = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        key_0, key_1 = ((word + n * step) & 0xFFFFFFFF
                        for word, step in zip(key, (0x9E3779B9, 0xBB67AE85)))
        a, b, c, d = ((second >> half) ^ b ^ np.uint64(key_0), second & low,
                      (first >> half) ^ d ^ np.uint64(key_1), first & low)
    return [a, b, c, d]
