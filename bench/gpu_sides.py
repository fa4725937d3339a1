"""Who is timed by bench/gpu.py: Regard's backends, and PyTorch's kernels as their peers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
import torch_calls as calls
from gpu_cases import Problem
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "eff.+dbias": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
WHICH = {"fwd": "forward", "bwd": "backward"}


@dataclass
class Side:
    """One contestant of one case and pass."""

    name: str
    call: Callable[[], None]
    results: Callable[[], dict[str, torch.Tensor]]
    kernel: str = ""
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    on: Callable[[torch.cuda.Stream], Callable[[], None]] | None = None  # the call on a stream
    times: int = 1  # how often call does it
    keep: object = None

    def call_on(self, stream: torch.cuda.Stream) -> None:
        """PyTorch's kernels follow its current stream; ours are told."""
        (self.on(stream) if self.on else self.call)()


def ours(problem: Problem, which: str, backend: str, name: str) -> Side:
    """Results are NaN until the first call. The workspace is the caller's."""
    p = problem
    place = backend if p.device == "cuda" or not backend.startswith("cuda") else ""
    workspace = calls.workspace(p.attention, WHICH[which], p.out, place)
    if which == "fwd":
        written = {"out": p.out, "lse": p.lse}
        tensors = calls.forward_tensors(p.out, p.lse)
    else:
        written = p.gradients
        tensors = calls.backward_tensors(p.out, p.lse, p.dout, p.gradients, p.dlse)

    def on(stream: torch.cuda.Stream | None) -> Callable[[], None]:
        run = calls.run_of(p.out, place, workspace, stream)
        call = calls.prepared(WHICH[which], p.attention, tensors, run)
        call.workspace = workspace
        return call

    for x in written.values():
        x.fill_(torch.nan)
    kernel = calls.explained(p.attention, WHICH[which], p.out, place).kernel.decode()
    return Side(name, on(None), lambda: written, kernel, on=on)


def peer(problem: Problem, which: str, name: str) -> Side:
    """Backward is the gradient of one graph that is kept; forward is not timed with it."""
    p, o = problem, problem.options
    bias = o.get("bias")
    options = {
        "is_causal": p.case.causal and p.case.rows > 1,
        "dropout_p": o["dropout"][0] if "dropout" in o else 0.0,
        "enable_gqa": p.case.heads != p.case.heads_kv,
    }
    q, k, v = (p.given[x].detach() for x in "qkv")
    around = lambda: sdpa_kernel(PEERS[name])  # noqa: E731
    kept: dict[str, torch.Tensor] = {}
    if which == "fwd":
        def call() -> None:
            with torch.no_grad():
                kept["out"] = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias,
                                                                      **options)
    else:
        leaves = {"dq": q.requires_grad_(), "dk": k.requires_grad_(), "dv": v.requires_grad_()}
        if bias is not None and name.endswith("dbias"):
            bias = bias.detach().requires_grad_()
            leaves["dbias"] = bias
        with around():
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)

        def call() -> None:
            found = torch.autograd.grad(out, list(leaves.values()), p.dout, retain_graph=True)
            kept.update(zip(leaves, found))

    compared = kept if "dropout" not in o else {}  # another mask than ours
    return Side(name, call, lambda: compared, around=around)
