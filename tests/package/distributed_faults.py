"""What workers do to test calls of regard.torch.distributed that are wrong on some or all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from distributed_cases import Case, attend, local_tensors, split_scheme
from distributed_tasks import forward_only, inputs_of, place
from torch.distributed import ProcessGroup

import regard
from regard.torch import distributed as rd


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
        "unknown": {"softcat": 1.0}, "result": {"out_type": "float16"}, "causal": {"causal": True},
        "dropout": {"dropout_p": 0.5}, "softcap": {"softcap": -1.0},
        "certain": {"dropout_p": 1.0, "dropout_seed": 1}, "backend": {"backend": "abacus"},
        "span_heads": {"row_spans": torch.zeros(1, 3, rows, 2, dtype=torch.int32)},
        "odd_spans": {"row_spans": torch.zeros(rows, 3, dtype=torch.int32)},
        "many_spans": {"row_spans": torch.zeros(rows, 18, dtype=torch.int32)},
        "plan": {"plan": "gather"}, "world": {"plan": replace(plan, world_size=2)}}
    tensors.update(changes[fault])


def twice_differentiated(group: ProcessGroup) -> str:
    plan = rd.plan(300, world_size=place(group)[1], heads_q=2, head_size=8)
    q = torch.randn(1, 2, plan.rows(place(group)[0]), 8, requires_grad=True)
    try:
        torch.autograd.grad(rd.attention(q, q, q, plan, group).sum(), q, create_graph=True)
    except regard.Unsupported as error:
        return error.argument
    return "accepted"


def strided(group: ProcessGroup) -> bool:
    """Whether spans and a sink with strides of their own, on one rank, change nothing."""
    rank, world = place(group)
    plan = rd.plan(301, world_size=world, heads_q=1, head_size=8)
    q = torch.randn(1, 1, plan.rows(rank), 8, requires_grad=True)
    spans = torch.tensor([0, 150], dtype=torch.int32).expand(plan.rows(rank), 2).contiguous()
    mask, sinks = torch.ones(301, dtype=torch.bool), torch.zeros(1, 6, requires_grad=True)
    outs = []
    for x in (spans, torch.stack([spans, spans], -1)[..., 0] if rank == 1 else spans):
        outs.append(rd.attention(q, q, q, plan, group, row_spans=x, mask=mask, sink=sinks[:, 2]))
    (outs[0] + outs[1]).sum().backward()
    return outs[0].equal(outs[1])


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
    from regard.torch.distributed import local_pass

    case = Case("after", 384, pairs={"causal": True}, lse=False)
    scheme, more = split_scheme(scheme)
    right = forward_only(group, case, scheme, more)
    name = "forward_into" if scheme == "ring" or more else "forward"
    original, text = getattr(local_pass, name), ""

    def failing(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("a local call failed")

    try:
        if where == "call":
            setattr(local_pass, name, failing)
            forward_only(group, replace(case, name="other"), scheme, more)
        forward_only(group, replace(case, name="other"), scheme, more | {"softcap": -1.0})
    except (regard.Error, RuntimeError) as error:
        text = str(error)
    finally:
        setattr(local_pass, name, original)
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
