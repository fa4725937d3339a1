#!/usr/bin/env python3
"""Trains models whose attention has a learned bias, by PyTorch's attention and by Regard's.

    python examples/python/train_pair_bias.py --compare
    python examples/python/train_pair_bias.py --compare --device cuda

Two encoders guess hidden bytes of Python's own library. "relative": T5's bias, (1, H, S, S), from a
table of learned numbers by distance, one table a layer. "pair": AlphaFold's, (B, H, S, S), from
features of each pair of positions, projected in every layer. Both biases have a gradient, so both
get to PyTorch's attention as a float attn_mask that requires one. --compare also trains with
PyTorch's on the keys in reverse, the same sums in another order: how closely curves can lie. On the
CPU each run is a process of its own, and its memory is what it held above the level before its
first step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from texts import VOCABULARY, Batches
from training import (ATTENTIONS, DTYPES, Attend, Run, options, read_lines, spread_weights, train,
                      widest, write_lines)

HIDDEN = VOCABULARY  # the number of "guess this byte"
FEATURES = 16  # of a pair of positions
DISTANCES = 32  # of T5's table


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_size: int
    length: int
    batch: int
    steps: int

    @property
    def width(self) -> int:
        return self.heads * self.head_size


SIZES = {"cpu": Size(layers=2, heads=4, head_size=32, length=256, batch=2, steps=40),
         "cuda": Size(layers=4, heads=12, head_size=64, length=1024, batch=4, steps=100)}


def distance_number(length: int, device: str) -> torch.Tensor:
    """int64 (S, S): exact for short distances, then by logarithm; its own half for each side."""
    places = torch.arange(length, device=device)
    distance = places[None] - places[:, None]
    half = DISTANCES // 2
    far = half / 2 + (distance.abs().clamp(min=1) * 2 / half).log2() / 6 * (half / 2 - 1)
    number = torch.where(distance.abs() < half // 2, distance.abs(), far.long().clamp(max=half - 1))
    return number + half * (distance > 0)


class RelativeBias(nn.Module):
    """(1, H, S, S) from a learned table."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table = nn.Embedding(DISTANCES, size.heads)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """pairs: distance_number's (S, S)."""
        return self.table(pairs).permute(2, 0, 1)[None]


class PairBias(nn.Module):
    """(B, H, S, S) projected from the features of pairs."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.project = nn.Linear(FEATURES, size.heads, bias=False)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """pairs: (B, S, S, FEATURES)."""
        return self.project(pairs).permute(0, 3, 1, 2).contiguous()


class Block(nn.Module):
    def __init__(self, size: Size, attend: Attend, bias: nn.Module) -> None:
        super().__init__()
        self.size, self.attend, self.bias = size, attend, bias
        self.norm, self.norm_mlp = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.join = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(nn.Linear(size.width, 4 * size.width), nn.GELU(),
                                 nn.Linear(4 * size.width, size.width))

    def forward(self, x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(self.norm(x)).unflatten(-1, (3, self.size.heads, self.size.head_size))
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        seen = self.attend(q, k, v, attn_mask=self.bias(pairs).to(q.dtype))
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Encoder(nn.Module):
    """Has no other idea of order than its bias."""

    def __init__(self, size: Size, kind: str, attend: Attend) -> None:
        super().__init__()
        self.kind = kind
        make = {"relative": RelativeBias, "pair": PairBias}[kind]
        self.bytes = nn.Embedding(VOCABULARY + 1, size.width)
        self.distances = nn.Embedding(DISTANCES, FEATURES) if kind == "pair" else None
        self.relations = nn.Linear(2, FEATURES) if kind == "pair" else None
        self.blocks = nn.ModuleList(Block(size, attend, make(size)) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.guess = nn.Linear(size.width, VOCABULARY)
        spread_weights(self, embeddings=0.1)

    def pairs(self, ids: torch.Tensor) -> torch.Tensor:
        """What the biases read. Features: distance, "the same byte", "on the same line"."""
        distance = distance_number(ids.shape[1], str(ids.device))
        if self.distances is None or self.relations is None:
            return distance
        line = (ids == ord("\n")).cumsum(1)
        same = [x[:, :, None] == x[:, None] for x in (ids, line)]
        relations = torch.stack(same, dim=-1).float()
        return torch.tanh(self.distances(distance)[None] + self.relations(relations))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 (B, S) to logits (B, S, 256)."""
        x, pairs = self.bytes(ids), self.pairs(ids)
        for block in self.blocks:
            x = block(x, pairs)
        return self.guess(self.norm(x))


def run(kind: str, attention: str, dtype: str, device: str, size: Size, seed: int) -> Run:
    """One training run from the seed's weights on the seed's batches."""
    torch.manual_seed(seed)
    model = Encoder(size, kind, ATTENTIONS[attention]).to(device)
    batches = Batches(size.batch, size.length, seed, device)

    def loss_of(step: int) -> torch.Tensor:
        ids, hidden = batches.pieces(step), batches.hidden(step)
        logits = model(ids.masked_fill(hidden, HIDDEN))
        return functional.cross_entropy(logits[hidden], ids[hidden])

    record = Run(kind, attention, dtype, device)
    before = peak_of_process()
    train(record, model, loss_of, size.steps, rate=1e-3)
    if device == "cpu":
        record.peak = peak_of_process() - before
    return record


def peak_of_process() -> int:
    """Bytes of the largest resident set of this program so far; 0 where it cannot be asked.

    getrusage would count what the process was before it became this program.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def run_in_process(kind: str, attention: str, dtype: str, device: str, size: Size,
                   seed: int) -> Run:
    """As `run`, in a process of its own."""
    program = ("import json, sys; from dataclasses import asdict; import train_pair_bias as t; "
               "a = json.loads(sys.argv[1]); a['size'] = t.Size(**a['size']); "
               "print(json.dumps(asdict(t.run(**a))))")
    given = {"kind": kind, "attention": attention, "dtype": dtype, "device": device,
             "size": asdict(size), "seed": seed}
    done = subprocess.run([sys.executable, "-c", program, json.dumps(given)], text=True,
                          stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parent)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def draw(runs: list[Run], path: Path) -> None:
    """A row for each bias: curves, time, memory."""
    from charts import COLOURS, DASHES, NAMES, figure, finish

    kinds = list(dict.fromkeys(run.model for run in runs))
    sheet, axes = figure(len(kinds), 3)
    titles = {"relative": "relative position bias (1, H, S, S)", "pair": "pair bias (B, H, S, S)"}
    for row, kind in zip(axes, kinds, strict=True):
        found = {run.attention: run for run in runs if run.model == kind}
        for name in ("stock", "regard"):
            row[0].plot(found[name].losses, color=COLOURS[name], linestyle=DASHES[name],
                        label=NAMES[name])
        row[0].set(title=titles[kind], xlabel="step", ylabel="loss, nats per byte")
        row[0].legend(frameon=False)
        shown = ("stock", "regard")
        for axis, values, label in (
                (row[1], [found[name].milliseconds for name in shown], "ms per step"),
                (row[2], [found[name].peak / 2**20 for name in shown], "peak memory, MiB")):
            bars = axis.barh([NAMES[name].replace(" ", "\n") for name in shown], values,
                             color=[COLOURS[name] for name in shown], height=0.6)
            axis.bar_label(bars, fmt="%.0f", padding=3)
            axis.set(xlabel=label)
            axis.margins(x=0.15)
            axis.invert_yaxis()
            axis.grid(axis="y", visible=False)
    finish(sheet, path)


def report(runs: list[Run]) -> None:
    print(f"{'bias':<10}{'attention':<10}{'first loss':>12}{'last loss':>12}{'ms/step':>10}"
          f"{'peak MiB':>10}   largest distance from stock")
    for record in runs:
        stock = next(other for other in runs
                     if (other.model, other.attention) == (record.model, "stock"))
        apart = "" if record is stock else f"{widest(record, stock):.1e}"
        print(f"{record.model:<10}{record.attention:<10}{record.losses[0]:>12.5f}"
              f"{record.losses[-1]:>12.5f}{record.milliseconds:>10.1f}"
              f"{record.peak / 2**20:>10.0f}   {apart}")


def main() -> None:
    parser = options(__doc__.splitlines()[0], "40 on the CPU, 100 on a GPU", ["length"])
    parser.add_argument("--bias", choices=("relative", "pair"), help="default: both")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    arguments = parser.parse_args()
    if arguments.draw:
        return draw(read_lines(arguments.draw), arguments.picture)
    size = SIZES[arguments.device.split(":")[0]]
    given = {name: getattr(arguments, name) for name in ("steps", "length")
             if getattr(arguments, name) is not None}
    size = Size(**{**asdict(size), **given})
    names = ["stock", "regard", "reversed"] if arguments.compare else [arguments.attention]
    kinds = [arguments.bias] if arguments.bias else ["relative", "pair"]
    one_run = run_in_process if arguments.device == "cpu" else run
    runs = [one_run(kind, name, arguments.dtype, arguments.device, size, arguments.seed)
            for kind in kinds for name in names]
    if arguments.compare:
        report(runs)
    else:
        for record in runs:
            for step, loss in enumerate(record.losses):
                print(f"{record.model}  {step:>5}  {loss:.4f}")
    if arguments.lines:
        write_lines(arguments.lines, runs)
    if arguments.picture and arguments.compare:
        draw(runs, arguments.picture)


if __name__ == "__main__":
    main()
