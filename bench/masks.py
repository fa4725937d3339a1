#!/usr/bin/env python3
"""What masks cost on the CPU: times of calls with a mask over the times of the call without.

    build/venv/bin/python bench/masks.py
    build/venv/bin/python bench/masks.py --draw docs/images/masks.png   no times; a picture of masks

One thread, f32, one sequence of 2 heads, head size 64. Calls take turns; a ratio is the median over
the rounds. Next to it stands the share of pairs that the mask leaves visible.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import regard
from regard import masks
from regard.masks.picture import cells

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


def drawn():
    """The masks of the picture, by what makes them."""
    parents = np.arange(-1, 255)
    parents[[96, 128, 176, 216]] = [63, 63, 159, 159]  # where branches begin
    return {
        "causal_documents": masks.causal_documents([0, 60, 84, 180, 256]),
        "prefix_lm": masks.prefix_lm(80, 256),
        "blocks": masks.blocks(np.tri(4, dtype=bool), 64),
        "sliding, sinks": masks.sliding(256, 48, sinks=12),
        "tree": masks.tree_from_parents(parents),
        "neighbourhood_2d": masks.neighbourhood_2d(16, 16, 5),
    }


def draw(path):
    """Queries go down, keys to the right; dark is visible."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 6, figsize=(12, 2.3), dpi=100, layout="constrained")
    for axis, (name, mask) in zip(axes, drawn().items()):
        axis.imshow(cells(mask, 256), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axis.set_title(name, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(path, facecolor="white", metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw masks, and measure nothing")
    path = parser.parse_args().draw
    if path is not None:
        draw(path)
    else:
        measure()


def measure():
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
