#!/usr/bin/env python3
"""Trains the GPT of train_gpt.py with its context spread over several processes.

    python examples/python/train_gpt_distributed.py --ranks 2              # compares with one process
    torchrun --nproc-per-node 4 examples/python/train_gpt_distributed.py --scheme ring

Every process has all weights and some rows of each text. The first form starts the processes itself,
on this machine, and then trains in one process as well: seed, batches and weights are the same, so
that the loss curves must lie on each other. The second form runs under torchrun: over gloo, or over
NCCL with --device cuda, one GPU a process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch._dynamo  # imported by optimizers after a group exists, it keeps the group for ever
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn import functional

from regard.torch import distributed as rd
from texts import Batches
from train_gpt import SIZES, Gpt, Size
from training import Run, train, widest

SCHEMES = ("auto", "gather", "ulysses", "ring")


class ShardedGpt(torch.nn.Module):
    """A Gpt that takes this rank's rows of the texts. Only attention and positions know of it."""

    def __init__(self, size: Size, plan: rd.Plan, rank: int, device: str) -> None:
        super().__init__()

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
                   ) -> torch.Tensor:
            return rd.attention(q, k, v, plan)  # causal, as the plan says

        self.model = Gpt(size, attend)
        self.positions = plan.positions(rank, device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 (B, rows) to logits (B, rows, 256)."""
        x = self.model.bytes(ids) + self.model.places.weight[self.positions]
        for block in self.model.blocks:
            x = block(x)
        return self.model.norm(x) @ self.model.bytes.weight.T


def run(size: Size, scheme: str, seed: int, device: str, rank: int, ranks: int) -> Run:
    """One training run on this rank; the losses are those of whole texts, equal on all ranks."""
    plan = rd.plan(size.context, world_size=ranks, heads_q=size.heads, head_size=size.head_size,
                   batch=size.batch, element_bytes=4, causal=True, scheme=scheme)
    if rank == 0:
        print(plan.explain())
    torch.manual_seed(seed)
    model = ShardedGpt(size, plan, rank, device).to(device)
    for parameter in model.parameters() if ranks > 1 else ():
        parameter.register_post_accumulate_grad_hook(lambda x: dist.all_reduce(x.grad))
    batches = Batches(size.batch, size.context + 1, seed, device)

    def loss_of(step: int) -> torch.Tensor:
        """This rank's part of the mean over all rows: the parts of all ranks add up to it."""
        ids = batches.pieces(step)
        own, next_ones = (plan.shard(x, rank, 1) for x in (ids[:, :-1], ids[:, 1:]))
        total = functional.cross_entropy(model(own).flatten(0, 1), next_ones.flatten(),
                                         reduction="sum")
        return total / (size.batch * size.context)

    record = Run("gpt", f"{plan.scheme} over {ranks}", "float32", device)
    train(record, model, loss_of, size.steps, rate=1e-3)
    losses = torch.tensor(record.losses, dtype=torch.float64, device=device)
    if ranks > 1:
        dist.all_reduce(losses)
    record.losses = losses.tolist()
    return record


def process(rank: int, ranks: int, size: Size, scheme: str, seed: int, folder: str) -> None:
    """One of the processes that `main` starts; the first one writes the losses to the folder."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=ranks)
    record = run(size, scheme, seed, "cpu", rank, ranks)
    if rank == 0:
        torch.save(record.losses, f"{folder}/losses")
    dist.destroy_process_group()


def spread(ranks: int, size: Size, scheme: str, seed: int) -> Run:
    """A run over `ranks` new processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(process, (ranks, size, scheme, seed, folder), nprocs=ranks)
        losses = torch.load(Path(folder) / "losses")
    return Run("gpt", f"{ranks} processes", "float32", "cpu", losses)


def under_torchrun(arguments: argparse.Namespace, size: Size) -> None:
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    record = run(size, arguments.scheme, arguments.seed, arguments.device, dist.get_rank(),
                 dist.get_world_size())
    if dist.get_rank() == 0:
        for step, loss in enumerate(record.losses):
            print(f"{step:>5}  {loss:.4f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes, without torchrun")
    parser.add_argument("--scheme", choices=SCHEMES, default="auto")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=SIZES["cpu"].steps)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    size = Size(**{**SIZES["cpu"].__dict__, "steps": arguments.steps,
                   "context": arguments.context})
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return under_torchrun(arguments, size)
    found = spread(arguments.ranks, size, arguments.scheme, arguments.seed)
    alone = run(size, "gather", arguments.seed, "cpu", 0, 1)
    print(f"{'step':>5}{'one process':>14}{found.attention:>14}")
    for step in sorted({*range(0, size.steps, 10), size.steps - 1}):
        print(f"{step:>5}{alone.losses[step]:>14.6f}{found.losses[step]:>14.6f}")
    print(f"largest distance of the curves: {widest(found, alone):.1e}")


if __name__ == "__main__":
    main()
