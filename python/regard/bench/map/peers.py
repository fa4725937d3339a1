"""PyTorch's attention as a peer of a random problem.

What `scaled_dot_product_attention` cannot say (packed sequences, a window, a causal mask aligned to
the last key) goes to the operators below it, which reach the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..frameworks import as_tensor, torch_side
from ..problem import Problem
from ..side import LeftOut, Side

NAMES = {"cuda": ("cudnn", "flash", "efficient"), "cpu": ("torch",)}
Operator = Callable[[Problem, Any, Any, Any], Any]


def peer(problem: Problem, which: str, name: str) -> Side:
    """A side that times autograd alone. Its forward pass runs before and is not timed.

    Errors: LeftOut, and what PyTorch throws.
    """
    case = problem.case
    is_plain = not case.options and (not case.causal or case.rows == case.columns)
    repeats = name == "efficient" and case.heads != case.heads_kv
    if is_plain and not repeats:
        return torch_side(problem, which, name)
    if name not in OPERATORS:
        raise LeftOut("takes no window, packed sequences or Sq != Sk under a causal mask")
    return _operator_side(problem, which, name, OPERATORS[name])


def _operator_side(problem: Problem, which: str, name: str, operator: Operator) -> Side:
    import torch

    leaves = [as_tensor(problem.given[x]).detach() for x in "qkv"]
    kept: dict[str, Any] = {}
    if which == "fwd":
        def call() -> None:
            with torch.no_grad():
                kept["out"] = operator(problem, *leaves)
    else:
        leaves = [x.requires_grad_() for x in leaves]
        dout = as_tensor(problem.dout)
        out = operator(problem, *leaves)

        def call() -> None:
            found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            kept.update(zip(("dq", "dk", "dv"), found))

    return Side(name, call, lambda: {key: x.detach() for key, x in kept.items()})


def _begins(problem: Problem) -> list[Any]:
    return [problem.options.get("cu_seqlens_" + side) for side in "qk"]


def _flash(problem: Problem, q: Any, k: Any, v: Any) -> Any:
    """Masks are aligned to the last key."""
    import torch

    case, packed = problem.case, problem.packed
    q, k, v = (x if packed else x.transpose(1, 2) for x in (q, k, v))
    left, right = problem.options.get("window", (None, None))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, *_begins(problem), case.rows, case.columns, 0.0, case.causal, False,
        window_size_left=left, window_size_right=right)[0]
    return out if packed else out.transpose(1, 2)


def _efficient(problem: Problem, q: Any, k: Any, v: Any) -> Any:
    """Grouped keys and values are repeated first, because the kernel knows none."""
    import torch

    case, packed = problem.case, problem.packed
    left, right = problem.options.get("window", (None, 0))
    if right != 0:
        raise LeftOut("takes no window to the right")
    if case.heads != case.heads_kv:
        k, v = (x.repeat_interleave(case.heads // case.heads_kv, 1) for x in (k, v))
    q, k, v = (x[None] if packed else x.transpose(1, 2) for x in (q, k, v))
    longest = (case.rows, case.columns) if packed else (None, None)
    bottom_right = 2 if case.causal or left is not None else 0
    out = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, *_begins(problem), *longest, 0.0, bottom_right, True,
        window_size=None if left is None else left + 1)[0]
    return out[0] if packed else out.transpose(1, 2)


def _cudnn(problem: Problem, q: Any, k: Any, v: Any) -> Any:
    """Masks are aligned to the first key."""
    import torch

    case = problem.case
    begins = _begins(problem)
    lengths = case.options.get("packed")
    if lengths is None or case.causal and lengths[0] != lengths[1]:
        raise LeftOut("takes no window and no causal mask where Sq and Sk differ")
    return torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, *begins, case.rows, case.columns, True, 0.0, case.causal)[0]


OPERATORS: dict[str, Operator] = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}
