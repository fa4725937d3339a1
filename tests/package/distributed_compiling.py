"""What workers do to test calls of regard.torch.distributed inside of compiled programs."""

from __future__ import annotations

from typing import Any

import torch
from distributed_cases import GRADED, Case
from distributed_tasks import inputs_of
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

import regard
from regard.torch import distributed as rd


def compiled(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]) -> float:
    """A compiled program without a break around a call; the largest difference of its results and
    gradients from those of the same program as it is."""
    plan, tensors = inputs_of(case, scheme, group)
    dout, dlse = tensors.pop("dout"), tensors.pop("dlse")

    def model(q: Tensor, **others: Tensor) -> list[Tensor]:
        results: Any = rd.attention(2 * q, plan=plan, group=group, return_lse=case.lse,
                                    **others, **case.options, **more)
        return [3 * x for x in (results if case.lse else [results])]

    found = []
    torch._dynamo.reset()
    for function in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        leaves = {name: x.clone().requires_grad_() if name in GRADED else x
                  for name, x in tensors.items()}
        results = function(**leaves)
        torch.autograd.backward(results, [dout, dlse] if case.lse else [dout])
        found.append([*(x.detach() for x in results),
                      *(leaves[name].grad for name in GRADED if name in leaves)])
    assert all(one.dtype == other.dtype for one, other in zip(*found))
    return max(float((one - other).abs().max()) for one, other in zip(*found))


def broken_promises(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]
                    ) -> list[tuple[Any, ...]]:
    """Results of the operators whose type, shape or strides are not what the compiler was told; of
    tensors as they are, and as views of (B, S, H, D)."""
    from regard.torch.distributed import compiled as operators

    def layout(x: Tensor) -> tuple[Any, ...]:
        return x.dtype, tuple(x.shape), x.stride()

    options = operators._text(out_type=None, precision="full", deterministic=False,
                              return_lse=case.lse, sum_sink_gradient=True,
                              overlap=more.get("overlap"), threads=1, backend="")
    broken = []
    for rows_first in (False, True):
        plan, tensors = inputs_of(case, scheme, group)
        if rows_first:
            tensors |= {name: tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
                        for name in "qkv"}
        given = [tensors.get(name) for name in ("q", "k", "v", "bias", "sink", "mask", "row_spans",
                                                "alibi_slopes")]
        rest = (*given, plan.name, group.group_name, options, *operators._UNKNOWN,
                [x is not None for x in given[:5]])
        found = operators._forward(*rest)
        gradients = tensors["dout"], tensors["dlse"] if case.lse else None, found, *rest
        for one, other in ((found, operators._fake_forward(*rest)),
                           (operators._backward(*gradients), operators._fake_backward(*gradients))):
            broken += [(rows_first, layout(x), layout(y)) for x, y in zip(one, other, strict=True)
                       if layout(x) != layout(y)]
    return broken


def checked_operators(group: ProcessGroup, case: Case, scheme: str) -> dict[str, str]:
    """PyTorch's own checks of an operator, of forward's: its schema, shapes and strides."""
    from regard.torch.distributed.compiled import _UNKNOWN, _text

    plan, tensors = inputs_of(case, scheme, group)
    text = _text(out_type=None, overlap=None, precision="full", deterministic=False, return_lse=True,
                 sum_sink_gradient=True, threads=1, backend="")
    given = [tensors.get(name) for name in ("q", "k", "v", "bias", "sink", "mask", "row_spans",
                                            "alibi_slopes")]
    found: dict[str, str] = torch.library.opcheck(
        torch.ops.regard.distributed_forward.default,
        (*given, plan.name, group.group_name, text, *_UNKNOWN, [False] * 5),
        test_utils=("test_schema", "test_faketensor"))
    return found


def compiled_first(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]) -> float:
    """How much results of compiled programs, the first of which has the plan before any other call,
    differ from those of plain ones: programs that differ in what they are given."""
    plan, tensors = inputs_of(case, scheme, group)
    leaves = [tensors[name].requires_grad_() for name in "qkv"]
    numbers = torch.linspace(0.1, 2, case.heads[0])
    takes_slopes = more.get("overlap") != "documents"
    others: list[dict[str, Tensor]] = [{}, {"sink": numbers}, *(
        [{"alibi_slopes": numbers}] if takes_slopes else []), {}]

    def results(program: Any, given: dict[str, Tensor]) -> list[Tensor]:
        out = program(*leaves, given)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors["dout"])]

    def program(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Tensor]) -> Tensor:
        return rd.attention(q, k, v, plan, group, **given, **more)

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    found = [results(compiled, given) for given in others]
    return max(float((one - other).norm() / other.norm()) for result, given in zip(found, others)
               for one, other in zip(result, results(program, given)))


def compiled_for_many_numbers(group: ProcessGroup, case: Case, scheme: str, dynamic: bool) -> float:
    """The same of one compiled program that is called with numbers which it has not seen before."""
    plan, tensors = inputs_of(case, scheme, group)
    leaves = [tensors[name].requires_grad_() for name in "qkv"]

    def program(q: Tensor, k: Tensor, v: Tensor, seed: int, scale: float) -> Tensor:
        found: Tensor = rd.attention(q, k, v, plan, group, scale=scale, softcap=3 * scale,
                                     dropout_p=0.2, dropout_seed=seed, dropout_offset=seed + 1)
        return found

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=dynamic or None)
    differences = []
    for numbers in ((11, 0.3), (12, 0.4), (13, 0.5), (2**40, 0.5)):
        found, wanted = (
            [out.detach(), *torch.autograd.grad(out, leaves, tensors["dout"])]
            for out in (one(*leaves, *numbers) for one in (compiled, program)))
        differences += [float((x - y).norm() / y.norm()) for x, y in zip(found, wanted)]
    return max(differences)


def texts_of_broken(group: ProcessGroup, case: Case, scheme: str) -> list[tuple[str, str]]:
    """What calls without a program and inside of one come to, whose arguments no operator can have:
    a sum of out and of the gradient of q, or an error."""
    from torch.distributed.device_mesh import init_device_mesh

    plan, tensors = inputs_of(case, scheme, group)
    mesh = init_device_mesh("cpu", (group.size(),))
    dropout = {"dropout_p": 0.5, "dropout_seed": 2**64 - 1}
    given: list[dict[str, Any]] = [
        dropout, {**dropout, "dropout_offset": 2**63}, {**dropout, "dropout_seed": torch.tensor(7)},
        {"scale": torch.tensor(0.3)}, {**dropout, "dropout_seed": -1}, {"threads": "a"},
        {"cu_seqlens": torch.tensor([0, 5])}, {"group": mesh}, {"sink": DTensor.from_local(
            torch.zeros(case.heads[0]), mesh)}]

    def outcome(call: Any, more: dict[str, Any]) -> str:
        torch._dynamo.reset()
        q = tensors["q"].clone().requires_grad_()
        try:
            out = call(q, tensors["k"], tensors["v"], plan, **{"group": group, **more})
            return str((out.sum().item(), *torch.autograd.grad(out.sum(), q)[0].flatten()[:9].tolist()))
        except regard.Error as error:
            return str(error)

    program = torch.compile(rd.attention, backend="aot_eager")
    return [(outcome(rd.attention, more), outcome(program, more)) for more in given]
