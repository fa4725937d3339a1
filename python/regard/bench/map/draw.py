"""Random problems. One is a function of seed and number alone, so that any can be repeated."""

from __future__ import annotations

import math
from random import Random

from ..cases import SIZE_OF, Case

# How many of each kind, of those that the peers of a device can run.
KINDS = {"cuda": {"square": 8, "packed": 4, "cross": 3, "decode": 3, "window": 2},
         "cpu": {"square": 8, "cross": 3, "decode": 3}}
# Operations of a forward pass at most, so that it takes milliseconds: 16-bit types, f32.
MOST_FLOPS = {"cuda": (1e12, 1e11), "cpu": (1e9, 1e9)}
MOST_HEADS = 128
MOST_BYTES = 2**28  # of q, and of k and v together


def drawn(device: str, seed: int, number: int) -> Case:
    """device: "cpu" or "cuda"."""
    random = Random(f"{device} {seed} {number}")
    kinds = KINDS[device]
    [kind] = random.choices(list(kinds), list(kinds.values()))
    [type] = random.choices(["bf16", "f16", "f32"], [4, 3, 3])
    while True:
        case = _drawn(random, kind, type, number)
        bytes_q = case.batch * case.heads * case.rows * case.dim * SIZE_OF[type]
        if (case.heads <= MOST_HEADS and max(bytes_q, case.bytes()) <= MOST_BYTES
                and _flops(case) <= MOST_FLOPS[device][type == "f32"]):
            return case


def log_uniform(random: Random, low: int, high: int) -> int:
    return round(math.exp(random.uniform(math.log(low), math.log(high))))


def _drawn(random: Random, kind: str, type: str, number: int) -> Case:
    heads_kv = log_uniform(random, 1, 32)
    heads = heads_kv * (1 if random.random() < 0.3 else log_uniform(random, 1, 32))
    dim = random.choice((64, 128)) if random.random() < 0.4 else 8 * random.randint(4, 32)
    causal = random.random() < 0.5
    batch = log_uniform(random, 1, 64)
    rows, columns = (log_uniform(random, 32, 32768) for _ in range(2))
    options: dict[str, object] = {}
    if kind in ("square", "window"):
        columns = rows
    if kind == "window":
        left = log_uniform(random, 8, rows)
        options["window"] = (left, 0) if causal else (left, left)
        causal = False
    if kind == "decode":
        rows = 1 if random.random() < 0.6 else random.randint(2, 16)
        columns = log_uniform(random, 128, 131072)
        causal = causal and rows > 1
    if kind == "packed":
        longest, batch = log_uniform(random, 32, 8192), log_uniform(random, 8, 64)
        lengths = [tuple(random.randint(1, longest) for _ in range(batch)) for _ in range(2)]
        if causal or random.random() < 0.7:
            lengths[1] = lengths[0]
        options["packed"] = tuple(lengths)
        rows, columns = (max(side) for side in lengths)
    causal = causal and rows <= columns  # otherwise rows see nothing, where peers differ
    passes = ("fwd",) if kind == "decode" else ("fwd", "bwd")
    return Case(_name(number, type, batch, (heads, heads_kv), (rows, columns), dim, causal, options),
                kind, batch, heads, heads_kv, rows, columns, dim, type, causal, options,
                passes=passes)


def _name(number: int, type: str, batch: int, heads: tuple[int, int], lengths: tuple[int, int],
          dim: int, causal: bool, options: dict[str, object]) -> str:
    """17-bf16-b4-h8/2-s512/1024-d64-causal; packed lengths are the longest ones."""
    name = f"{number}-{type}-b{batch}-h{heads[0]}/{heads[1]}-s{lengths[0]}/{lengths[1]}-d{dim}"
    name += "-packed" if "packed" in options else ""
    if isinstance(window := options.get("window"), tuple):
        name += f"-window{window[0]},{window[1]}"
    return name + ("-causal" if causal else "")


def _flops(case: Case) -> float:
    """Of a forward pass without a mask."""
    lengths = case.options.get("packed")
    pairs = (sum(q * k for q, k in zip(*lengths)) if lengths else
             case.batch * case.rows * case.columns)
    return 4.0 * case.heads * pairs * case.dim
