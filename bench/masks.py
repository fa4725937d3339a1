#!/usr/bin/env python3
"""What masks cost on the CPU: times of calls with a mask over the times of the call without.

    build/venv/bin/python bench/masks.py

One thread, f32, one sequence of 2 heads, head size 64. Calls take turns; a ratio is the median over
the rounds. Next to it stands the share of pairs that the mask leaves visible.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import regard

LENGTH, ROUNDS = 4096, 7


def spans(*ends):
    return np.stack([np.broadcast_to(x, LENGTH) for x in ends], axis=-1).astype(np.int32)


def cases():
    """Name: options, and the share of visible pairs."""
    random = np.random.default_rng(0)
    i = np.arange(LENGTH)
    cuts = np.cumsum(random.integers(128, 1024, LENGTH // 128))
    cuts = np.concatenate([[0], cuts[cuts < LENGTH], [LENGTH]])
    document = np.searchsorted(cuts, i, side="right") - 1
    own = spans(cuts[document], cuts[document + 1])
    same = document[:, None] == document
    causal = i[:, None] >= i
    tiles = np.repeat(np.repeat(random.random((LENGTH // 128, LENGTH // 128)) < 0.5, 128, 0), 128, 1)
    bias = np.where(same, 0, -np.inf).astype(np.float32)
    return {
        "none": ({}, 1.0),
        "causal": ({"causal": True}, causal.mean()),
        "mask: all true": ({"mask": np.ones_like(same)}, 1.0),
        "mask: half of all pairs, at random": ({"mask": random.random(same.shape) < 0.5}, 0.5),
        "mask: half of the tiles of 128 x 128": ({"mask": tiles}, tiles.mean()),
        "mask: causal": ({"mask": causal}, causal.mean()),
        "mask: documents": ({"mask": same}, same.mean()),
        "bias of -inf: documents": ({"bias": bias}, same.mean()),
        "row_spans: documents": ({"row_spans": own}, same.mean()),
        "row_spans: documents, causal": ({"row_spans": own, "causal": True}, (same & causal).mean()),
        "key_spans: documents": ({"key_spans": own}, same.mean()),
        "key_spans: causal": ({"key_spans": spans(i, LENGTH)}, causal.mean()),
    }


def main():
    random = np.random.default_rng(1)
    q, k, v, dout = random.standard_normal((4, 1, 2, LENGTH, 64), dtype=np.float32)
    all_cases = cases()
    times = {name: [] for name in all_cases}
    for _ in range(ROUNDS):
        for name, (options, _) in all_cases.items():
            begin = time.perf_counter()
            out, lse = regard.attention(q, k, v, return_lse=True, threads=1, **options)
            middle = time.perf_counter()
            regard.attention_backward(dout, q, k, v, out, lse, threads=1,
                                      gradients=("dq", "dk", "dv"), **options)
            times[name].append((middle - begin, time.perf_counter() - middle))
    print(f"{'mask':38} visible  forward  backward")
    for name, (_, visible) in all_cases.items():
        ratios = [statistics.median(own[n] / plain[n] for own, plain in
                                    zip(times[name], times["none"])) for n in (0, 1)]
        print(f"{name:38} {visible:7.2f}  {ratios[0]:7.2f}  {ratios[1]:8.2f}")


if __name__ == "__main__":
    main()
