"""The sides that are timed: Regard's backends, and the attention of other libraries."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from .cases import PASSES, UNFUSED
from .engines import onnxruntime_side, openvino_side
from .frameworks import jax_side, numpy_side, torch_side
from .problem import Problem
from .side import LeftOut, Side

UNFUSED_LIMIT = {"cpu": 2**30, "cuda": 2**32}  # bytes of weights
# Names of peers by device: which library each needs.
PEERS = {
    "cpu": {"torch": "torch", "openvino": "openvino", "onnx-rt": "onnxruntime", "jax": "jax",
            "numpy": "numpy"},
    "cuda": {"flash": "torch", "efficient": "torch", "eff.+dbias": "torch", "cudnn": "torch",
             "math": "torch", "jax": "jax", "jax-cudnn": "jax"},
}
NEEDS = {"onnx-rt": "onnx"}  # to describe its model


def installed(device: str, names: Iterable[str] | None = None) -> dict[str, str]:
    """The peers for "cpu" or "cuda" that are installed, and the versions of their libraries.

    names: loads only the libraries of these peers; None: of all.
    """
    found = {}
    for name, library in PEERS[device].items():
        if names is not None and name not in names:
            continue
        if not all(map(importlib.util.find_spec, (library, NEEDS.get(name, library)))):
            continue
        module = importlib.import_module(library)
        if library == "jax" and device == "cuda":
            try:
                module.devices("gpu")
            except RuntimeError:  # its build knows no GPU
                continue
        found[name] = str(module.__version__).split("-")[0]  # without the build
    return found


def ours(problem: Problem, which: str, backend: str, threads: int) -> Side:
    """Results are NaN until the first call. The backward pass uses the forward pass's results."""
    p, memory = problem, problem.memory
    out, lse = memory.view(p.out, "out"), memory.view(p.lse, "lse")
    how: dict[str, Any] = {"threads": threads, "backend": backend, "allocate": memory.workspace()}
    if which == "fwd":
        written = {"out": p.out, "lse": p.lse}
        bound = functools.partial(p.core.forward, out, lse, **how)
    else:
        written = p.gradients
        arrays: dict[str, Any] = {name: memory.view(x, name) for name, x in written.items()}
        dlse = None if p.dlse is None else memory.view(p.dlse, "dlse")
        bound = functools.partial(p.core.backward, out, lse, memory.view(p.dout, "dout"), dlse,
                                  **arrays, **how)

    def on(stream: int) -> Callable[[], None]:
        return functools.partial(bound, stream=stream)

    for x in written.values():
        x[...] = float("nan")
    plan = p.core.explain(PASSES[which], threads=threads, backend=backend)
    return Side(backend, on(memory.stream()), lambda: written, plan["backend"], plan["kernel"],
                on=on if memory.cuda else None)


def peer(problem: Problem, which: str, name: str) -> Side:
    """Backward is the gradient of a forward pass that is computed before and not timed.

    Errors: LeftOut, and what the library itself throws.
    """
    case = problem.case
    kind = "cuda" if problem.memory.cuda else "cpu"
    if name in UNFUSED and case.weights() > UNFUSED_LIMIT[kind]:
        raise LeftOut(f"unfused: its table of weights takes {case.weights() / 2**30:.1f} GiB")
    make = {"torch": torch_side, "openvino": openvino_side, "onnxruntime": onnxruntime_side,
            "jax": jax_side, "numpy": numpy_side}[PEERS[kind][name]]
    return make(problem, which, name)
