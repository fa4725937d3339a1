"""Attention of PyTorch and JAX, and in NumPy, as peers."""

from __future__ import annotations

from typing import Any

from .memory import GpuMemory, HostMemory
from .problem import Problem
from .side import LeftOut, Side

TORCH_KERNELS = {"torch": "FLASH_ATTENTION", "flash": "FLASH_ATTENTION",
                 "efficient": "EFFICIENT_ATTENTION", "eff.+dbias": "EFFICIENT_ATTENTION",
                 "cudnn": "CUDNN_ATTENTION", "math": "MATH"}


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
