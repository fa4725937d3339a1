"""`regard.torch.distributed.attention`: each rank's rows in, each rank's rows out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ...errors import Unsupported, refuse
from ...options import Precision
from . import passes
from .call import Call, Tensors, Wanted
from .plan_value import Plan
from .preparing import made, prepared
from .ranks import Group

if TYPE_CHECKING:
    from ...typing import Unpack

Overlap = Literal["heads", "keys", "documents", False] | None
Result = Tensor | tuple[Tensor, Tensor]
_is_compiling = torch.compiler.is_dynamo_compiling  # a constant for the compiler


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
    dropout_seed: int | Tensor | None
    dropout_offset: int
    precision: Precision
    deterministic: bool
    out_type: Any
    sum_sink_gradient: bool
    overlap: Overlap
    threads: int
    backend: str


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group = None, *,
              return_lse: Literal[False] = False, **options: Unpack[Options]) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group = None, *,
              return_lse: Literal[True], **options: Unpack[Options]) -> tuple[Tensor, Tensor]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group = None, *,
              return_lse: bool, **options: Unpack[Options]) -> Result: ...


def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group = None, *,
              bias: Tensor | None = None, mask: Tensor | None = None,
              row_spans: Tensor | None = None, sink: Tensor | None = None,
              alibi_slopes: Tensor | None = None, scale: float | None = None,
              softcap: float = 0.0, dropout_p: float = 0.0,
              dropout_seed: int | Tensor | None = None, dropout_offset: int = 0,
              precision: str = "full", deterministic: bool = False,
              return_lse: bool = False, out_type: Any = None, sum_sink_gradient: bool = True,
              overlap: Overlap = None, threads: int = 0, backend: str = "", **others: Any
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
            For a plan with two levels (among nodes, within a node): the group of the ranks with
            this rank's place in each node, and that of this node's ranks, in their order.
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
            call over the whole sequence. The seed must be given, equal on all ranks; a tensor on a
            GPU is read there, and its equality not checked.
        return_lse: True: also return the lse, (B, Hq, rows).
        out_type: "float32" gives a float32 out for float16 and bfloat16 inputs.
        sum_sink_gradient: True: every rank gets the whole gradient of the sink, which must not be
            summed again. False: every rank gets that of its rows (with "ulysses", its heads), for
            programs that sum the gradients of all parameters over the group.
            DistributedDataParallel averages them: the loss of a rank must then be the sum over its
            rows times world_size, over the rows of all ranks.
        overlap: of "gather" and "halo": what is computed while keys of others arrive.
            False: nothing; one call over all keys. Where all keys move and there are no packed
            documents, its out, lse and dq on the CPU have the bits of one process.
            "heads": some heads of keys after the other, in two calls forward and up to three
            backward (one where a bias has a gradient); on the CPU with the same bits. Each rank
            must have several heads of keys.
            "documents": rows whose documents are whole on the rank, in calls of their own. They
            must have a quarter of the visible pairs, and no bias, mask, row_spans, alibi_slopes or
            dropout may be given.
            "keys": own keys, in two calls forward and three backward, whose results are merged in
            float32 or wider; not with alibi_slopes or dropout.
            None: on GPUs "documents", if it can be and the rank with the most to do has 0.5 TFLOP
            in both passes; else "heads", with one head of keys "keys", where the plan's
            `moves_long` is True; else False. "ring" always overlaps, "ulysses" never.
        threads, backend: as in `regard.torch.attention`.

    Returns:
        out, (B, Hq, rows, Dv); or (out, lse).

    Raises:
        InvalidArgument, WrongType, Unsupported; each names the argument and its value. At the first
        call with a plan in a group, every rank raises if one rank does, or if plans or options
        differ. Later, each rank checks its own arguments before it communicates. A rank that gives
        a new plan while others give one that they have used before is not noticed: it waits for
        their word and they for its rows, until the group's timeout. Where GPUs share memory, their
        streams wait so long, and then an error of CUDA ends the process's use of its GPU.
    """
    bias, mask = (x.reshape(1) if isinstance(x, Tensor) and x.dim() == 0 else x
                  for x in (bias, mask))
    given = Tensors(q, k, v, bias, sink, mask, row_spans, alibi_slopes)
    options = {"scale": scale, "softcap": softcap, "dropout_p": dropout_p,
               "dropout_seed": dropout_seed, "dropout_offset": dropout_offset,
               "precision": precision, "deterministic": deterministic, "return_lse": return_lse,
               "out_type": out_type, "sum_sink_gradient": sum_sink_gradient, "overlap": overlap,
               "threads": threads, "backend": backend}
    if not _is_compiling():
        out, lse = _attention(given, plan, group, options, others)
    else:
        from . import compiled  # which imports the compiler

        if not others and compiled.takes(given, plan, group, options):
            out, lse = compiled.attention(made(given), plan, group, options)
        else:
            out, lse = _between_compiled_parts(given, plan, group, options, others)
    return (out, lse) if return_lse else out


def _attention(given: Tensors, plan: Plan, group: Group, options: dict[str, Any],
               others: dict[str, Any]) -> tuple[Tensor, Tensor]:
    call, tensors = prepared(given, plan, group, options, others)
    kind = tensors.q.device.type
    without = (torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else
               nullcontext())
    with without:
        found: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
            call, *tensors)
    return found


# torch.compiler.disable, which imports the compiler at once; this one does at the first call.
_between_compiled_parts = _disable_dynamo(_attention)


class _Attention(torch.autograd.Function):
    """call, then the fields of Tensors."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Tensor, Tensor]:
        out, lse, kept = passes.forward(call, Tensors(*tensors))
        ctx.call = call
        seed = call.options.get("dropout_seed")  # in memory: autograd sees where it has changed
        ctx.save_for_backward(*kept, seed if isinstance(seed, Tensor) else None)
        # Without data: memory is held by what is kept alone.
        ctx.like = call.kept("like", lambda: [
            None if x is None else torch.empty_like(x, device="meta")
            for x in tensors[:passes.GRADED]])
        ctx.set_materialize_grads(False)
        if not call.return_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise refuse("create_graph", True, "gradients of distributed attention's gradients are "
                         "not available", Unsupported)
        wanted = Wanted(*ctx.needs_input_grad[1:1 + passes.GRADED])
        kept = ctx.saved_tensors[:-1]
        return (None, *passes.backward(ctx.call, kept, dout, dlse, wanted, ctx.like),
                None, None, None)
