#!/usr/bin/env python3
"""Attention over one long text in a process of its own, so that its memory can be measured.

    python examples/long_text.py regard|numpy FILE.npz

FILE holds q, k, v and dout (1, H, S, D). Prints the seconds of the forward and of the backward
pass, and the most bytes held beyond what was there before.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def unfused_forward(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Arrays:
    """As a textbook writes it: (..., S, D) -> out, lse, and the table of weights (..., S, S)."""
    scores = q @ k.swapaxes(-1, -2)
    scores *= np.asarray(q.shape[-1] ** -0.5, q.dtype)
    largest = scores.max(-1, keepdims=True)
    scores -= largest
    weights = np.exp(scores, out=scores)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    return {"out": weights @ v, "lse": (largest + np.log(total))[..., 0], "weights": weights}


def unfused_backward(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray,
                     result: Arrays) -> Arrays:
    """The gradients of what unfused_forward returned."""
    weights = result["weights"]
    slope = dout @ v.swapaxes(-1, -2)
    slope -= (dout * result["out"]).sum(-1, keepdims=True)
    slope *= weights
    slope *= np.asarray(q.shape[-1] ** -0.5, q.dtype)
    return {"dq": slope @ k, "dk": slope.swapaxes(-1, -2) @ q,
            "dv": weights.swapaxes(-1, -2) @ dout}


def memory(field: str) -> int:
    """Bytes: VmRSS is what the process holds now, VmHWM the most that it ever held."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert found, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def main() -> None:
    method, path = sys.argv[1:]
    with np.load(path) as file:
        q, k, v, dout = (file[name] for name in ("q", "k", "v", "dout"))
    if method == "regard":
        import regard

        def forward() -> Arrays:
            return dict(zip(("out", "lse"), regard.attention(q, k, v, return_lse=True)))

        def backward(result: Arrays) -> object:
            return regard.attention_backward(dout, q, k, v, result["out"], result["lse"])
    else:
        def forward() -> Arrays:
            return unfused_forward(q, k, v)

        def backward(result: Arrays) -> object:
            return unfused_backward(q, k, v, dout, result)

    before = memory("VmRSS")
    begin = time.perf_counter()
    result = forward()
    middle = time.perf_counter()
    backward(result)
    print(middle - begin, time.perf_counter() - middle, max(0, memory("VmHWM") - before))


if __name__ == "__main__":
    main()
