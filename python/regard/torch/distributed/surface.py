"""`regard.torch.distributed.attention`: each rank's rows in, each rank's rows out."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ...checks import flag, integer, run_options, shown
from ...element_types import NAMES, type_name
from ...errors import Unsupported, WrongType, refuse
from ...options import OPTIONS, Precision
from . import agreement, gather, ring, ulysses
from . import overlap as overlapping
from .call import Call, Tensors, Wanted
from .plan_value import Plan
from .ranks import Ranks

if TYPE_CHECKING:
    from ...typing import Unpack

Result = Tensor | tuple[Tensor, Tensor]
_SCHEMES: dict[str, ModuleType] = {"gather": gather, "halo": gather, "ring": ring,
                                   "ulysses": ulysses}
_GRADIENTS = 5  # of the first tensors

# torch.compiler.disable, which imports the compiler at once; this one does at the first call.
_outside_of_compiled_programs = _disable_dynamo


class Options(TypedDict, total=False):
    """The keywords of `attention`, for type checkers."""

    bias: Tensor | None
    mask: Tensor | None
    row_spans: Tensor | None
    sink: Tensor | None
    alibi_slopes: Tensor | None
    scale: float | None
    softcap: float
    dropout_p: float
    dropout_seed: int | None
    dropout_offset: int
    precision: Precision
    deterministic: bool
    out_type: Any
    sum_sink_gradient: bool
    overlap: bool | None
    threads: int
    backend: str


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: ProcessGroup | None = None, *,
              return_lse: Literal[False] = False, **options: Unpack[Options]) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: ProcessGroup | None = None, *,
              return_lse: Literal[True], **options: Unpack[Options]) -> tuple[Tensor, Tensor]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: ProcessGroup | None = None, *,
              return_lse: bool, **options: Unpack[Options]) -> Result: ...


@_outside_of_compiled_programs
def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: ProcessGroup | None = None, *,
              bias: Tensor | None = None, mask: Tensor | None = None,
              row_spans: Tensor | None = None, sink: Tensor | None = None,
              alibi_slopes: Tensor | None = None, scale: float | None = None,
              softcap: float = 0.0, dropout_p: float = 0.0, dropout_seed: int | None = None,
              dropout_offset: int = 0, precision: str = "full", deterministic: bool = False,
              return_lse: bool = False, out_type: Any = None, sum_sink_gradient: bool = True,
              overlap: bool | None = None, threads: int = 0, backend: str = "", **others: Any
              ) -> Result:
    """Attention over a sequence whose rows are spread over the ranks of a group.

    The results are those of `regard.torch.attention` over the whole sequence with the mask of the
    plan, apart from rounding: what `plan.shard` would take from them for this rank. Differentiable
    in q, k, v, bias and sink, through out and lse; not twice. A collective: every rank calls it,
    and its backward pass, in the same order and with the same options, also a rank without rows.

    Args:
        q: (B, Hq, rows, D) with rows = plan.rows(rank); float64, float32, float16 or bfloat16.
        k: (B, Hkv, rows, D), v: (B, Hkv, rows, Dv): the same rows.
        plan: of `plan`, equal on all ranks.
        group: of plan.world_size ranks; None is the default group. A plan for one rank needs none.
        bias: broadcasts to (B, Hq, rows, S): this rank's rows, over all keys of the sequence. Its
            gradient is of this rank's rows as well.
        mask: bool, likewise; True = visible.
        row_spans: int32, broadcasts to (B, Hq, rows, 2 n): the keys that this rank's rows see, as
            places in the whole sequence. Pairs that plan and row_spans both show are visible. n of
            the plan's spans times n of these is at most 8.
        sink: (Hq), equal on all ranks.
        alibi_slopes: (Hq) or (B, Hq), equal on all ranks; distances are those in the sequence.
        scale, softcap, precision, deterministic: as in `regard.attention`.
        dropout_p, dropout_seed, dropout_offset: likewise; the weights that drop are those of one
            call over the whole sequence. The seed must be given, a number, equal on all ranks.
        return_lse: True: also return the lse, (B, Hq, rows).
        out_type: "float32" gives a float32 out for float16 and bfloat16 inputs.
        sum_sink_gradient: True: every rank gets the whole gradient of the sink, which must not be
            summed again. False: every rank gets that of its rows (with "ulysses", its heads), for
            programs that sum the gradients of all parameters over the group.
            DistributedDataParallel averages them: the loss of a rank must then be the sum over its
            rows times world_size, over the rows of all ranks.
        overlap: of "gather" and "halo": True: attend to own keys while those of others arrive, in
            two calls forward and three backward, whose results are merged in float32 or wider.
            False: one call over all keys, whose out, lse and dq on the CPU have the bits of one
            process. None: True on a GPU, except with alibi_slopes or dropout. "ring" always
            overlaps, "ulysses" never.
        threads, backend: as in `regard.torch.attention`.

    Returns:
        out, (B, Hq, rows, Dv); or (out, lse).

    Raises:
        InvalidArgument, WrongType, Unsupported; each names the argument and its value. At the first
        call with a plan in a group, every rank raises if one rank does, or if plans or options
        differ. Later, each rank checks its own arguments before it communicates. A rank that gives
        a new plan while others give one that they have used before is not noticed: it waits for
        their word and they for its rows, until the group's timeout.
    """
    ranks = Ranks(group, plan.world_size if isinstance(plan, Plan) else None)
    given = Tensors(q, k, v, bias, sink, mask, row_spans, alibi_slopes)
    options = {"scale": scale, "softcap": softcap, "precision": precision,
               "deterministic": deterministic, "dropout_p": dropout_p,
               "dropout_offset": dropout_offset}

    def checked() -> tuple[tuple[Call, Tensors], str]:
        agreement.require_plan(plan, ranks)
        _refuse_others(others)
        agreement.require_tensors(plan, ranks, given)
        tensors = _made(given)
        made = _checked_options(options, dropout_seed)
        by_position = plan.scheme != "ulysses" and (
            alibi_slopes is not None or made["dropout_p"] > 0)
        call = Call(plan, ranks, made, by_position, run_options(threads, backend),
                    _torch_type(out_type), flag("return_lse", return_lse),
                    flag("sum_sink_gradient", sum_sink_gradient),
                    _overlaps(overlap, plan, by_position, q))
        agreement.require_spans(plan, tensors.row_spans)
        agreement.require_library(call, tensors)
        return (call, tensors), _facts(call, tensors)

    call, tensors = agreement.check(plan, ranks, q, checked)
    with torch.autocast(tensors.q.device.type, enabled=False):
        out, lse = _Attention.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


def _checked_options(given: dict[str, Any], dropout_seed: Any) -> dict[str, Any]:
    """Of the local calls, as `regard.attention` takes them."""
    for name, value in given.items():
        OPTIONS[name].check(name, value)
    options = {**given, "dropout_p": float(given["dropout_p"])}
    if options["dropout_p"] > 0:
        if dropout_seed is None:
            raise refuse("dropout_seed", None, "must be given, and be equal on all ranks")
        integer("dropout_seed", dropout_seed, 0, 2**64 - 1)
        options["dropout_seed"] = dropout_seed
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    return options


def _overlaps(overlap: Any, plan: Plan, by_position: bool, q: Tensor) -> bool:
    """Errors: Unsupported where it is asked for and cannot be."""
    if overlap is not None and flag("overlap", overlap):
        if plan.scheme not in ("gather", "halo"):
            raise refuse("overlap", True, f'"{plan.scheme}" has no such choice', Unsupported)
        if by_position:
            raise refuse("overlap", True, "not with alibi_slopes or dropout, which need keys that "
                         "follow each other", Unsupported)
    wanted = q.is_cuda if overlap is None else overlap
    return bool(wanted) and plan.world_size > 1 and plan.scheme in ("gather", "halo") and (
        not by_position)


def _scheme(call: Call) -> ModuleType:
    return overlapping if call.overlaps else _SCHEMES[call.plan.scheme]


def _torch_type(out_type: Any) -> torch.dtype | None:
    if out_type is None:
        return None
    found: torch.dtype = getattr(torch, NAMES[type_name("out_type", out_type)])
    return found


def _refuse_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name in OPTIONS:
            raise refuse(name, shown(value), "is not taken here: the plan says which pairs are "
                         "visible, and tensors are (B, H, S, D)", Unsupported)
        raise refuse(name, shown(value), "is no option of attention", WrongType)


def _made(given: Tensors) -> Tensors:
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
    return given._replace(q=q, k=k, v=v, **numbers)


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
    return (f"batch {tensors.q.shape[0]}, {', '.join(shown_tensors)}, {call.options}, "
            f"out_type {call.out_type}, return_lse {call.return_lse}, "
            f"sum_sink_gradient {call.sums_sink}, overlap {call.overlaps}")


class _Attention(torch.autograd.Function):
    """call, then the fields of Tensors."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Tensor, Tensor]:
        out, lse, kept = _scheme(call).forward(call, Tensors(*tensors))
        ctx.call = call
        ctx.save_for_backward(*kept)
        ctx.types = [None if x is None else x.dtype for x in tensors[:_GRADIENTS]]
        ctx.out_shape = out.shape
        ctx.set_materialize_grads(False)
        if not call.return_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        wanted = Wanted(*ctx.needs_input_grad[1:1 + _GRADIENTS])
        if dout is None:  # the lse alone has a gradient
            assert dlse is not None
            dout = dlse.new_zeros(ctx.out_shape, dtype=call.out_type or ctx.types[0])
        if dlse is None and call.return_lse:  # equal on all ranks, whatever each uses
            dlse = dout.new_zeros(dout.shape[:-1], dtype=torch.promote_types(
                ctx.types[0], torch.float32))
        found = _scheme(call).backward(call, ctx.saved_tensors, dout, dlse, wanted)
        dsink = found.dsink
        if dsink is not None and call.sums_sink:
            dsink = call.ranks.sum_in_order(dsink)
        gradients = (found.dq, found.dk, found.dv, found.dbias, dsink)
        return (None, *(x.to(type_) if x is not None and is_wanted else None for x, type_, is_wanted
                        in zip(gradients, ctx.types, wanted)), None, None, None)
