"""A case's results in float64, on a few heads, and the errors of others' results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..call import Call
from ..exact import Exact, Space
from .problem import Problem

# Error's norm over the result's norm.
TOLERANCE = {"cpu": {"f32": 2e-6, "bf16": 1e-2, "f16": 1.5e-3},
             "cuda": {"f32": 1e-5, "bf16": 1.5e-2, "f16": 2e-3}}
TOLERANCE_LSE = 1e-4

# (name, which part of a result, that part in float64, the size that its error is relative to)
Part = tuple[str, Callable[[Any], Any], Any, Any]


def exact_parts(problem: Problem) -> list[Part]:
    """The query heads of one kv head in one batch entry: the last ones; with dropout, which depends
    on their numbers, the first ones. All that a gradient is summed over is computed."""
    case, options = problem.case, problem.options
    group = case.heads // case.heads_kv
    one_bias = options["bias"].shape if "dbias" in problem.gradients else (0, 0)
    all_heads = "sink" in options or one_bias[1] == 1
    all_batches = "sink" in options or one_bias[0] == 1 or problem.packed
    first, last = (0, 1) if "dropout_p" in options else (-1, None)
    b = slice(None) if all_batches else slice(first, last)
    g = slice(None) if all_heads else slice(first, last)
    h = slice(None) if all_heads else slice(first * group, last and group)
    cut = functools.partial(_cut, problem, b, g, h)
    arrays = {name: cut(name, x) for name, x in problem.arrays().items()}
    q, k, v, dout, dlse = (arrays.pop(name, None) for name in ("q", "k", "v", "dout", "dlse"))
    call = Call(q, k, v, problem.call.options | arrays, "bhsd", problem.memory.view)
    found = Exact(call, Space(q), dout, dlse).run()
    found = {name: _used(problem, name, whole) for name, whole in found.items()}
    xp = problem.memory.xp
    return [(name, functools.partial(cut, name), whole,
             xp.linalg.norm(xp.where(xp.isfinite(whole), whole, 0.0)))
            for name, whole in found.items()]


def _cut(problem: Problem, b: slice, g: slice, h: slice, name: str, x: Any) -> Any:
    """The batch entries b and the query heads h (kv heads g) of the array with this name."""
    if name.startswith("cu_seqlens"):
        return x
    if name.startswith("seqused"):
        return x[b]
    if name in ("sink", "dsink", "alibi_slopes"):
        return x[h]
    if name in ("bias", "mask", "dbias"):
        return x[b if x.shape[0] > 1 else slice(None), h if x.shape[1] > 1 else slice(None)]
    heads = g if name in ("k", "v", "dk", "dv") else h
    if problem.packed:
        return x[heads] if name in ("lse", "dlse") else x[:, heads]
    return _used(problem, name, x[b, heads])


def _used(problem: Problem, name: str, x: Any) -> Any:
    """Without the keys' gradients past the end of their sequence, which nobody writes."""
    used = problem.options.get("seqused_k")
    return x if used is None or name not in ("dk", "dv") else x[:, :, :int(used[-1])]


def errors(parts: list[Part], results: dict[str, Any], problem: Problem) -> dict[str, float]:
    """The norm of the difference over the part's size, by result; the worst part of each. Where both
    are infinite, as the lse of a row without keys, they do not differ."""
    xp, double = problem.memory.xp, problem.memory.double
    found: dict[str, float] = {}
    for name, part, want, size in parts:
        if name in results:
            got = double(part(results[name]))
            same = got == want
            gap = xp.where(same, 0.0, got) - xp.where(same, 0.0, want)
            error = float(xp.linalg.norm(gap) / size)
            known = found.get(name, 0.0)
            found[name] = max(known, error) if error == error and known == known else float("nan")
    return found
