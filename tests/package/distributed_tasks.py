"""What the workers of the tests of regard.torch.distributed do, next to `attend`; and the
definition of attention over a matrix of scores."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import GRADED, Case, attend, levels, local_tensors, split_scheme
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


# ------------------------------------------------------------------------------------------- faults

def bytes_held_by_gradients(group: ProcessGroup, case: Case, scheme: str) -> float:
    """By dk and dv, which may be views, relative to their own size."""
    plan, tensors = inputs_of(case, scheme, group)
    leaves = [tensors[name].requires_grad_() for name in "qkv"]
    out = rd.attention(*leaves, plan, group)
    _, dk, dv = torch.autograd.grad(out, leaves, tensors["dout"])
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (dk, dv)}
    return sum(held.values()) / (dk.nbytes + dv.nbytes)


def refused_after_others(group: ProcessGroup) -> list[str]:
    """The arguments that a call is refused for whose like was accepted before."""
    plan = rd.plan(300, world_size=place(group)[1], heads_q=2, head_size=8)
    q = torch.randn(1, 2, plan.rows(place(group)[0]), 8)
    right: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 3, "return_lse": True}
    found = []
    for wrong in ({"dropout_seed": None}, {"dropout_seed": -1}, {"dropout_seed": 2**64},
                  {"return_lse": 1}, {"softcap": False}, {"threads": True}, {"softcat": 1}):
        rd.attention(q, q, q, plan, group, **right)
        try:
            rd.attention(q, q, q, plan, group, **(right | wrong))
        except regard.Error as error:
            found.append(error.argument)
    one, other = (rd.attention(q, q, q, plan, group, **(right | {"dropout_seed": seed}))[0]
                  for seed in (4, 5))
    assert not one.equal(other)
    return found


def faulty(fault: str, plan: rd.Plan, tensors: dict[str, Any]) -> None:
    """Makes one argument of a call wrong."""
    q, rows = tensors["q"], tensors["q"].shape[2]
    changes: dict[str, dict[str, Any]] = {
        "rows": {"q": torch.cat([q, q], 2)}, "heads": {"k": tensors["k"][:, :1]},
        "type": {"v": tensors["v"].float()}, "array": {"q": q.numpy()},
        "device": {name: tensors[name].to("meta") for name in "qkv"},
        "mixed": {"k": tensors["k"].to("meta")}, "bias": {"bias": torch.zeros(rows, rows)},
        "mask": {"mask": torch.ones(rows, plan.sizes.length)},
        "spans": {"row_spans": torch.zeros(rows + 1, 2, dtype=torch.int32)},
        "sink": {"sink": torch.zeros(5)}, "number": {"softcap": "high"},
        "unknown": {"softcat": 1.0}, "causal": {"causal": True},
        "dropout": {"dropout_p": 0.5}, "softcap": {"softcap": -1.0},
        "certain": {"dropout_p": 1.0, "dropout_seed": 1}, "backend": {"backend": "abacus"},
        "span_heads": {"row_spans": torch.zeros(1, 3, rows, 2, dtype=torch.int32)},
        "odd_spans": {"row_spans": torch.zeros(rows, 3, dtype=torch.int32)},
        "many_spans": {"row_spans": torch.zeros(rows, 18, dtype=torch.int32)},
        "plan": {"plan": "gather"}, "world": {"plan": replace(plan, world_size=2)}}
    tensors.update(changes[fault])


def with_fault(group: ProcessGroup, name: str, fault: str, wrong: int) -> None:
    """The first call with a plan, in which one rank has a wrong argument. Each fault has a plan of
    its own, because later calls are checked by each rank alone."""
    case = Case(name, 300, pairs={"window": (3 + sum(map(ord, name)), None)})
    plan, tensors = inputs_of(case, "gather", group)
    del tensors["dout"], tensors["dlse"]
    if place(group)[0] == wrong:
        faulty(fault, plan, tensors)
    rd.attention(**{"plan": plan, "group": group, **tensors})


def without_heads(group: ProcessGroup, wrong: int, option: str) -> None:
    """ulysses with fewer heads than ranks: the ranks without one have no call of their own."""
    case = Case("headless", 300, heads=(2, 1), pairs={"window": (wrong, len(option))})
    plan, tensors = inputs_of(case, "ulysses", group)
    more = {"backend": "abacus"} if option == "backend" else {option: -1.0}
    options: Any = more if wrong in (place(group)[0], 9) else {}
    rd.attention(*(tensors[name] for name in "qkv"), plan, group, **options)


def without_entries(group: ProcessGroup, scheme: str) -> list[tuple[int, ...]]:
    """The shapes of results and gradients of an empty batch."""
    found = attend(group, Case("empty", 300, batch=0, pairs={"causal": True}), scheme)
    return [tuple(found[name].shape) for name in ("out", "lse", "dq", "dk", "dv")]


def in_a_mesh(group: ProcessGroup) -> None:
    class Mesh:
        def get_group(self) -> ProcessGroup:
            return group

    plan, tensors = inputs_of(Case("mesh"), "gather", group)
    rd.attention(*(tensors[name] for name in "qkv"), plan, Mesh())  # type: ignore[arg-type]


def of_another_batch(group: ProcessGroup) -> None:
    spans = torch.tensor([[[[0, 300]]]] * 3, dtype=torch.int32)
    mask = regard.masks.Mask(300, 300, row_spans=spans)
    plan, tensors = inputs_of(Case("batches", pairs={"mask": mask}), "gather", group)
    rd.attention(*(tensors[name] for name in "qkv"), plan, group)


def with_later_fault(group: ProcessGroup, fault: str) -> bool:
    case = Case("later", 384)
    plan, tensors = inputs_of(case, "gather", group)
    del tensors["dout"], tensors["dlse"]
    right = rd.attention(**tensors, plan=plan, group=group)
    broken: dict[str, Any] = dict(tensors)
    faulty(fault, plan, broken)
    try:
        rd.attention(**broken, plan=plan, group=group)
    except regard.Error:
        return bool(rd.attention(**tensors, plan=plan, group=group).equal(right))
    return False


def works_after_an_error(group: ProcessGroup, scheme: str, where: str) -> tuple[str, bool]:
    """All ranks raise, by an option that the library refuses or within the first local call; what
    they had sent by then must not be taken for the keys of the next call."""
    from regard.torch.distributed import call as local_call

    case = Case("after", 384, pairs={"causal": True}, lse=False)
    scheme, more = split_scheme(scheme)
    right = forward_only(group, case, scheme, more)
    name = "forward_into" if scheme == "ring" or more else "forward"
    original, text = getattr(local_call, name), ""

    def failing(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("a local call failed")

    try:
        if where == "call":
            setattr(local_call, name, failing)
            forward_only(group, replace(case, name="other"), scheme, more)
        forward_only(group, replace(case, name="other"), scheme, more | {"softcap": -1.0})
    except (regard.Error, RuntimeError) as error:
        text = str(error)
    finally:
        setattr(local_call, name, original)
    return text, all(forward_only(group, case, scheme, more).equal(right) for _ in range(2))


def that_differ(group: ProcessGroup, difference: str) -> None:
    """One rank has another plan, option, or set of gradients."""
    odd = place(group)[0] == 2
    length = {"plan": 301, "option": 302, "gradient": 303, "mask": 304}[difference]
    case = Case("differ", length, pairs={"causal": True})
    scheme = "ring" if odd and difference == "plan" else "gather"
    plan, tensors = inputs_of(replace(case, name="differ"), scheme, group)
    q, k, v = (tensors[name] for name in "qkv")
    if odd and difference == "gradient":
        q.requires_grad_()
    heads = 4 if odd else 1
    mask = torch.ones(1, heads, 1, length, dtype=torch.bool) if difference == "mask" else None
    rd.attention(q, k, v, plan, group, mask=mask,
                 softcap=2.0 if odd and difference == "option" else 0.0)


def in_wrong_group(group: ProcessGroup, case: Case, world: int) -> None:
    plan = case.plan(world, "gather")
    tensors = local_tensors(case, plan, place(group)[0])
    rd.attention(tensors["q"], tensors["k"], tensors["v"], plan, group)
