#!/usr/bin/env python3
"""Context parallelism: the time of every scheme over several processes, and of plans for many.

    build/venv/bin/python bench/distributed.py --ranks 2 --rows 2048 --heads 8/2     # gloo, CPU
    python3 bench/distributed.py --ranks 2 --rows 8192,32768 --heads 32/8,16/16      # NCCL
    build/venv/bin/python bench/distributed.py --model 8,64,1024                     # no device
    build/venv/bin/python bench/distributed.py --explain                             # four plans

Every rank has so many rows of one sequence, causal or of packed causal documents of 1024 to 8192 rows.
A rank's efficiency is the time of the whole problem on one device over ranks times the time over
all of them. Times are medians of the slowest rank's; out, dq and dk are compared with one process's.
A measurement is one call from idle devices to a synchronisation, or so many in a row (--calls 8); or
their time on the GPU when all of them are queued behind a busy kernel (--queued --calls 8).
On GPUs PyTorch's context_parallel takes the causal problems with equal heads, as "PyTorch" with
cuDNN's kernels and all-gathers; its efficiency is relative to Regard on one device.
The model's time of a forward and a backward pass: the largest visible area by a rate of FLOP/s, and
the bytes that a rank receives by a bandwidth, one after the other; "hidden": the larger of both.
Ranks of a node receive from each other by another bandwidth, where nothing comes from other nodes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.torch import attention
from regard.torch import distributed as rd

SIZE = 128  # of a head
BUSY = 60_000_000  # cycles of a GPU: over 30 ms
MASKS = ("causal", "documents")
SCHEMES = ("gather", "halo", "halo/by_area", "ulysses", "ring")
OVERLAPS = {False: "", "heads": " by heads", "keys": " in stages", "documents": " by documents"}


@dataclass(frozen=True)
class Problem:
    mask: str
    rows: int  # of a rank
    heads: tuple[int, int]
    dtype: torch.dtype

    def plan(self, ranks: int, scheme: str, ranks_per_node: int = 0) -> rd.Plan:
        """scheme: the plan's; "halo/by_area" names its rows too."""
        scheme, _, rows = scheme.partition("/")
        levels = {"ranks_per_node": ranks_per_node} if "+" in scheme else {}
        length = self.rows * ranks
        cuts = {"cu_seqlens": documents(length)} if self.mask == "documents" else {}
        return rd.plan(length, world_size=ranks, heads_q=self.heads[0], heads_kv=self.heads[1],
                       head_size=SIZE, scheme=scheme, rows=rows or "equal", causal=True,
                       element_bytes=self.dtype.itemsize,
                       **levels, **cuts)

    def tensors(self, length: int, device: torch.device) -> list[torch.Tensor]:
        """q, k, v, dout; equal on all ranks."""
        draw = torch.Generator(device).manual_seed(1)
        query, key = self.heads
        return [torch.randn(1, heads, length, SIZE, generator=draw, device=device).to(self.dtype)
                for heads in (query, key, key, query)]

    def flops(self, area: float) -> tuple[float, float]:
        """Of a forward and of a backward pass."""
        return 4 * SIZE * self.heads[0] * area, 10 * SIZE * self.heads[0] * area


def documents(length: int) -> list[int]:
    """Cuts of documents of 1024 to 8192 rows, or of a sixteenth to a half of a short sequence."""
    draw = torch.Generator().manual_seed(2)
    most = min(8192, max(2, length // 2))
    cuts = [0]
    while cuts[-1] < length:
        size = int(torch.randint(max(1, most // 8), most + 1, (), generator=draw))
        cuts.append(min(length, cuts[-1] + size))
    return cuts


# ---------------------------------------------------------------------------------------- measuring

def timed(call, device: torch.device, group, options: argparse.Namespace) -> float:
    """Seconds of a call: the median over rounds of the slowest rank's."""
    found = []
    for _ in range(options.rounds + 1):
        if group is not None:
            dist.barrier(group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (queued if options.queued else from_idle)(call, device, options.calls)
        took = torch.tensor(seconds, dtype=torch.float64, device=device)
        if group is not None:
            dist.all_reduce(took, dist.ReduceOp.MAX, group)
        found.append(float(took))
    return statistics.median(found[1:])


def from_idle(call, device: torch.device, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def queued(call, device: torch.device, calls: int) -> float:
    """By the GPU's clock, behind a kernel that is busy until all calls are queued, and a first call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / calls


def passes(function, tensors, device, group, options):
    """Seconds of forward and of backward; out, dq and dk."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    with torch.no_grad():
        forward = timed(lambda: function(q, k, v), device, group, options)
    out = function(q, k, v)
    backward = timed(lambda: torch.autograd.grad(out, (q, k, v), tensors[3], retain_graph=True),
                     device, group, options)
    dq, dk = torch.autograd.grad(out, (q, k), tensors[3], retain_graph=True)
    return forward, backward, out.detach(), dq, dk


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    nccl = options.backend == "nccl"
    device = torch.device("cuda", rank) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(options.threads)
    more = {}
    if nccl and options.high_priority:
        more["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group(options.backend, init_method=f"file://{folder}/store", rank=rank,
                            world_size=options.ranks, **more)
    if rank == 0:
        print(f"{'mask':<10} {'rows':>6} {'heads':>6} {'scheme':<25} {'forward':>12} "
              f"{'backward':>12} {'efficiency':>11} {'balance':>8} {'error':>8}")
    problems = [Problem(mask, rows, heads, options.dtype)
                for mask in options.masks for rows in options.rows for heads in options.heads]
    for problem in problems:
        compare(problem, options, device)
    for problem in problems if nccl else ():
        if problem.mask == "causal" and len({*problem.heads}) == 1:
            compare_pytorch(problem, options, device)
    dist.destroy_process_group()


def compare(problem: Problem, options: argparse.Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), options.ranks
    whole = problem.tensors(problem.rows * ranks, device)
    alone = alone_on_one(problem, ranks, whole, device, options)
    for scheme, more in schemes(problem, ranks, options.schemes, options.overlaps):
        plan = problem.plan(ranks, scheme)
        local = [plan.shard(x, rank, 2) for x in whole]
        forward, backward, *found = passes(
            lambda q, k, v: rd.attention(q, k, v, plan, **more), local, device,
            dist.group.WORLD, options)
        if rank == 0:
            error = max(difference(one, plan.shard(wanted, 0, 2))
                        for one, wanted in zip(found, alone[2:]))
            show(problem, scheme + OVERLAPS[more.get("overlap", False)], plan,
                 (forward, backward), alone, error)


def compare_pytorch(problem: Problem, options: argparse.Namespace, device: torch.device) -> None:
    whole = problem.tensors(problem.rows * options.ranks, device)
    alone = alone_on_one(problem, options.ranks, whole, device, options)
    forward, backward, *found = by_pytorch(options.ranks, whole, device, options)
    if dist.get_rank() > 0:
        return
    ends = 2 * options.ranks - 1  # rank 0 has the first and the last part of so many
    error = max(difference(one, torch.cat([*wanted.chunk(ends + 1, 2)][::ends], 2))
                for one, wanted in zip(found, alone[2:]))
    show(problem, "PyTorch", problem.plan(options.ranks, "gather"), (forward, backward), alone, error)


def by_pytorch(ranks, whole, device, options):
    """As `passes`, by torch.distributed.tensor.experimental.context_parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    parts = [x.clone() for x in whole]
    with (context_parallel(init_device_mesh("cuda", (ranks,)), buffers=parts,
                           buffer_seq_dims=[2] * len(parts), no_restore_buffers={*parts}),
          sdpa_kernel(SDPBackend.CUDNN_ATTENTION)):
        return passes(lambda q, k, v: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True), parts, device, dist.group.WORLD, options)


def alone_on_one(problem, ranks, whole, device, options):
    """The whole problem in one call: on the GPU of each rank; on the CPU on rank 0, while the
    others wait."""
    found = None
    if device.type == "cuda" or dist.get_rank() == 0:
        found = packed(problem, ranks, whole, device, options) if problem.mask == "documents" else (
            passes(lambda q, k, v: attention(q, k, v, causal="top_left"), whole, device, None, options))
    dist.barrier()
    return found


def packed(problem, ranks, whole, device, options):
    """Packed documents by cu_seqlens, in one process."""
    cuts = documents(problem.rows * ranks)
    starts = torch.tensor(cuts, dtype=torch.int32, device=device)
    most = max(end - begin for begin, end in zip(cuts, cuts[1:]))

    def function(q, k, v):
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        out = attention(*rows, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=most,
                        max_seqlen_k=most, causal="top_left")
        return out.transpose(0, 1)[None]

    return passes(function, whole, device, None, options)


def schemes(problem: Problem, ranks: int, wanted: list[str], overlaps: list[str | bool]):
    """Each with the options of its call."""
    for scheme in wanted:
        if scheme.startswith("halo") and problem.mask == "causal":
            continue
        for overlap in overlaps if scheme.partition("/")[0] in ("gather", "halo") else [None]:
            if (overlap == "heads" and problem.heads[1] == 1) or (
                    overlap == "documents" and not problem.plan(ranks, scheme).has_whole_documents):
                continue
            yield scheme, {} if overlap is None else {"overlap": overlap}


def show(problem, scheme, plan, took, alone, error) -> None:
    area, ranks = sum(plan.areas), plan.world_size
    rates = [flops / ranks / seconds for flops, seconds in zip(problem.flops(area), took)]
    unit, name = (1e12, "TFLOP/s") if max(rates) > 1e12 else (1e9, "GFLOP/s")
    efficiency = [one / (ranks * seconds) for one, seconds in zip(alone[:2], took)]
    print(f"{problem.mask:<10} {problem.rows:>6} {problem.heads[0]:>3}/{problem.heads[1]:<2} "
          f"{scheme:<25} {rates[0] / unit:>4.0f} {name} {rates[1] / unit:>4.0f} {name} "
          f"{efficiency[0]:>5.2f} {efficiency[1]:>5.2f} {plan.balance:>8.3f} {error:>8.1e}",
          flush=True)


# -------------------------------------------------------------------------------------------- model

def model(options: argparse.Namespace) -> None:
    """What plans for many ranks take by bytes and visible area."""
    print(f"{'mask':<10} {'ranks':>6} {'rows':>6} {'heads':>6} {'scheme':<15} {'balance':>8} "
          f"{'GB a step':>10} {'ms':>9} {'efficiency':>11} {'hidden':>7}")
    for mask in MASKS:
        for ranks in options.model:
            for heads in options.heads:
                problem = Problem(mask, options.rows[0], heads, torch.bfloat16)
                for scheme in modelled(mask, ranks, options.ranks_per_node):
                    show_model(problem, problem.plan(ranks, scheme, options.ranks_per_node), options)


def modelled(mask: str, ranks: int, ranks_per_node: int) -> list[str]:
    near = ["halo"] if mask == "documents" else []
    levels = [f"ulysses+{scheme}" for scheme in ("gather", *near)] if (
        ranks > ranks_per_node and ranks % ranks_per_node == 0) else []
    return ["gather", *near, "ulysses", *levels]


def show_model(problem: Problem, plan: rd.Plan, options: argparse.Namespace) -> None:
    work = sum(problem.flops(sum(plan.areas))) / plan.world_size / options.flops  # mean of ranks
    computing = work * plan.balance
    moving = max(seconds_of_moving(plan, rank, options) for rank in range(plan.world_size))
    moved = max(sum(plan.moved(rank)[:2]) for rank in range(plan.world_size))
    print(f"{problem.mask:<10} {plan.world_size:>6} {problem.rows:>6} "
          f"{problem.heads[0]:>3}/{problem.heads[1]:<2} {plan.scheme:<15} {plan.balance:>8.3f} "
          f"{moved / 1e9:>10.2f} {(computing + moving) * 1e3:>9.1f} "
          f"{work / (computing + moving):>11.2f} {work / max(computing, moving):>7.2f}", flush=True)


def seconds_of_moving(plan: rd.Plan, rank: int, options: argparse.Namespace) -> float:
    total = sum(plan.moved(rank)[:2])
    if plan.nodes is None:
        alone = plan.world_size <= options.ranks_per_node
        return total / (options.node_bandwidth if alone else options.bandwidth)
    node, place = divmod(rank, plan.ranks_per_node)
    within = sum(plan.within_node(node).moved(place)[:2])
    return within / options.node_bandwidth + (total - within) / options.bandwidth


def explain() -> None:
    """Plans of 32768 rows over four ranks, of 32 query heads and 8 heads of keys."""
    cuts = [0, 3000, 9000, 10024, 17000, 22500, 26000, 32768]
    for more in ({"scheme": "gather"}, {}, {"cu_seqlens": cuts},
                 {"scheme": "ulysses+gather", "ranks_per_node": 2}):
        print(rd.plan(32768, world_size=4, heads_q=32, heads_kv=8, head_size=SIZE, causal=True,
                      **more).explain(), end="\n\n")


def pairs_of(text: str) -> list[tuple[int, int]]:
    return [(int(one), int(other)) for one, other in (pair.split("/") for pair in text.split(","))]


def overlaps_of(text: str) -> list[str | bool]:
    return [False if name == "none" else name for name in text.split(",")]


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=["gloo", "nccl"],
                        default="nccl" if torch.cuda.device_count() > 1 else "gloo")
    parser.add_argument("--rows", type=numbers, default=[8192], help="of a rank (default 8192)")
    parser.add_argument("--heads", type=pairs_of, default=[(32, 8)],
                        help="query/key heads, with commas between (default 32/8)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=[*SCHEMES],
                        help="with commas between (default: all of one level)")
    parser.add_argument("--overlaps", type=overlaps_of, default=[*OVERLAPS],
                        help="of gather and halo: none, heads, keys, documents (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on the CPU")
    parser.add_argument("--masks", type=lambda text: text.split(","), default=[*MASKS])
    parser.add_argument("--high-priority", action="store_true",
                        help="NCCL's kernels come before others that wait")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1, help="between synchronisations (default 1)")
    parser.add_argument("--queued", action="store_true", help="behind a busy kernel, by the GPU's clock")
    parser.add_argument("--model", type=numbers, help="plans for these numbers of ranks, no device")
    parser.add_argument("--explain", action="store_true", help="four plans, no device")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="the model's (default 8)")
    parser.add_argument("--bandwidth", type=float, default=4e10,
                        help="the model's: bytes a second that a rank receives from other nodes "
                        "(default 4e10)")
    parser.add_argument("--node-bandwidth", type=float, default=3e11,
                        help="the model's: likewise within a node (default 3e11)")
    parser.add_argument("--flops", type=float, default=6e14, help="the model's, of a rank")
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    if options.explain or options.model:
        explain() if options.explain else model(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (options, folder), options.ranks)


if __name__ == "__main__":
    main()
