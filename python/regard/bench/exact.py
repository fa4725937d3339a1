"""A case's results in float64, on a few heads, a block of rows at a time; and errors from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import dropout_mask, dropout_probability
from .problem import Problem

BLOCK = 512  # query rows at a time
CHECKED_BIAS_ROWS = 256
# Error's norm over the result's norm.
TOLERANCE = {"cpu": {"f32": 2e-6, "bf16": 1e-2, "f16": 1.5e-3},
             "cuda": {"f32": 1e-5, "bf16": 1.5e-2, "f16": 2e-3}}
TOLERANCE_LSE = 1e-4

# (name, which part of a result, that part in float64, the size that its error is relative to)
Part = tuple[str, Callable[[Any], Any], Any, Any]


def exact_parts(problem: Problem) -> list[Part]:
    """The heads of the last kv head; with dropout the first head, whose mask is the cheapest."""
    case, xp = problem.case, problem.memory.xp
    group = case.heads // case.heads_kv
    b, g, keep = case.batch - 1, case.heads_kv - 1, None
    if problem.dropout:
        p, seed, offset = problem.dropout
        keep = problem.memory.placed(
            dropout_mask(1, 1, case.rows, case.columns, p, seed=seed, offset=offset)[0, 0])
        b = g = 0
    parts: list[Part] = []
    dk: Any = 0.0
    dv: Any = 0.0
    for h in range(g * group, (g + 1) * group if keep is None else 1):
        blocks = [_block(problem, b, h, rows, keep) for rows in _blocks(case.rows)]
        dk = dk + sum(block["dk"] for block in blocks)
        dv = dv + sum(block["dv"] for block in blocks)
        for name in ("out", "dq", "lse"):
            one = problem.head_lse if name == "lse" else problem.head
            whole = xp.concatenate([block[name] for block in blocks])
            parts.append((name, functools.partial(_part, one, b, h), whole,
                          xp.linalg.norm(whole)))
    if keep is None or group == 1:
        n = _columns(problem)
        for name, whole in (("dk", dk), ("dv", dv)):
            parts.append((name, lambda x: problem.head(x, b, g)[:n], whole, xp.linalg.norm(whole)))
    if "dbias" in problem.gradients:
        parts.append(_exact_dbias(problem, keep))
    if "dsink" in problem.gradients:
        parts.append(_exact_dsink(problem))
    return parts


def errors(parts: list[Part], results: dict[str, Any], problem: Problem) -> dict[str, float]:
    """The norm of the difference over the part's size, by result; the worst part of each."""
    norm, double = problem.memory.xp.linalg.norm, problem.memory.double
    found: dict[str, float] = {}
    for name, part, want, size in parts:
        if name in results:
            error = float(norm(double(part(results[name])) - want) / size)
            known = found.get(name, 0.0)
            found[name] = max(known, error) if error == error and known == known else float("nan")
    return found


def _part(one: Callable[[Any, int, int], Any], b: int, h: int, x: Any) -> Any:
    return one(x, b, h)


def _blocks(rows: int) -> list[slice]:
    return [slice(begin, min(begin + BLOCK, rows)) for begin in range(0, rows, BLOCK)]


def _columns(problem: Problem) -> int:
    used = problem.extras.get("seqused_k")
    return problem.case.columns if used is None else int(used[-1])


def _block(problem: Problem, b: int, h: int, rows: slice, keep: Any) -> dict[str, Any]:
    """out, lse, dq and ds (the scores' gradient) of the rows; their share of dk, dv and dsink."""
    case, extras, settings = problem.case, problem.extras, problem.settings
    memory, n = problem.memory, _columns(problem)
    xp, double = memory.xp, memory.double
    group = case.heads // case.heads_kv
    q = double(problem.head(problem.given["q"], b, h)[rows])
    k, v = (double(problem.head(problem.given[x], b, h // group)[:n]) for x in "kv")
    dout = double(problem.head(problem.dout, b, h)[rows])
    score = case.dim**-0.5 * (q @ k.T)
    slope: Any = 1.0
    if settings.get("softcap"):
        capped = xp.tanh(score / settings["softcap"])
        score, slope = settings["softcap"] * capped, 1 - capped**2

    def part(x: Any) -> Any:
        x = x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]
        return (x[rows] if x.shape[0] > 1 else x)[:, :n]

    if "bias" in extras:
        score = score + double(part(extras["bias"]))
    i = memory.order(case.rows)[rows][:, None] + n - case.rows
    j = memory.order(n)[None, :]
    if "alibi_slopes" in extras:
        score = score - double(extras["alibi_slopes"])[h] * abs(i - j)
    hidden = (j > i) & case.causal
    left, right = settings.get("window", (-1, -1))
    hidden = hidden | (j < i - left) if left >= 0 else hidden
    hidden = hidden | (j > i + right) if right >= 0 else hidden
    if "mask" in extras:
        hidden = hidden | ~part(extras["mask"])
    score = xp.where(hidden, -np.inf, score)
    largest = xp.amax(score, axis=1)
    lse = largest + xp.log(xp.exp(score - largest[:, None]).sum(1))
    if "sink" in extras:
        lse = xp.logaddexp(lse, double(extras["sink"])[h])
    weights = xp.exp(score - lse[:, None])
    factor: Any = 1.0
    if keep is not None:
        factor = double(keep[rows][:, :n]) / (1 - dropout_probability(settings["dropout_p"]))
    out = (weights * factor) @ v
    delta = (dout * out).sum(1)
    if problem.dlse is not None:
        delta = delta - double(problem.head_lse(problem.dlse, b, h)[rows])
    ds = weights * (factor * (dout @ v.T) - delta[:, None])
    dr = case.dim**-0.5 * ds * slope
    block = {"out": out, "lse": lse, "dq": dr @ k, "dk": dr.T @ q,
             "dv": (weights * factor).T @ dout, "ds": ds}
    if "sink" in extras:
        block["dsink"] = -xp.exp(double(extras["sink"])[h] - lse) * delta
    return block


def _exact_dbias(problem: Problem, keep: Any) -> Part:
    """Some rows of the last head, or all of a bias without rows; summed as it is broadcast."""
    case = problem.case
    shape = problem.extras["bias"].shape
    b_last, h_last = shape[0] - 1, shape[1] - 1
    end = CHECKED_BIAS_ROWS if shape[2] > 1 else case.rows
    total: Any = 0.0
    for b in range(case.batch) if shape[0] == 1 else [b_last]:
        for h in range(case.heads) if shape[1] == 1 else [h_last]:
            if shape[2] > 1:
                rows = slice(0, min(end, case.rows))
                total = total + _block(problem, b, h, rows, keep)["ds"]
            else:
                total = total + sum(_block(problem, b, h, rows, keep)["ds"].sum(0)[None, :]
                                    for rows in _blocks(case.rows))
    checked = min(CHECKED_BIAS_ROWS, shape[2])
    return ("dbias", lambda x: x[b_last, h_last, :checked], total,
            problem.memory.xp.linalg.norm(total))


def _exact_dsink(problem: Problem) -> Part:
    """Of the last head: a sum over all batches and rows, of both signs; relative to its terms."""
    case, xp = problem.case, problem.memory.xp
    h = case.heads - 1
    terms = xp.concatenate([_block(problem, b, h, rows, None)["dsink"]
                            for b in range(case.batch) for rows in _blocks(case.rows)])
    return "dsink", lambda x: x[h:], terms.sum()[None], xp.linalg.norm(terms)
