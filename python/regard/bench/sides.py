"""The sides that are timed: Regard's backends, and the attention of other libraries."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import Error
from .cases import PASSES, UNFUSED
from .memory import GpuMemory, HostMemory
from .problem import Problem

UNFUSED_LIMIT = {"cpu": 2**30, "cuda": 2**32}  # bytes of weights
# Names of peers by device: which library each needs.
PEERS = {
    "cpu": {"torch": "torch", "openvino": "openvino", "onnx-rt": "onnxruntime", "jax": "jax",
            "numpy": "numpy"},
    "cuda": {"flash": "torch", "efficient": "torch", "eff.+dbias": "torch", "cudnn": "torch",
             "math": "torch", "jax": "jax", "jax-cudnn": "jax"},
}
NEEDS = {"onnx-rt": "onnx"}  # to describe its model
TORCH_KERNELS = {"torch": "FLASH_ATTENTION", "flash": "FLASH_ATTENTION",
                 "efficient": "EFFICIENT_ATTENTION", "eff.+dbias": "EFFICIENT_ATTENTION",
                 "cudnn": "CUDNN_ATTENTION", "math": "MATH"}


class LeftOut(Exception):
    """A peer cannot take a case; the text says why."""


@dataclass
class Side:
    """One implementation of one case and pass.

    results: the results of the call, in the memory, shapes and layout of the problem.
    wait: for a library with its own queue: blocks until the work of the call is done.
    on: makes the call for a CUDA stream; None: the call uses PyTorch's current stream.
    times: how many passes one call runs.
    turn: how many calls fit into a turn of the GPU's clock; 0: not known yet.
    """

    name: str
    call: Callable[[], Any]
    results: Callable[[], dict[str, Any]]
    backend: str = ""
    kernel: str = ""
    around: Callable[[], Any] = contextlib.nullcontext
    wait: Callable[[], Any] | None = None
    on: Callable[[int], Callable[[], Any]] | None = None
    times: int = 1
    turn: int = 0
    keep: object = None


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
    library = PEERS[kind][name]
    from .engines import onnxruntime_side, openvino_side  # they need this module's Side

    make = {"torch": torch_side, "openvino": openvino_side, "onnxruntime": onnxruntime_side,
            "jax": jax_side, "numpy": numpy_side}[library]
    return make(problem, which, name)


def as_tensor(x: Any) -> Any:
    """A PyTorch tensor on a NumPy array's memory."""
    import torch

    if isinstance(x, torch.Tensor):
        return x
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(x)


def as_array(x: Any) -> Any:
    """A NumPy array on a PyTorch tensor's memory."""
    import torch

    if x.dtype is torch.bfloat16:
        import ml_dtypes

        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def torch_side(problem: Problem, which: str, name: str) -> Side:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    p, case = problem, problem.case
    q, k, v = (as_tensor(p.given[x]).detach() for x in "qkv")
    bias = as_tensor(p.options["bias"]).detach() if "bias" in p.options else None
    options: dict[str, Any] = {"is_causal": case.causal and case.rows > 1,
                               "dropout_p": p.options.get("dropout_p", 0.0),
                               "enable_gqa": case.heads != case.heads_kv}
    attend = torch.nn.functional.scaled_dot_product_attention

    def around() -> Any:
        return sdpa_kernel(getattr(SDPBackend, TORCH_KERNELS[name]))

    kept: dict[str, Any] = {}
    if which == "fwd":
        def call() -> None:
            with torch.no_grad():
                kept["out"] = attend(q, k, v, attn_mask=bias, **options)
    else:
        leaves = {"dq": q.requires_grad_(), "dk": k.requires_grad_(), "dv": v.requires_grad_()}
        if bias is not None and name.endswith("dbias"):
            leaves["dbias"] = bias.requires_grad_()
        dout = as_tensor(p.dout)
        with around():
            out = attend(q, k, v, attn_mask=bias, **options)

        def call() -> None:
            found = torch.autograd.grad(out, list(leaves.values()), dout, retain_graph=True)
            kept.update(zip(leaves, found))

    def results() -> dict[str, Any]:
        if "dropout_p" in p.options:
            return {}  # another mask than ours: nothing to compare
        found = {key: x.detach() for key, x in kept.items()}
        return found if isinstance(p.memory, GpuMemory) else {
            key: as_array(x) for key, x in found.items()}

    return Side(name, call, results, around=around)


def jax_side(problem: Problem, which: str, name: str) -> Side:
    import jax

    p, case, memory = problem, problem.case, problem.memory

    def taken(x: Any) -> Any:
        """In JAX's order (B, S, H, D), dense."""
        if isinstance(memory, HostMemory):
            return jax.numpy.asarray(x.swapaxes(1, 2).copy())
        return jax.dlpack.from_dlpack(x.transpose(1, 2).contiguous())

    def given_back(x: Any) -> Any:
        if isinstance(memory, GpuMemory):
            return memory.torch.from_dlpack(x).transpose(1, 2)
        import numpy

        return numpy.asarray(x).swapaxes(1, 2)

    q, k, v = (taken(p.given[x]) for x in "qkv")
    bias = None
    if "bias" in p.options:
        bias = jax.dlpack.from_dlpack(p.options["bias"])

    def attend(q: Any, k: Any, v: Any) -> Any:
        with jax.default_matmul_precision("highest" if case.type == "f32" else "default"):
            return jax.nn.dot_product_attention(
                q, k, v, bias=bias, is_causal=case.causal and case.rows > 1,
                implementation="cudnn" if name == "jax-cudnn" else "xla")

    kept: dict[str, Any] = {}
    if which == "fwd":
        forward = jax.jit(attend)

        def call() -> None:
            kept["out"] = forward(q, k, v)
    else:
        dout = taken(p.dout)
        pull = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1])(q, k, v)
        backward = jax.jit(lambda pull, dout: pull(dout))

        def call() -> None:
            kept["dq"], kept["dk"], kept["dv"] = backward(pull, dout)

    return Side(name, call, lambda: {key: given_back(x) for key, x in kept.items()},
                wait=lambda: [x.block_until_ready() for x in kept.values()])


def numpy_side(problem: Problem, which: str, name: str) -> Side:
    """Unfused attention, with the whole matrix of weights."""
    import numpy as np

    p, case = problem, problem.case
    if case.type != "f32" or case.heads != case.heads_kv or p.options.keys() - {"causal"}:
        raise LeftOut("NumPy's matrix products know no 16-bit types" if case.type != "f32" else
                      "not written in NumPy here")
    q, k, v = (p.given[x] for x in "qkv")
    dout, scale = p.dout, np.float32(case.dim**-0.5)
    hidden = np.triu(np.ones((case.rows, case.columns), bool), 1) if case.causal else None
    kept: dict[str, Any] = {}

    def forward() -> Any:
        weights = q @ k.swapaxes(-1, -2)
        weights *= scale
        if hidden is not None:
            weights[..., hidden] = -np.inf
        weights -= weights.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        kept["out"] = weights @ v
        return weights

    if which == "fwd":
        return Side(name, forward, lambda: kept)
    weights = forward()
    out = kept.pop("out")

    def backward() -> None:
        slope = dout @ v.swapaxes(-1, -2)
        slope -= (dout * out).sum(-1, keepdims=True)
        slope *= weights
        slope *= scale
        kept["dq"], kept["dk"] = slope @ k, slope.swapaxes(-1, -2) @ q
        kept["dv"] = weights.swapaxes(-1, -2) @ dout

    return Side(name, backward, lambda: kept)


def reason(error: Exception) -> str:
    """One line on why a side cannot run."""
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, (LeftOut, Error)) else f"{type(error).__name__}: "
    return (kind + text)[:160] if text else type(error).__name__
