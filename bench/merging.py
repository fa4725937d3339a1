#!/usr/bin/env python3
"""The error of a result that is made over several sets of keys, over the number of sets.

    build/venv/bin/python bench/merging.py [--device cuda] [--draw docs/images/merging.svg]

Causal, (1, 4, 4096, 64) with 2 heads of keys; the sets are equal, and follow each other. Forward each
call continues out and lse of the calls before it; backward each takes their delta, and adds to
gradients in float32. An error is the norm of the difference from float64 over the norm of float64's
result, which has the rounded inputs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import regard
import torch

LENGTH, COUNTS = 4096, (1, 2, 4, 8, 16, 32, 64)
NAMES = ("out", "lse", "dq", "dk", "dv")


def in_sets(count, q, k, v, dout, starts):
    """out, lse, dq, dk, dv in float32 or wider."""
    sums = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=sums, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=sums, device=q.device)
    dq, dk, dv = (torch.zeros_like(x, dtype=sums) for x in (q, k, v))
    size = LENGTH // count
    sets = [slice(begin, begin + size) for begin in range(0, LENGTH, size)]

    def options(keys):
        return {"causal": "top_left", "q_positions": starts, "k_position": keys.start}

    for keys in sets:
        regard.attention(q, k[:, :, keys], v[:, :, keys], out=out, lse=lse,
                         continue_from=keys.start > 0, **options(keys))
    delta = (dout.to(sums) * out).sum(-1)
    for keys in sets:
        regard.attention_backward(
            dout, q, k[:, :, keys], v[:, :, keys], None, lse, delta=delta, accumulate=True,
            into=regard.Gradients(dq, dk[:, :, keys], dv[:, :, keys]), **options(keys))
    return out, lse, dq, dk, dv


def errors(type, device):
    """For each number of sets: the error of each result."""
    torch.manual_seed(0)
    made = [torch.randn(1, heads, LENGTH, 64).to(device, type) for heads in (4, 2, 2, 4)]
    starts = torch.arange(0, LENGTH, 128, dtype=torch.int32, device=device)
    exact = in_sets(1, *(x.double() for x in made), starts)
    return {count: {name: float((found.double() - want).norm() / want.norm()) for name, found, want
                    in zip(NAMES, in_sets(count, *made, starts), exact)} for count in COUNTS}


def draw(path, tables):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "regard"
    figure, axes = plt.subplots(1, len(tables), figsize=(8, 3), layout="constrained")
    for axis, (type, table) in zip(axes, tables.items()):
        for name in NAMES:
            axis.plot(COUNTS, [table[count][name] for count in COUNTS], marker="o", markersize=3,
                      label=name)
        axis.set(title=type, xscale="log", yscale="log", xlabel="sets of keys",
                 ylabel="error, relative to float64")
        axis.set_xticks(COUNTS, COUNTS)
        axis.minorticks_off()
        low, high = axis.get_ylim()
        axis.set_ylim(low / 5, high * 5)
        axis.grid(alpha=0.3)
    axes[-1].legend()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draw", type=Path, help="where to write a picture")
    given = parser.parse_args()
    tables = {}
    for type in ("float32", "bfloat16"):
        table = tables[type] = errors(getattr(torch, type), given.device)
        print(f"{type:9s} sets " + "".join(f"{name:>10s}" for name in NAMES))
        for count, row in table.items():
            print(f"{count:14d} " + "".join(f"{row[name]:10.2e}" for name in NAMES))
    if given.draw:
        draw(given.draw, tables)


if __name__ == "__main__":
    main()
