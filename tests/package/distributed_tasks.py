"""What the workers of the tests of regard.torch.distributed do, next to `attend`; and the
definition of attention over a matrix of scores."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import GRADED, Case, attend, levels, local_tensors
from torch import Tensor
from torch.distributed import ProcessGroup

import regard
import regard.torch
from regard.torch import distributed as rd
from regard.torch.distributed.ranks import Ranks


def by_definition(case: Case) -> dict[str, Tensor]:
    """Whole results in float64: softmax of a matrix of scores, by PyTorch's own operators."""
    tensors = {name: x.clone() if x.dtype in (torch.bool, torch.int32) else x.double()
               for name, x in case.tensors().items()}
    inputs = {name: x.requires_grad_() for name, x in tensors.items() if name in GRADED}
    share = case.heads[0] // case.heads[1]
    k, v = (inputs[name].repeat_interleave(share, 1) for name in "kv")
    scale = case.options.get("scale", case.sizes[0] ** -0.5)
    scores = scale * inputs["q"] @ k.transpose(-1, -2)
    cap = case.options.get("softcap", 0)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores + inputs["bias"] if "bias" in inputs else scores
    scores = scores.masked_fill(~visible(case, tensors), -torch.inf)
    if "sink" in inputs:
        sink = inputs["sink"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = weights[..., :case.length] @ v
    real = lse.isfinite()
    loss = (out * tensors["dout"]).sum()
    if case.lse:
        loss = loss + (lse * tensors["dlse"])[real].sum()
    loss.backward()
    found = {"out": out.detach()} | ({"lse": lse.detach()} if case.lse else {})
    return found | {f"d{name}": x.grad.nan_to_num() for name, x in inputs.items()
                    if x.grad is not None}


def visible(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    """(B or 1, Hq or 1, S, S) bool"""
    i, j = torch.arange(case.length)[:, None], torch.arange(case.length)[None, :]
    seen = torch.ones(1, 1, case.length, case.length, dtype=torch.bool)
    if case.pairs.get("causal"):
        seen = seen & (j <= i)
    left, right = case.pairs.get("window", (None, None))
    seen = seen if left is None else seen & (i - j <= left)
    seen = seen if right is None else seen & (j - i <= right)
    if "cu_seqlens" in case.pairs:
        cuts = torch.tensor(case.pairs["cu_seqlens"])
        document = torch.searchsorted(cuts, torch.arange(case.length), right=True)
        seen = seen & (document[:, None] == document) & (document[:, None] < len(cuts))
    seen = seen & tensors["mask"] if "mask" in tensors else seen
    spans = [tensors["row_spans"]] if "row_spans" in tensors else []
    if "mask" in case.pairs:
        spans.append(torch.as_tensor(case.pairs["mask"].row_spans))
        seen = seen & (j <= i) if case.pairs["mask"].causal != "none" else seen
    for ends in spans:
        shown = [(ends[..., n, None] <= j) & (j < ends[..., n + 1, None]) for n in (0, 2)]
        seen = seen & (shown[0] | shown[1])
    return seen


# ----------------------------------------------------------------------------------------- the tasks

def place(group: ProcessGroup) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


def inputs_of(case: Case, scheme: str, group: ProcessGroup) -> tuple[rd.Plan, dict[str, Tensor]]:
    rank, world = place(group)
    plan = case.plan(world, scheme)
    return plan, local_tensors(case, plan, rank)


def forward_only(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]) -> Tensor:
    plan, tensors = inputs_of(case, scheme, group)
    del tensors["dout"], tensors["dlse"]
    with torch.no_grad():
        return rd.attention(**tensors, plan=plan, group=group, **more)


def of_a_seed(group: ProcessGroup, case: Case, scheme: str, device: str, in_memory: bool
              ) -> dict[str, Tensor]:
    """`attend` with the case's seed as a number, or as a tensor of one integer."""
    if in_memory:
        seed = (case.options["dropout_seed"] + 2**63) % 2**64 - 2**63
        case = replace(case, options=case.options | {
            "dropout_seed": torch.tensor(seed, dtype=torch.int64, device=device)})
    return attend(group, case, scheme, {}, device)


def some_gradients(group: ProcessGroup, case: Case, scheme: str, names: tuple[str, ...]
                   ) -> dict[str, Tensor]:
    plan, tensors = inputs_of(case, scheme, group)
    dout, dlse = tensors.pop("dout"), tensors.pop("dlse")
    for name in names:
        tensors[name].requires_grad_()
    results = rd.attention(**tensors, plan=plan, group=group, return_lse=True)
    torch.autograd.backward(results, [dout, dlse])
    assert all(tensors[name].grad is None for name in tensors if name not in names)
    return {f"d{name}": tensors[name].grad for name in names}


def gradients_of_sum(case: Case, group: ProcessGroup | None, used: str, scheme: str = ""
                     ) -> dict[str, Tensor]:
    """Of the sum of out or of lse, whose gradients have stride 0; without a group, of the whole."""
    if group is None:
        tensors = case.tensors()
    else:
        plan, tensors = inputs_of(case, scheme, group)
    leaves = {"q": tensors["q"].transpose(1, 2).contiguous().transpose(1, 2),
              "k": tensors["k"].repeat_interleave(2, -1)[..., ::2], "v": tensors["v"]}
    for x in leaves.values():
        x.requires_grad_()
    if group is None:
        results = regard.torch.attention(**leaves, mask=case.mask_of_plan(), return_lse=True)
    else:
        results = rd.attention(**leaves, plan=plan, group=group, return_lse=True)
    dict(zip(("out", "lse"), results))[used].sum().backward()
    return {f"d{name}": x.grad for name, x in leaves.items()}


class Stop(torch.autograd.Function):
    """The identity, whose input gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def where_a_rank_uses_nothing(group: ProcessGroup, case: Case, scheme: str) -> bool:
    """Whether gradients are those where rank 0 multiplies its out by 0."""
    plan, tensors = inputs_of(case, scheme, group)
    found = []
    for unused in (Stop.apply, lambda out: 0 * out):
        leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]
        out = rd.attention(*leaves, plan, group)
        loss = (unused(out) if group.rank() == 0 else out).sum() + sum((0 * x).sum() for x in leaves)
        found.append(torch.autograd.grad(loss, leaves))
    return all(torch.equal(x, y) for x, y in zip(*found))


def with_scalars(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]) -> bool:
    """Whether a bias and a mask without dimensions mean what those of one element do."""
    plan, tensors = inputs_of(case, scheme, group)
    found = []
    for shape in ((), (1, 1)):
        bias = torch.full(shape, 0.5, dtype=tensors["q"].dtype, requires_grad=True)
        mask = torch.ones(shape, dtype=torch.bool)
        out = rd.attention(tensors["q"], tensors["k"], tensors["v"], plan, group, bias=bias,
                           mask=mask, **more)
        (dbias,) = torch.autograd.grad(out, bias, tensors["dout"])
        assert dbias.shape == shape
        found.append((out.detach(), dbias.reshape(())))
    return all(torch.equal(x, y) for x, y in zip(*found))


def gradients_of_shards(group: ProcessGroup, case: Case, scheme: str, used: str
                        ) -> dict[str, Tensor]:
    return gradients_of_sum(case, group, used, scheme)


def under_autocast(group: ProcessGroup, case: Case, scheme: str) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return attend(group, case, scheme)


def bytes_received(group: ProcessGroup, case: Case, scheme: str, overlap: Any
                   ) -> tuple[int, ...]:
    """What the methods of Ranks bring from other ranks in forward, and in backward; and how much of
    both all-gathers bring."""
    counted, by_gather = [0], [0]

    class Counting(Ranks):
        def begin_all_gather(self, x: Tensor) -> Any:
            counted[0] += (self.size - 1) * x.numel() * x.itemsize
            by_gather[0] += (self.size - 1) * x.numel() * x.itemsize
            return super().begin_all_gather(x)

        def begin_all_to_all(self, x: Tensor, sent: Any, received: Any) -> Any:
            rows = sum(received) - received[self.rank]
            counted[0] += rows * math.prod(x.shape[1:]) * x.itemsize
            return super().begin_all_to_all(x, sent, received)

        def begin_pass(self, x: Tensor, rows: int) -> Any:
            counted[0] += rows * x[:1].numel() * x.itemsize
            return super().begin_pass(x, rows)


    from regard.torch.distributed import ranks

    more = {"overlap": overlap} if scheme in ("gather", "halo") else {}
    attend(group, case, scheme, more)  # the ranks agree on the plan
    plan, tensors = inputs_of(case, scheme, group)
    leaves = [tensors[name].requires_grad_() for name in "qkv"]
    ranks.Ranks = Counting  # type: ignore[misc]
    try:
        at_levels: Any = levels() if plan.nodes is not None else group
        out = rd.attention(*leaves, plan, at_levels, **more)
        forward, counted[0] = counted[0], 0
        out.backward(tensors["dout"])
    finally:
        ranks.Ranks = Ranks  # type: ignore[misc]
    return forward, counted[0], by_gather[0]


class ThroughTheHost(Ranks):
    """Ranks whose tensors are on a GPU and whose group moves memory of the host. Several may share
    one GPU, where NCCL wants one for each."""

    def devices(self) -> list[str]:
        return [*super().devices(), "cuda"]

    def begin_all_gather(self, x: Tensor) -> Any:
        return self._back(super().begin_all_gather(x.cpu()), x)

    def begin_all_to_all(self, x: Tensor, sent: Any, received: Any) -> Any:
        return self._back(super().begin_all_to_all(x.cpu(), sent, received), x)

    def begin_pass(self, x: Tensor, rows: int) -> Any:
        return self._back(super().begin_pass(x.cpu(), rows), x)

    def _back(self, coming: Any, x: Tensor) -> Any:
        return lambda: coming().to(x.device)


def attend_on_gpu(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]
                  ) -> dict[str, Tensor]:
    """`attend` on this worker's GPU: its own with NCCL, else the one that all share."""
    from regard.torch.distributed import ranks

    shares = dist.get_backend(group) != "nccl"
    ranks.Ranks = ThroughTheHost if shares else Ranks  # type: ignore[misc]
    try:
        return attend(group, case, scheme, more, f"cuda:{0 if shares else place(group)[0]}")
    finally:
        ranks.Ranks = Ranks  # type: ignore[misc]


def queued_and_apart(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]) -> float:
    """How much results of calls that follow each other differ from those of calls that wait for the
    GPU, at most."""
    rank, world = place(group)
    plan, draw = case.plan(world, scheme), torch.Generator(f"cuda:{rank}").manual_seed(rank)

    def tensors(heads: int) -> list[Tensor]:
        return [torch.randn(1, heads, plan.rows(rank), 64, generator=draw, device=draw.device,
                            dtype=case.dtype).requires_grad_() for _ in range(6)]

    calls = list(zip(tensors(case.heads[0]), *(tensors(case.heads[1]) for _ in range(2))))

    def results(waits: bool) -> list[Tensor]:
        found = []
        for q, k, v in calls:
            out = rd.attention(q, k, v, plan, group, deterministic=True, **more)
            found += [out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach())]
            if waits:
                torch.cuda.synchronize()
                dist.barrier(group)
        return found

    apart = results(True)
    return max(float((one - other).abs().max()) for _ in range(3)
               for one, other in zip(results(False), apart))


def captured_and_not(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]
                     ) -> tuple[float, float]:
    """How much results of a graph's replay, with new inputs, differ at most from those of the same call
    outside of the graph; and from those of the inputs with which it was captured."""
    rank, world = place(group)
    os.environ["REGARD_COPIES_BETWEEN_GPUS"] = "0"
    try:
        own = dist.new_group(list(range(world)))
        plan, draw = case.plan(world, scheme), torch.Generator(f"cuda:{rank}").manual_seed(rank)
        q, k, v = (torch.randn(1, heads, plan.rows(rank), 64, generator=draw, device=draw.device,
                               dtype=case.dtype).requires_grad_()
                   for heads in (case.heads[0], case.heads[1], case.heads[1]))

        def results() -> list[Tensor]:
            out = rd.attention(q, k, v, plan, own, deterministic=True, **more)
            return [out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach())]

        stream = torch.cuda.Stream(draw.device)
        stream.wait_stream(torch.cuda.current_stream(draw.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                first = [x.clone() for x in results()]
        torch.cuda.current_stream(draw.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(draw.device), torch.cuda.graph(graph,
                                                              capture_error_mode="thread_local"):
            captured = results()
        with torch.no_grad():
            for x in (q, k, v):
                x.copy_(torch.randn(x.shape, generator=draw, device=x.device, dtype=x.dtype))
        graph.replay()
        plain = results()
        torch.cuda.synchronize(draw.device)
        return (max(float((one - other).abs().max()) for one, other in zip(captured, plain)),
                min(float((one - other).abs().max()) for one, other in zip(captured, first)))
    finally:
        del os.environ["REGARD_COPIES_BETWEEN_GPUS"]


def of_a_seed_on_gpu(group: ProcessGroup, case: Case, scheme: str, in_memory: bool
                     ) -> dict[str, Tensor]:
    """`of_a_seed` on this worker's own GPU."""
    return of_a_seed(group, case, scheme, f"cuda:{place(group)[0]}", in_memory)


class SinkAttention(torch.nn.Module):
    """q, k and v of one weight, and a sink; over a plan's ranks, or in one process."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(4, 64, generator=draw, dtype=torch.float64))
        self.sink = torch.nn.Parameter(torch.randn(4, generator=draw, dtype=torch.float64))

    def forward(self, x: Tensor, plan: rd.Plan | None, group: ProcessGroup | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2)
                   for part in (x @ self.weight).split([32, 16, 16], -1))
        if plan is None:
            return regard.torch.attention(q, k, v, sink=self.sink, causal=True)
        return rd.attention(q, k, v, plan, group, sink=self.sink, sum_sink_gradient=False)


def data_parallel(group: ProcessGroup) -> list[float]:
    """DistributedDataParallel averages gradients: the loss makes up for it. The differences of
    the gradients from one process's, in norm."""
    rank, world = place(group)
    plan = rd.plan(500, world_size=world, heads_q=4, heads_kv=2, head_size=8, causal=True)
    x = torch.randn(1, 500, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    model, alone = SinkAttention(), SinkAttention()
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    out = parallel(plan.shard(x, rank, 1), plan, group)
    ((out ** 2).sum() * world / 500).backward()
    ((alone(x, None, None) ** 2).sum() / 500).backward()
    return [float((one.grad - other.grad).norm() / other.grad.norm())
            for one, other in zip(model.parameters(), alone.parameters())]


class Checkpointed(torch.nn.Module):
    """A block whose attention is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.out = torch.nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: Tensor, plan: rd.Plan | None, group: Any, checkpoints: bool) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        def block(x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2)
                       for part in self.qkv(x).chunk(3, -1))
            found = (regard.torch.attention(q, k, v, causal=True) if plan is None
                     else rd.attention(q, k, v, plan, group))
            return x + self.out(found.transpose(1, 2).flatten(2))

        return checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)


def in_fsdp(group: ProcessGroup, scheme: str) -> list[float]:
    """Parameters sharded over a mesh of the same ranks, gathered in each pass, and attention
    computed again in backward; the differences of the gradients from one process's, in norm."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank, world = place(group)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("context",))
    plan = rd.plan(500, world_size=world, heads_q=4, head_size=4, causal=True, scheme=scheme,
                   element_bytes=8)
    x = torch.randn(1, 500, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    model, alone = Checkpointed(), Checkpointed()
    fully_shard(model, mesh=mesh)
    out = model(plan.shard(x, rank, 1), plan, mesh.get_group("context"), True)
    ((out ** 2).sum() * world / 500).backward()  # the mean over ranks is taken
    ((alone(x, None, None, False) ** 2).sum() / 500).backward()
    return [float((one.grad.full_tensor() - other.grad).norm() / other.grad.norm())
            for one, other in zip(model.parameters(), alone.parameters())]


def round_trip(group: ProcessGroup, case: Case) -> bool:
    """Of tensors of several types and ranks, along several axes."""
    plan, _ = inputs_of(case, "gather", group)
    S, rank = case.length, place(group)[0]
    draw = torch.Generator().manual_seed(1)
    wholes = [(torch.randn(2, S, 3, generator=draw).bfloat16(), 1), (torch.arange(S), 0),
              (torch.rand(4, S, generator=draw) > 0.5, -1), (torch.randn(S, 2, 2), 0)]
    wholes[-1] = torch.arange(4.0 * S).view(S, 2, 2), 0
    wholes += [(torch.arange(S)[None], 1), (torch.arange(1.0 * S)[None, None], 2)]  # rows of one
    return all(plan.unshard(plan.shard(x, rank, dim), group, dim).equal(x) for x, dim in wholes)


def bandwidth(group: ProcessGroup) -> tuple[float, float]:
    try:
        rd.measure_bandwidth(group, device="meta")
    except regard.InvalidArgument as error:
        assert error.argument == "device"
    else:
        raise AssertionError("a group of gloo cannot move tensors on meta")
    found = rd.measure_bandwidth(group, megabytes=1)
    return found.all_gather, found.all_to_all


def bytes_held_by_gradients(group: ProcessGroup, case: Case, scheme: str) -> float:
    """By dk and dv, which may be views, relative to their own size."""
    plan, tensors = inputs_of(case, scheme, group)
    leaves = [tensors[name].requires_grad_() for name in "qkv"]
    out = rd.attention(*leaves, plan, group)
    _, dk, dv = torch.autograd.grad(out, leaves, tensors["dout"])
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (dk, dv)}
    return sum(held.values()) / (dk.nbytes + dv.nbytes)
