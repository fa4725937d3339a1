"""python -m regard.bench host: the host's time of a call next to PyTorch's own and JAX's, in us.

The tensors are so small that the call itself is all that is measured. Each number is the least of
many short bursts, which the rows take in turns. On a GPU the device works behind the host.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

BURST, ROUNDS = 20, 400
Call = Callable[[], Any]


def measured(calls: dict[str, Call], synchronize: Call) -> dict[str, float]:
    """Microseconds by name."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            synchronize()
            began = time.perf_counter()
            for _ in range(BURST):
                call()
            best[name] = min(best[name], (time.perf_counter() - began) / BURST * 1e6)
    synchronize()
    return best


def passes(function: Any, device: str) -> dict[str, Call]:
    """The three ways in which a training or inference step calls an attention of PyTorch."""
    import torch

    plain = [torch.randn(1, 1, 1, 64, device=device) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in plain]
    out = function(*leaves)
    dout = torch.ones_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return {"forward": lambda: function(*plain), "with gradients": lambda: function(*leaves),
            "backward": backward}


def plain_passes(x: Any) -> dict[str, Call]:
    """Both passes of arrays without autograd."""
    import regard

    out, lse = regard.attention(x, x, x, return_lse=True)
    return {"forward": lambda: regard.attention(x, x, x),
            "backward": lambda: regard.attention_backward(x, x, x, x, out, lse)}


def jitted(device: str) -> dict[str, dict[str, Call]]:
    """jax.jit of the plain formula in JAX, and of Regard's call; nothing where JAX has no such device.

    On a CPU a call is waited for; a GPU works behind the host.
    """
    try:
        import jax
    except ImportError:
        return {}
    import jax.numpy as jnp

    from regard import jax as regard_jax

    if (jax.default_backend() == "cpu") != (device == "cpu"):
        return {}

    def formula(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 8
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v)

    x = jnp.ones((1, 1, 1, 64), jnp.float32)

    def forward(function: Any) -> Call:
        compiled = jax.jit(function)
        if device == "cpu":
            return lambda: compiled(x, x, x).block_until_ready()
        return lambda: compiled(x, x, x)

    return {"jitted JAX": {"forward": forward(formula)},
            "jitted regard.jax.attention": {"forward": forward(regard_jax.attention)}}


def sides(device: str, compiled: bool) -> dict[str, dict[str, Call]]:
    """By side and pass; PyTorch's own first."""
    import torch

    import regard
    from regard import torch as regard_torch

    stock = torch._C._nn.scaled_dot_product_attention

    def installed(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    found = {"PyTorch": passes(stock, device),
             "attention": passes(regard_torch.attention, device),
             "scaled_dot_product_attention": passes(
                 regard_torch.scaled_dot_product_attention, device),
             "after install()": passes(installed, device),
             "regard.attention": passes(regard.attention, device)}
    if compiled:
        found["compiled PyTorch"] = passes(torch.compile(stock), device)
        found["compiled attention"] = passes(torch.compile(regard_torch.attention), device)
    if device == "cpu":
        import numpy

        found["NumPy"] = plain_passes(numpy.ones((1, 1, 1, 64), numpy.float32))
    elif importlib.util.find_spec("cupy") is not None:
        cupy: Any = importlib.import_module("cupy")
        found["CuPy"] = plain_passes(cupy.ones((1, 1, 1, 64), cupy.float32))
    return found | jitted(device)


def table(device: str, compiled: bool) -> str:
    import torch

    from regard.torch import install, uninstall

    install()
    try:
        all_sides = sides(device, compiled)
        calls = {f"{side}/{which}": call for side, found in all_sides.items()
                 for which, call in found.items()}
        wait: Call = torch.cuda.synchronize if device != "cpu" else lambda: None
        times = measured(calls, wait)
    finally:
        uninstall()
    head = ("forward", "with gradients", "backward")
    lines = [f"{'us of the host; ratio to PyTorch':32}" + "".join(f"{name:>20}" for name in head)]
    for side, found in all_sides.items():
        peer = next((f"{kind} {name}" for kind, name in (("compiled", "PyTorch"), ("jitted", "JAX"))
                     if side.startswith(kind)), "PyTorch")
        cells = [f"{times[f'{side}/{which}']:12.1f}"
                 f" {times[f'{side}/{which}'] / times[f'{peer}/{which}']:6.2f}x"
                 if which in found else "" for which in head]
        lines.append(f"{side:32}" + "".join(f"{cell:>20}" for cell in cells).rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m regard.bench host",
                                     description="Host time of tiny calls next to PyTorch's own.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0 (default: %(default)s)")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile as well")
    a = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    print(table(a.device, a.compiled))
    return 0
