"""python -m regard.bench behind: a call on the CPU right behind another operator of PyTorch.

After an operator, PyTorch's threads spin for a while on the cores that a call needs. Each call is
timed right behind a matrix product of PyTorch, and after a pause. The times are medians in ms; the
sides take turns, and a ratio is PyTorch's time over the side's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..element_types import NAMES
from .environment import prepare_environment

SHAPES = ((1, 16, 512, 64), (8, 12, 128, 64))
PAUSE = 0.12  # seconds, in which threads that spin fall asleep
WARM = 3      # rounds that do not count
Call = Callable[[], Any]


def medians(sides: dict[str, Call], before: Call, rounds: int) -> dict[str, float]:
    """Milliseconds of a call by side; before: what comes ahead of each call."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(WARM + rounds):
        first = number % len(sides)
        for name in [*sides][first:] + [*sides][:first]:
            before()
            began = time.perf_counter()
            sides[name]()
            times[name].append(time.perf_counter() - began)
    return {name: 1e3 * statistics.median(found[WARM:]) for name, found in times.items()}


def passes(shape: tuple[int, ...], type: str, threads: int) -> dict[str, dict[str, Call]]:
    """By pass and side; PyTorch's own first."""
    import torch

    from ..torch import attention

    functions: dict[str, Callable[..., Any]] = {
        "PyTorch": torch.nn.functional.scaled_dot_product_attention, "Regard": attention,
        "own threads": partial(attention, threads=threads)}
    q, k, v, dout = (torch.randn(shape).to(getattr(torch, NAMES[type])) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def backward(function: Any) -> Call:
        out = function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return {"forward": {name: partial(f, q, k, v) for name, f in functions.items()},
            "backward": {name: backward(f) for name, f in functions.items()}}


def lines(type: str, threads: int, rounds: int) -> list[str]:
    import torch

    x = torch.randn(512, 512)
    befores: dict[str, Call] = {"behind a product": lambda: torch.mm(x, x),
                                "after a pause": lambda: time.sleep(PAUSE)}
    found = []
    for shape in SHAPES:
        for which, sides in passes(shape, type, threads).items():
            for where, before in befores.items():
                times = medians(sides, before, rounds)
                cells = "".join(f"{ms:12.3f} {times['PyTorch'] / ms:5.2f}x" for ms in times.values())
                found.append(f"{shape!s:<18} {which:<9} {where:<18}{cells}")
    return found


def main(argv: Sequence[str]) -> int:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m regard.bench behind", description=(__doc__ or "").split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--type", default="f32", choices=["f32", "f16", "bf16"])
    add("--threads", type=int, default=cores, help="(default: %(default)s)")
    add("--rounds", type=int, default=60, help="calls of each side (default: %(default)s)")
    a = parser.parse_args(argv)
    if not 1 <= a.threads <= cores:
        parser.error(f"--threads = {a.threads}: must be 1 to {cores}")
    if a.rounds < 1:
        parser.error(f"--rounds = {a.rounds}: must be 1 or more")
    prepare_environment("cpu", a.threads)
    import torch

    torch.set_num_threads(a.threads)
    print(f"{f'{a.type}, {a.threads} threads, ms':<47}"
          + "".join(f"{name:>12}{'':7}" for name in ("PyTorch", "Regard", "own threads")))
    print("\n".join(lines(a.type, a.threads, a.rounds)))
    return 0
