"""What the two training scripts share: the attentions they compare, one run, its record."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn import functional

import regard.torch

Attend = Callable[..., torch.Tensor]


def reversed_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
    """PyTorch's attention with the keys in reverse: the same sums in another order."""
    if is_causal:
        attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    mask = None if attn_mask is None else attn_mask.flip(-1)
    return functional.scaled_dot_product_attention(q, k.flip(-2), v.flip(-2), attn_mask=mask)


# All take q, k, v, attn_mask and is_causal as torch.nn.functional.scaled_dot_product_attention.
ATTENTIONS: dict[str, Attend] = {
    "stock": functional.scaled_dot_product_attention,
    "regard": regard.torch.scaled_dot_product_attention,
    "reversed": reversed_keys,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def spread_weights(model: torch.nn.Module, embeddings: float) -> None:
    """Normal weights: embeddings of that deviation, layers such that scores begin near size one."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=embeddings)
        elif isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)


@dataclass
class Run:
    """One training run. Losses in nats per byte, milliseconds per step (median), peak in bytes."""

    model: str
    attention: str
    dtype: str
    device: str
    losses: list[float] = field(default_factory=list)
    milliseconds: float = 0.0
    peak: int = 0


def train(run: Run, model: torch.nn.Module, loss_of: Callable[[int], torch.Tensor], steps: int,
          rate: float) -> Run:
    """AdamW with a short warm-up; bfloat16 by autocast. Fills in the run and returns it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    dtype = DTYPES[run.dtype]
    on_gpu = run.device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    for step in range(steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 10)
        lower = dtype != torch.float32
        with torch.autocast(run.device.split(":")[0], dtype) if lower else nullcontext():
            loss = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    run.losses = [float(loss) for loss in losses]
    run.milliseconds = 1e3 * sorted(times)[len(times) // 2]
    if on_gpu:
        run.peak = torch.cuda.max_memory_allocated()
    return run


def widest(one: Run, other: Run) -> float:
    """The largest difference of two loss curves, step by step."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def write_lines(path: Path, runs: list[Run]) -> None:
    """One JSON object a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs))


def read_lines(path: Path) -> list[Run]:
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


def options(text: str, steps: str, lengths: list[str]) -> argparse.ArgumentParser:
    """What both scripts' command lines have in common. lengths: options that change the sizes."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--attention", choices=ATTENTIONS, default="regard")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, help=f"default: {steps}")
    for name in lengths:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare", action="store_true",
                        help="train by both, and on reversed keys")
    parser.add_argument("--lines", type=Path, help="write the runs as JSON lines")
    parser.add_argument("--picture", type=Path, help="draw what --compare finds, as .svg")
    parser.add_argument("--draw", type=Path, metavar="LINES", help="only draw these lines again")
    return parser
