#!/usr/bin/env python3
"""Attention as a textbook writes it in NumPy: the whole table of weights, forward and backward.

As a program it runs a .safetensors file of q, k, v and dout (H, S, D) and prints its seconds:

    python examples/unfused.py FILE.safetensors
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import tensorfile

Arrays = dict[str, np.ndarray]


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> Arrays:
    """q, k, v (H, S, D) -> out (H, S, D), lse (H, S) and the weights (H, S, S), in q's type."""
    scores = q @ k.swapaxes(-1, -2)
    scores *= np.asarray(q.shape[-1] ** -0.5, q.dtype)
    if causal:
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    largest = scores.max(-1, keepdims=True)
    scores -= largest
    weights = np.exp(scores, out=scores)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    return {"out": weights @ v, "lse": (largest + np.log(total))[..., 0], "weights": weights}


def backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, result: Arrays
) -> Arrays:
    """The gradients of what forward returned: dq, dk, dv (H, S, D)."""
    weights = result["weights"]
    slope = dout @ v.swapaxes(-1, -2)
    slope -= (dout * result["out"]).sum(-1, keepdims=True)
    slope *= weights
    slope *= np.asarray(q.shape[-1] ** -0.5, q.dtype)
    return {
        "dq": slope @ k,
        "dk": slope.swapaxes(-1, -2) @ q,
        "dv": weights.swapaxes(-1, -2) @ dout,
    }


def main() -> None:
    tensors, _ = tensorfile.load(Path(sys.argv[1]))
    q, k, v, dout = (tensors[name] for name in ("q", "k", "v", "dout"))
    q, k, v, dout = (x.reshape(x.shape[-3:]) for x in (q, k, v, dout))
    begin = time.perf_counter()
    result = forward(q, k, v)
    middle = time.perf_counter()
    backward(q, k, v, dout, result)
    print(middle - begin, time.perf_counter() - middle)


if __name__ == "__main__":
    main()
