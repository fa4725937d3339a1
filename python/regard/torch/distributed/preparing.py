"""From what a user gives to a Call: its options, and tensors as local calls take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...arrays import framework_of
from ...call import unknown_option
from ...checks import flag, integer, run_options, shown
from ...element_types import NAMES, type_name
from ...errors import Unsupported, refuse
from ...options import OPTIONS
from . import agreement, costs
from .call import Call, Tensors
from .plan_value import Plan
from .ranks import AnyRanks, Group, ranks_of

_OF_SCORES = ("scale", "softcap", "precision", "deterministic", "dropout_p", "dropout_offset")


def prepared(given: Tensors, plan: Any, group: Group, options: dict[str, Any],
             others: dict[str, Any]) -> tuple[Call, Tensors]:
    """The call and its tensors, once this rank's arguments are checked, and at the first call with a
    plan the other ranks' too. options: all keywords of `attention` that are no tensors; others:
    those that it does not know. Errors: those of `attention`.

    Shapes, types and options that were accepted once are looked up: they are most of a call's time
    on the host otherwise."""
    ranks = ranks_of_plan(plan, group)
    key = None if others else _key(plan, ranks, given, options)
    kept = None if key is None else plan.accepted_calls.get(key)
    if kept is not None and agreement.knows(plan, ranks):
        of_scores = _seeded(kept.options, options, given.q.device)
        return kept.of(plan, ranks, of_scores), made(given)

    def checked() -> tuple[tuple[Call, Tensors], str]:
        agreement.require_plan(plan, ranks)
        _refuse_others(others, options)
        agreement.require_tensors(plan, ranks, given)
        tensors = made(given)
        call = call_of(plan, ranks, options, given)
        agreement.require_spans(plan, tensors.row_spans)
        agreement.require_library(call, tensors)
        return (call, tensors), _facts(call, tensors)

    found = agreement.check(plan, ranks, given.q, checked)
    if key is not None:  # without what has a life of its own
        of_scores = {name: None if name == "dropout_seed" else value
                     for name, value in found[0].options.items()}
        plan.accepted_calls.add(key, found[0].of(None, None, of_scores))  # type: ignore[arg-type]
    return found


def _key(plan: Any, ranks: AnyRanks, given: Tensors, options: dict[str, Any]) -> Any:
    """Everything on which the checks of a call depend; None where that cannot be said. The seed of
    dropout is checked each time."""
    known = {name: value for name, value in options.items() if name != "dropout_seed"}
    try:
        kind = given.q.device.type
        key = (ranks.rank, ranks.size, tuple(ranks.devices()), torch.is_grad_enabled(),
               torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
               torch.are_deterministic_algorithms_enabled(),
               *((x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x
                 for x in given),
               *((type(value), value) for value in known.values()))
        hash(key)
    except (AttributeError, TypeError, RuntimeError):  # the last: autocast knows no such device
        return None
    return key if isinstance(plan, Plan) else None


def _seeded(kept: dict[str, Any], given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    if "dropout_seed" not in kept:
        return kept
    return kept | {"dropout_seed": _required_seed(given["dropout_seed"], device)}


def ranks_of_plan(plan: Any, group: Group) -> AnyRanks:
    if not isinstance(plan, Plan):
        return ranks_of(group, None)
    return ranks_of(group, plan.world_size, plan.ranks_per_node)


def call_of(plan: Plan, ranks: AnyRanks, options: dict[str, Any], given: Tensors) -> Call:
    """Errors: InvalidArgument, WrongType, Unsupported for an option."""
    of_scores = _checked_options({name: options[name] for name in _OF_SCORES},
                                 options["dropout_seed"], given.q.device)
    by_position = plan.scheme != "ulysses" and (
        given.alibi_slopes is not None or of_scores["dropout_p"] > 0)
    return Call(plan, ranks, of_scores, by_position,
                run_options(options["threads"], options["backend"]),
                torch_type(options["out_type"]), flag("return_lse", options["return_lse"]),
                flag("sum_sink_gradient", options["sum_sink_gradient"]),
                _overlaps(options["overlap"], plan, by_position, given))


def _checked_options(given: dict[str, Any], dropout_seed: Any, device: torch.device
                     ) -> dict[str, Any]:
    """Of the local calls, as `regard.attention` takes them."""
    for name, value in given.items():
        OPTIONS[name].check(name, value)
    options = {**given, "dropout_p": float(given["dropout_p"])}
    if options["dropout_p"] > 0:
        options["dropout_seed"] = _required_seed(dropout_seed, device)
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    return options


def _required_seed(given: Any, device: torch.device) -> int | Tensor:
    """A number; or a tensor on q's GPU, where kernels read it."""
    if given is None:
        raise refuse("dropout_seed", None, "must be given, and be equal on all ranks")
    if not isinstance(given, Tensor):
        return integer("dropout_seed", given, 0, 2**64 - 1)
    found = framework_of(given, "dropout_seed").seed(given, "dropout_seed")
    if isinstance(found, int):
        return found % 2**64
    if given.device != device:
        raise refuse("dropout_seed", f"a tensor on {given.device}", f"must be on {device}, as q, or "
                     "on the CPU")
    return given


def _overlaps(overlap: Any, whole: Plan, by_position: bool, given: Tensors) -> str:
    """`Call.overlaps`. Errors: InvalidArgument; Unsupported where it is asked for and cannot be."""
    plan = whole.nodes or whole
    if overlap not in (None, False, "heads", "keys", "documents"):
        raise refuse("overlap", shown(overlap),
                     'must be None, False, "heads", "keys" or "documents"')
    has_scores = any(x is not None for x in (given.bias, given.mask, given.row_spans))
    if overlap is None:
        return costs.overlap_on_gpus(whole, by_position, has_scores) if given.q.is_cuda else ""
    reason = ""
    if overlap and plan.scheme not in ("gather", "halo"):
        reason = f'"{plan.scheme}" has no such choice'
    elif plan.world_size == 1:
        return ""
    elif overlap == "keys" and by_position:
        reason = "not with alibi_slopes or dropout, which need keys that follow each other"
    elif overlap == "heads" and not costs.has_heads(whole):
        reason = "a rank has one head of keys"
    elif overlap == "documents" and (by_position or has_scores or not whole.has_whole_documents):
        reason = ("not with alibi_slopes, dropout, bias, mask or row_spans, nor where documents that "
                  "are whole on a rank have less than a quarter of the visible pairs")
    if reason:
        raise refuse("overlap", overlap, reason, Unsupported)
    return overlap or ""


def torch_type(out_type: Any) -> torch.dtype | None:
    if out_type is None:
        return None
    found: torch.dtype = getattr(torch, NAMES[type_name("out_type", out_type)])
    return found


def _refuse_others(others: dict[str, Any], options: dict[str, Any]) -> None:
    """options: the keywords of `attention` that are no tensors."""
    for name, value in others.items():
        if name in OPTIONS:
            raise refuse(name, shown(value), "is not taken here: the plan says which pairs are "
                         "visible, and tensors are (B, H, S, D)", Unsupported)
        raise unknown_option(name, value, (*Tensors._fields, "plan", "group", *options))


def made(given: Tensors) -> Tensors:
    """The tensors in the types and with the strides that local calls take."""
    if given.alibi_slopes is not None and given.alibi_slopes.requires_grad:
        raise refuse("alibi_slopes", "a tensor that requires grad", "has no gradient; detach it",
                     Unsupported)
    rows = [given.q, given.k, given.v]
    kind = given.q.device.type
    if torch.is_autocast_enabled(kind) and given.q.dtype != torch.float64:
        rows = [x.to(torch.get_autocast_dtype(kind)) for x in rows]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in rows)
    numbers = {name: None if x is None else x.float() for name, x in
               (("sink", given.sink), ("alibi_slopes", given.alibi_slopes))}
    spans = given.row_spans
    if spans is not None and spans.dim() > 0 and spans.stride(-1) != 1:
        spans = spans.contiguous()
    return given._replace(q=q, k=k, v=v, row_spans=spans, **numbers)


def _facts(call: Call, tensors: Tensors) -> str:
    """What has to be equal on all ranks."""
    graded = torch.is_grad_enabled()

    def sizes(x: Tensor) -> list[int | str]:
        found: list[int | str] = list(x.shape)
        if x.dim() > 1:  # the numbers of rows differ
            found[-2] = "1 for all rows" if call.plan.is_for_all_rows(x) else "rows"
        return found

    shown_tensors = [f"{name} {x.dtype} {sizes(x)}" +
                     (" with a gradient" if graded and x.requires_grad else "")
                     for name, x in tensors._asdict().items() if x is not None]
    options = {name: "in memory" if isinstance(x, Tensor) else x for name, x in call.options.items()}
    return (f"batch {tensors.q.shape[0]}, {', '.join(shown_tensors)}, {options}, "
            f"out_type {call.out_type}, return_lse {call.return_lse}, "
            f"sum_sink_gradient {call.sums_sink}, overlap {call.overlaps}")
