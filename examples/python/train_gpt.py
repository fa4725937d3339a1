#!/usr/bin/env python3
"""Trains a small GPT on the bytes of Python's own library, by PyTorch's attention or by Regard's.

    python examples/python/train_gpt.py --attention regard --steps 100
    python examples/python/train_gpt.py --compare                     # both, and a picture of both
    python examples/python/train_gpt.py --compare --device cuda

Seed, batches and everything but attention are the same, so that the loss curves must lie on each
other. How closely, PyTorch says itself: --compare also trains with its attention on the keys in
reverse, which sums the same numbers in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from texts import VOCABULARY, Batches
from training import (ATTENTIONS, DTYPES, Attend, Run, options, read_lines, spread_weights, train,
                      widest, write_lines)

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_size: int
    context: int
    batch: int
    steps: int

    @property
    def width(self) -> int:
        return self.heads * self.head_size


SIZES = {"cpu": Size(layers=2, heads=2, head_size=64, context=128, batch=4, steps=60),
         "cuda": Size(layers=6, heads=12, head_size=64, context=1024, batch=8, steps=200)}


EQUAL = 1e-8  # where the picture draws a distance of 0


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside the stream."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.size, self.attend = size, attend
        self.norm, self.norm_mlp = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.join = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(nn.Linear(size.width, 4 * size.width), nn.GELU(),
                                 nn.Linear(4 * size.width, size.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, width) to the same."""
        rows = self.qkv(self.norm(x)).unflatten(-1, (3, self.size.heads, self.size.head_size))
        q, k, v = rows.permute(2, 0, 3, 1, 4)  # each (B, H, S, D), views
        seen = self.attend(q, k, v, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Gpt(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, attend) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        spread_weights(self, embeddings=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 (B, S) to logits (B, S, 256)."""
        x = self.bytes(ids) + self.places.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.bytes.weight.T


def run(attention: str, dtype: str, device: str, size: Size, seed: int) -> Run:
    """One training run from the seed's weights on the seed's batches."""
    torch.manual_seed(seed)
    model = Gpt(size, ATTENTIONS[attention]).to(device)
    batches = Batches(size.batch, size.context + 1, seed, device)

    def loss_of(step: int) -> torch.Tensor:
        ids = batches.pieces(step)
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    record = Run("gpt", attention, dtype, device)
    return train(record, model, loss_of, size.steps, rate=1e-3 if device == "cpu" else 6e-4)


def draw(runs: list[Run], path: Path) -> None:
    """Above the curves, below how far two of them are apart, for each type."""
    from charts import COLOURS, DASHES, MARKERS, NAMES, figure, finish

    kinds = [name for name in DTYPES if any(run.dtype == name for run in runs)]
    sheet, axes = figure(2, len(kinds))
    for column, dtype in enumerate(kinds):
        found = {run.attention: run for run in runs if run.dtype == dtype}
        above, below = axes[0][column], axes[1][column]
        for name in ("stock", "regard"):
            above.plot(found[name].losses, color=COLOURS[name], linestyle=DASHES[name],
                       label=NAMES[name])
        for name in ("reversed", "regard"):
            apart = [max(abs(a - b), EQUAL) for a, b in
                     zip(found[name].losses, found["stock"].losses, strict=True)]
            below.plot(apart, color=COLOURS[name], linestyle="", markersize=4,
                       marker=MARKERS[name], label=NAMES[name])
        above.set(title=dtype if dtype == "float32" else f"{dtype} (autocast)",
                  ylabel="loss, nats per byte")
        below.set(xlabel="step", ylabel="distance from\nPyTorch's attention", yscale="log")
        above.legend(frameon=False)
        below.margins(y=0.35)  # room for the legend
        below.legend(frameon=False, loc="upper center", ncols=2)
    finish(sheet, path)


def report(runs: list[Run], tokens: int) -> None:
    print(f"{'type':<10}{'attention':<10}{'first loss':>12}{'last loss':>12}{'ms/step':>10}"
          f"{'bytes/s':>10}   largest distance from stock")
    for record in runs:
        stock = next(other for other in runs
                     if (other.dtype, other.attention) == (record.dtype, "stock"))
        apart = "" if record is stock else f"{widest(record, stock):.1e}"
        print(f"{record.dtype:<10}{record.attention:<10}{record.losses[0]:>12.5f}"
              f"{record.losses[-1]:>12.5f}{record.milliseconds:>10.1f}"
              f"{1e3 * tokens / record.milliseconds:>10.0f}   {apart}")


def main() -> None:
    parser = options(__doc__.splitlines()[0], "60 on the CPU, 200 on a GPU", ["layers", "context"])
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32; with --compare, both")
    arguments = parser.parse_args()
    if arguments.draw:
        return draw(read_lines(arguments.draw), arguments.picture)
    size = SIZES[arguments.device.split(":")[0]]
    given = {name: getattr(arguments, name) for name in ("steps", "layers", "context")
             if getattr(arguments, name) is not None}
    size = Size(**{**size.__dict__, **given})
    dtypes = [arguments.dtype] if arguments.dtype else (
        list(DTYPES) if arguments.compare else ["float32"])
    names = ["stock", "regard", "reversed"] if arguments.compare else [arguments.attention]
    runs = [run(name, dtype, arguments.device, size, arguments.seed)
            for dtype in dtypes for name in names]
    if arguments.compare:
        report(runs, size.batch * size.context)
    else:
        for step, loss in enumerate(runs[0].losses):
            print(f"{step:>5}  {loss:.4f}")
    if arguments.lines:
        write_lines(arguments.lines, runs)
    if arguments.picture and arguments.compare:
        draw(runs, arguments.picture)


if __name__ == "__main__":
    main()
