"""Whether the arguments of a call are right, on this rank and on the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...attention import explain
from ...checks import shown
from ...element_types import result_type
from ...errors import InvalidArgument, Unsupported, WrongType, refuse
from ...mask_value import MOST_SPANS
from ...typing import Pass
from ..kernels import TYPES
from ..surface import require_tensor
from .call import Call, Tensors
from .plan_value import Plan
from .ranks import AnyRanks

_DIGEST = 32
_TEXT = 480  # bytes of an error's text that other ranks hear
_MOST_PLANS = 4096  # that are remembered for a group

T = TypeVar("T")

_agreed: WeakKeyDictionary[Any, set[bytes]] = WeakKeyDictionary()


def check(plan: Plan, ranks: AnyRanks, q: Any, make: Callable[[], tuple[T, str]]) -> T:
    """What `make` returns of this rank's arguments, once all ranks have checked theirs.

    The first call with a plan in a group tells the ranks of each other's errors, and compares the
    plans and the facts of the call, which have to be equal on all ranks; every rank then raises.
    Later calls with such a plan are checked by each rank alone, so that nothing waits. Whether a
    plan is known is this rank's own knowledge: a rank with a new plan among ranks that have used
    theirs waits for them here, while they wait for its rows, until the group's timeout.

    q: where it is a tensor on a GPU, ranks tell each other there. make: returns a result and facts.
    Errors: its own; InvalidArgument for those of other ranks.
    """
    known = _known_plans(ranks)
    if known is None or (isinstance(plan, Plan) and plan.digest in known):
        return make()[0]
    try:
        result, facts = make()
    except Exception as error:
        _told(ranks, q, b"", str(error).encode()[:_TEXT])
        raise
    _compare(ranks, plan, q, facts)
    known.add(plan.digest)
    return result


def knows(plan: Plan, ranks: AnyRanks) -> bool:
    """Whether the ranks of this group have agreed on the plan."""
    known = _known_plans(ranks)
    return known is None or plan.digest in known


def _known_plans(ranks: AnyRanks) -> set[bytes] | None:
    """Of this group; None without other ranks."""
    if ranks.size == 1:
        return None
    known = _agreed.setdefault(ranks.process_group, set())
    if len(known) >= _MOST_PLANS:
        known.clear()
    return known


def _compare(ranks: AnyRanks, plan: Plan, q: Any, facts: str) -> None:
    """Errors: InvalidArgument where another rank has an error, or other facts."""
    digest = hashlib.sha256(plan.digest + facts.encode()).digest()
    came = _told(ranks, q, digest, b"")
    for rank, (_, text) in enumerate(came):
        if text:
            raise refuse("group", f"a group of {ranks.size} ranks", f"rank {rank} refused: {text}")
    for rank, (other, _) in enumerate(came):
        if other != digest:
            raise refuse("plan", repr(plan), f"rank {rank} has another plan, or other sizes, types "
                         f"or options: {facts} on this one")


def _told(ranks: AnyRanks, q: Any, digest: bytes, text: bytes) -> list[tuple[bytes, str]]:
    """The digest and the error's text of each rank."""
    device: Any = "cpu"
    if "cpu" not in ranks.devices():
        on_gpu = isinstance(q, Tensor) and q.is_cuda
        device = q.device if on_gpu else f"cuda:{torch.cuda.current_device()}"
    came = ranks.told(digest.ljust(_DIGEST, b"\0") + text.ljust(_TEXT, b"\0"), device)
    return [(row[:_DIGEST], row[_DIGEST:].rstrip(b"\0").decode(errors="replace")) for row in came]


def require_plan(plan: Any, ranks: AnyRanks) -> None:
    """Errors: WrongType for what is no plan; InvalidArgument for a plan for other ranks."""
    if not isinstance(plan, Plan):
        raise refuse("plan", shown(plan), "must be a Plan of regard.torch.distributed.plan",
                     WrongType)
    ranks.require_size(plan.world_size)


def require_tensors(plan: Plan, ranks: AnyRanks, tensors: Tensors) -> None:
    """Errors: InvalidArgument, WrongType, Unsupported for tensors that are not this rank's part of the plan."""
    for name, x in tensors._asdict().items():
        if x is None and name not in ("q", "k", "v"):
            continue
        require_tensor(name, x)
        if x.device != tensors.q.device:
            raise refuse(name, f"a tensor on {x.device}", f"must be on {tensors.q.device}, as q")
    if plan.visible.spans is not None and plan.visible.spans.shape[0] not in (1, *tensors.q.shape[:1]):
        raise refuse("q", f"a tensor of shape {tuple(tensors.q.shape)}",
                     f"the plan's mask is for a batch of {plan.visible.spans.shape[0]}")
    kinds = ranks.devices()
    if tensors.q.device.type not in kinds:
        raise refuse("q", f"a tensor on {tensors.q.device}", "the group moves tensors on "
                     f"{' or '.join(kinds)}")
    _require_rows(plan, ranks.rank, tensors)
    _require_scores(plan, ranks.rank, tensors)


def require_library(call: Call, tensors: Tensors) -> None:
    """Errors: those that the library has for the options and types of the local calls, of forward
    and, where a gradient is wanted, of backward. Every rank finds them, also one whose own calls
    have no rows or heads, before anything is sent."""
    sizes, q = call.plan.sizes, tensors.q
    rows = (1, sizes.heads_q, 1, sizes.length)
    shapes = {"q": (1, sizes.heads_q, 1, sizes.head_size),
              "k": (1, sizes.heads_kv, sizes.length, sizes.head_size),
              "v": (1, sizes.heads_kv, sizes.length, sizes.head_size_v),
              "bias": rows, "mask": rows, "sink": (sizes.heads_q,),
              "alibi_slopes": (sizes.heads_q,)}
    arrays: dict[str, Any] = {
        name: torch.empty(shapes[name], dtype=x.dtype, device="meta")
        for name, x in tensors._asdict().items() if x is not None and name in shapes}
    if call.out_type is not None:
        result_type("out_type", call.out_type, "q", TYPES.get(q.dtype, str(q.dtype)))
    options = call.options
    if isinstance(options.get("dropout_seed"), Tensor):  # in a GPU's memory, where these have none
        options = options | {"dropout_seed": 0}
    graded = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors)
    passes: list[Pass] = ["forward", "backward"] if graded else ["forward"]
    for pass_ in passes:
        found = explain(**arrays, **options, **call.where, pass_=pass_, device=str(q.device))
        if not found.supported:
            raise refuse("backend", call.where["backend"], f"takes no such {pass_} call:\n{found}",
                         Unsupported)


def require_spans(plan: Plan, row_spans: Tensor | None) -> None:
    """Errors: InvalidArgument where the plan's spans and the caller's have more than 8 products."""
    if row_spans is None or plan.visible.spans is None:
        return
    planned, given = plan.visible.spans.shape[-1] // 2, row_spans.shape[-1] // 2
    if planned * given > MOST_SPANS:
        raise refuse("row_spans", f"a tensor of shape {tuple(row_spans.shape)}",
                     f"has {given} spans a row and the plan {planned}; their product must be at "
                     f"most {MOST_SPANS}")


def _require_rows(plan: Plan, rank: int, tensors: Tensors) -> None:
    sizes, rows = plan.sizes, plan.rows(rank)
    batch = tensors.q.shape[0] if tensors.q.dim() else 0
    wanted = {"q": (batch, sizes.heads_q, rows, sizes.head_size),
              "k": (batch, sizes.heads_kv, rows, sizes.head_size),
              "v": (batch, sizes.heads_kv, rows, sizes.head_size_v)}
    for name, shape in wanted.items():
        x = getattr(tensors, name)
        if tuple(x.shape) != shape:
            raise refuse(name, f"a tensor of shape {tuple(x.shape)}",
                         f"must be {shape}: rank {rank} has {rows} rows of the plan")
        if x.dtype != tensors.q.dtype:
            raise refuse(name, f"a tensor of {x.dtype}", f"must be {tensors.q.dtype}, as q",
                         WrongType)
    if not tensors.q.is_floating_point() or tensors.q.dtype not in TYPES:
        raise refuse("q", f"a tensor of {tensors.q.dtype}",
                     "must be float64, float32, float16 or bfloat16", WrongType)


def _require_scores(plan: Plan, rank: int, tensors: Tensors) -> None:
    """What belongs to scores: of this rank's rows, over all keys."""
    sizes, rows = plan.sizes, plan.rows(rank)
    scores = (tensors.q.shape[0], sizes.heads_q, rows, sizes.length)
    for name in ("bias", "mask", "row_spans"):
        x = getattr(tensors, name)
        if x is None:
            continue
        whole = scores
        if name == "row_spans":
            if x.dim() < 2 or x.shape[-1] not in range(2, 2 * MOST_SPANS + 1, 2):
                raise refuse(name, f"a tensor of shape {tuple(x.shape)}", "its last size must be "
                             f"2 n, with n from 1 to {MOST_SPANS}")
            whole = (*scores[:3], x.shape[-1])
        if x.dim() > 4 or any(size not in (1, most) for size, most in zip(
                reversed(x.shape), reversed(whole))):
            wanted = (f"(B, Hq, {rows}, 2 n) = {whole}: this rank's rows" if name == "row_spans"
                      else f"{scores}: this rank's rows, all keys")
            raise refuse(name, f"a tensor of shape {tuple(x.shape)}", f"must broadcast to {wanted}")
    types = {"mask": torch.bool, "row_spans": torch.int32}
    for name, type_ in types.items():
        x = getattr(tensors, name)
        if x is not None and x.dtype != type_:
            raise refuse(name, f"a tensor of {x.dtype}", f"must be {type_}", WrongType)
    for name in ("bias", "sink", "alibi_slopes"):
        x = getattr(tensors, name)
        if x is not None and not x.is_floating_point():
            raise refuse(name, f"a tensor of {x.dtype}", "must be of a float type", WrongType)
    sink, slopes = tensors.sink, tensors.alibi_slopes
    if sink is not None and tuple(sink.shape) != (sizes.heads_q,):
        raise refuse("sink", f"a tensor of shape {tuple(sink.shape)}",
                     f"must be ({sizes.heads_q},)")
    if slopes is not None and tuple(slopes.shape) not in (
            (sizes.heads_q,), (tensors.q.shape[0], sizes.heads_q)):
        raise refuse("alibi_slopes", f"a tensor of shape {tuple(slopes.shape)}",
                     f"must be ({sizes.heads_q},) or (B, {sizes.heads_q})", InvalidArgument)
