"""Calls inside of compiled programs: two operators, whose plan, group and options are texts.

The operators check their arguments and communicate when they run, as other calls do; the compiler
knows the shapes of their results. A plan is found by its name, so that it has to live as long as
the program runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from ...element_types import type_name
from ..limits import is_distributed
from . import passes, ulysses
from .call import Call, Kept, Tensors, Wanted
from .local_pass import empty_merged, empty_results
from .plan_names import plan_of
from .plan_value import Plan
from .preparing import call_of, prepared, torch_type
from .ranks import Ranks

_TENSORS = len(Tensors._fields)
_KNOWN: dict[str, Any] = {
    "precision": str, "deterministic": bool, "return_lse": bool, "out_type": object,
    "sum_sink_gradient": bool, "overlap": (str, bool, type(None)), "threads": int, "backend": str}
# Options that change from call to call are arguments of their own, so that a program is compiled
# once for all of them; and their defaults, for where only shapes count.
_NUMBERS = {"scale": "float?", "softcap": "float", "dropout_p": "float", "dropout_seed": "SymInt?",
            "dropout_offset": "SymInt"}
_UNKNOWN = (None, 0.0, 0.0, None, 0)
_WORDS = ("dropout_seed", "dropout_offset")


def takes(tensors: Tensors, plan: Plan, group: Any, options: dict[str, Any]) -> bool:
    """Whether an operator can have these as arguments. What it cannot have, such as a seed in a
    tensor or an option of the wrong type, ends the compiled part: the call as of other programs
    takes it, or names it in an error."""
    if plan.nodes is not None or not (group is None or isinstance(group, ProcessGroup)):
        return False
    for x in tensors:
        if x is not None and (not isinstance(x, Tensor) or is_distributed(x)):
            return False
    for name, value in options.items():
        if name in _NUMBERS:
            if value is not None and not isinstance(value, (int, float)):
                return False
            if name in _WORDS and value is not None and not 0 <= value < 2**63:  # of an int64
                return False
        elif not isinstance(value, _KNOWN[name]):
            return False
    return True


def attention(tensors: Tensors, plan: Plan, group: Any, options: dict[str, Any]
              ) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable. options: every keyword of `attention` that is no input."""
    text = _text(**{name: x for name, x in options.items() if name not in _NUMBERS})
    numbers = [options[name] for name in _NUMBERS]
    found: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        plan.name, "" if group is None else group.group_name, text, _out_type(text),
        options["return_lse"], *numbers, *tensors)
    return found


def _text_of(**options: Any) -> str:
    if options["out_type"] is not None:
        options["out_type"] = type_name("out_type", options["out_type"])
    return json.dumps(options)


def _type_in(text: str) -> torch.dtype | None:
    return torch_type(json.loads(text)["out_type"])


# The compiler takes them for constants.
_constant: Any = torch.compiler.assume_constant_result
_text: Callable[..., str] = _constant(_text_of)
_out_type: Callable[[str], torch.dtype | None] = _constant(_type_in)


# ---------------------------------------------------------------------------------------- operators

_library: Any = torch.library.Library("regard", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = ("Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink, Tensor? mask, "
              "Tensor? row_spans, Tensor? alibi_slopes, str plan, str group, str options, " +
              ", ".join(f"{type_} {name}" for name, type_ in _NUMBERS.items()))
_library.define(f"distributed_forward({_ARGUMENTS}, bool[5] graded) -> Tensor[]",
                tags=(torch.Tag.pt2_compliant_tag,))
_library.define("distributed_backward(Tensor? dout, Tensor? dlse, Tensor[] results, "
                f"{_ARGUMENTS}, bool[5] wanted) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


def _group(name: str) -> ProcessGroup | None:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name) if name else None


def _forward(*arguments: Any) -> list[Tensor]:
    """out and lse; with "ulysses" also what backward needs."""
    given, (plan, group, options, *numbers, graded) = _separated(arguments)
    with torch.enable_grad():  # what has a gradient is compared between ranks
        leaves = [x.detach().requires_grad_() if is_graded else x
                  for x, is_graded in zip(given[:passes.GRADED], graded)]
        call, tensors = prepared(Tensors(*leaves, *given[passes.GRADED:]), plan_of(plan),
                                 _group(group), *_split(options, numbers))
    with torch.no_grad(), torch.autocast(tensors.q.device.type, enabled=False):
        data: list[Any] = [None if x is None else x.detach() for x in tensors]
        out, lse, kept = passes.forward(call, Tensors(*data))
    if call.plan.scheme != "ulysses":
        return [kept[0], kept[1]]  # type: ignore[list-item]
    held = {x.untyped_storage().data_ptr() for x in given if x is not None and x.numel()}
    return [out, lse, *(x.clone() if x.numel() and x.untyped_storage().data_ptr() in held else x
                        for x in kept[1:] if x is not None)]  # with one rank, nothing has moved


def _separated(arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The fields of Tensors, and what follows them."""
    return arguments[:_TENSORS], arguments[_TENSORS:]


def _split(options: str, numbers: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords that `attention` knows, and others."""
    found = json.loads(options)
    known = {name: found.pop(name) for name in _KNOWN} | dict(zip(_NUMBERS, numbers))
    return known, found


def _backward(dout: Tensor | None, dlse: Tensor | None, results: list[Tensor], *arguments: Any
              ) -> list[Tensor]:
    """Those gradients that are wanted."""
    given, (plan, group, options, *numbers, wanted) = _separated(arguments)
    known = plan_of(plan)
    tensors = Tensors(*given)
    ranks = Ranks(_group(group), known.world_size)
    call = call_of(known, ranks, _split(options, numbers)[0], tensors)
    call = replace(call, cache=_cache_of(call, given))
    kept: Kept = (*results, *tensors)
    if known.scheme == "ulysses":
        found = iter(results[2:])
        kept = (tensors.bias, *(None if x is None else next(found) for x in tensors), *found)
    with torch.no_grad(), torch.autocast(tensors.q.device.type, enabled=False):
        gradients = passes.backward(call, kept, dout, dlse, Wanted(*wanted), given[:passes.GRADED])
    return [_laid_out_as(like, x) for like, x in zip(given, gradients) if x is not None]


def _cache_of(call: Call, given: Sequence[Any]) -> dict[Any, Any]:
    """What calls share that differ in their numbers alone."""
    plan, options = call.plan, {**call.options, "dropout_seed": None}
    key = ("compiled", call.ranks.rank, call.ranks.size, call.by_position, call.overlaps,
           call.out_type, call.return_lse, *options.items(), *call.where.items(),
           *(None if x is None else (x.shape, x.dtype, x.device) for x in given))
    found: dict[Any, Any] | None = plan.accepted_calls.get(key)
    if found is None:
        found = {}
        plan.accepted_calls.add(key, found)
    return found


def _laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """x with the strides that `_fake_backward` promises, in memory of its own."""
    found = torch.empty_like(like)
    return x if x.stride() == found.stride() and not x._is_view() else found.copy_(x)


def _fake_forward(*arguments: Any) -> list[Tensor]:
    given, (plan, group, options, *_) = _separated(arguments)
    known, tensors = plan_of(plan), Tensors(*given)
    call = call_of(known, Ranks(_group(group), known.world_size),
                   _split(options, _UNKNOWN)[0], tensors)
    if known.scheme == "ulysses":
        out, lse, kept = ulysses.without_data(call, tensors)
        return [out, lse, *(x for x in kept[1:] if x is not None)]
    if known.scheme == "ring" or call.overlaps == "keys":
        out, lse = empty_merged(tensors)
        return [out.to(call.out_type or tensors.q.dtype), lse]
    return [*empty_results(call, tensors)]


def _fake_backward(dout: Tensor | None, dlse: Tensor | None, results: list[Tensor], *arguments: Any
                   ) -> list[Tensor]:
    given, (*_, wanted) = _separated(arguments)
    return [torch.empty_like(x) for x, is_wanted in zip(given, wanted)
            if is_wanted and x is not None]


for _device in ("CPU", "CUDA"):
    _library.impl("distributed_forward", _forward, _device)
    _library.impl("distributed_backward", _backward, _device)
torch.library.register_fake("regard::distributed_forward", _fake_forward, lib=_library)
torch.library.register_fake("regard::distributed_backward", _fake_backward, lib=_library)


class _Attention(torch.autograd.Function):
    """The names of plan and group, options, the type of out, whether the lse is returned, numbers;
    then the fields of Tensors."""

    @staticmethod
    def forward(ctx: Any, plan: str, group: str, options: str, out_type: torch.dtype | None,
                return_lse: bool, *rest: Any) -> tuple[Tensor, Tensor]:
        numbers, tensors = rest[:len(_NUMBERS)], rest[len(_NUMBERS):]
        graded = [x is not None and x.requires_grad for x in tensors[:passes.GRADED]]
        results = torch.ops.regard.distributed_forward(*tensors, plan, group, options, *numbers,
                                                        graded)
        ctx.save_for_backward(*results, *tensors)
        ctx.others = plan, group, options, *numbers
        if not return_lse:
            ctx.mark_non_differentiable(results[1])
        return results[0].to(out_type or tensors[0].dtype), results[1]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        results, tensors = ctx.saved_tensors[:-_TENSORS], ctx.saved_tensors[-_TENSORS:]
        before = 5 + len(_NUMBERS)
        wanted = [*ctx.needs_input_grad[before:before + passes.GRADED]]
        found = iter(torch.ops.regard.distributed_backward(
            dout, dlse, [*results], *tensors, *ctx.others, wanted))
        return (*(None for _ in range(before)),
                *(next(found) if is_wanted else None for is_wanted in wanted), None, None, None)
