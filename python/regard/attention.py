"""Attention and its gradients for the arrays of any framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _core
from .arrays import Framework, framework_of, output, shape_only, view, written
from .call import Call, call_of
from .errors import InvalidArgument, Unsupported, refuse
from .gradients import Gradients, sums_type, wanted_gradients
from .options import checked, integer, number, one_of, text
from .settings import Causal, Layout, Precision, Window, type_name
from .typing import Array, ArrayT, AttentionOptions, Pass

if TYPE_CHECKING:
    from .typing import Unpack


# Results have q's type; an lse, and an out of another element type, are arrays of q's framework.
@overload
def attention(q: ArrayT, k: Array, v: Array, *, return_lse: Literal[False] = False,
              out_type: None = None, out: Array | None = None, lse: Array | None = None,
              threads: int = 0, backend: str = "", **options: Unpack[AttentionOptions]
              ) -> ArrayT: ...


@overload
def attention(q: ArrayT, k: Array, v: Array, *, return_lse: Literal[True],
              out_type: None = None, out: Array | None = None, lse: Array | None = None,
              threads: int = 0, backend: str = "", **options: Unpack[AttentionOptions]
              ) -> tuple[ArrayT, Any]: ...


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: bool = False, out_type: Any = None,
              out: Array | None = None, lse: Array | None = None, threads: int = 0,
              backend: str = "", **options: Unpack[AttentionOptions]) -> Any: ...


def attention(q: Any, k: Any, v: Any, *, bias: Any = None, mask: Any = None,
              causal: Causal = False, window: Window = None, scale: float | None = None,
              softcap: float = 0.0, alibi_slopes: Any = None, sink: Any = None,
              dropout_p: float = 0.0, dropout_seed: int = 0, dropout_offset: int = 0,
              cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
              max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
              seqused_q: Any = None, seqused_k: Any = None, layout: Layout = "bhsd",
              precision: Precision = "full", deterministic: bool = False,
              return_lse: bool = False, out_type: Any = None, out: Any = None, lse: Any = None,
              threads: int = 0, backend: str = "") -> Any:
    """softmax(scale q k^T + bias) v, exactly, in memory linear in the sequence.

    Arrays of NumPy, PyTorch, JAX or CuPy are read in place, and results are arrays of the same
    framework on the same device; on a GPU they are queued on the framework's current stream.
    PyTorch's and JAX's are differentiable.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd", or packed (total_q, Hq, D) with
            cu_seqlens; float64, float32, float16 or bfloat16, any strides with the last one 1.
        k: (B, Hkv, Sk, D) likewise; Hq is a multiple of Hkv, and consecutive query heads share one.
        v: (B, Hkv, Sk, Dv) likewise.
        bias: added to the scores; broadcasts to (B, Hq, Sq, Sk); any float type.
        mask: bool, True = visible; broadcasts to (B, Hq, Sq, Sk).
        causal: "top_left": query i sees keys up to i; "bottom_right": up to i + Sk - Sq; True where
            both are the same.
        window: (left, right) keys beside the diagonal that stay visible; None is unbounded.
        scale: of q k^T; 1/sqrt(D) if None.
        softcap: c > 0 replaces scores s by c tanh(s/c), before the bias.
        alibi_slopes: (Hq) or (B, Hq) float32; score -= slope |i + Sk - Sq - j|.
        sink: (Hq) float32; a logit that joins each row's denominator and carries no value.
        dropout_p: probability to drop a weight, in steps of 1/65536; which ones is a function of
            (dropout_seed, dropout_offset, b, h, i, j) alone: see `dropout_mask`.
        cu_seqlens_q, cu_seqlens_k: (B + 1) int32; where each packed sequence begins; with
            max_seqlen_q and max_seqlen_k, the longest ones.
        seqused_q, seqused_k: (B) int32; how many rows of each sequence are real.
        precision: how a GPU's tensor cores may round float32 inputs.
        deterministic: gradients that repeat to the bit on a GPU (a CPU's always do).
        return_lse: also return the log of the softmax's denominators, natural, (B, Hq, Sq), packed
            (Hq, total_q); float32 (float64 for float64).
        out_type: "float32" gives float32 results for float16 and bfloat16 inputs.
        out, lse: arrays to write to (not for JAX; PyTorch's then carry no gradient).
        threads: of the CPU; 0 is every core.
        backend: forces one of `info().backends`; "" chooses.

    Returns:
        out, (B, Hq, Sq, Dv) in q's layout, or (out, lse). A row that sees no key is 0, its lse -inf.

    Raises:
        InvalidArgument (a ValueError), WrongType (a TypeError), Unsupported, Unavailable,
        OutOfMemory, DeviceFailure; each names the argument and its value.
    """
    options = dict(bias=bias, mask=mask, causal=causal, window=window, scale=scale,
                   softcap=softcap, alibi_slopes=alibi_slopes, sink=sink, dropout_p=dropout_p,
                   dropout_seed=dropout_seed, dropout_offset=dropout_offset,
                   cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                   max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q,
                   seqused_k=seqused_k, layout=layout, precision=precision,
                   deterministic=deterministic)
    framework = framework_of(q, "q")
    if framework.name == "JAX":
        from . import jax

        _refuse_outputs(out=out, lse=lse)
        return jax.attention(q, k, v, return_lse=return_lse, out_type=out_type, threads=threads,
                             backend=backend, **options)
    if framework.name == "PyTorch" and out is None and lse is None:
        from . import torch

        return torch.attention(q, k, v, return_lse=return_lse, out_type=out_type, threads=threads,
                               backend=backend, **options)
    call = call_of(q, k, v, view, **options)
    threads, backend = checked("threads", threads), checked("backend", backend)
    wants_lse = checked("return_lse", return_lse) or lse is not None
    try:
        problem = call.problem()
        type = problem.type if out_type is None else type_name("out_type", out_type)
        if out is None:
            out = _made(call, framework, call.out_shape(), type, 0)
        if lse is None and wants_lse:
            lse = _made(call, framework, call.lse_shape(), sums_type(problem), -math.inf)
        problem.forward(call.rows(output(out, "out")), output(lse, "lse") if wants_lse else None,
                        stream=framework.stream(q), threads=threads, backend=backend)
    except InvalidArgument as error:
        raise call.advised(error, framework.dense) from None
    written(out)
    if wants_lse:
        written(lse)
    return (out, lse) if return_lse else out


def attention_backward(dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *,
                       dlse: Array | None = None, gradients: Iterable[str] | None = None,
                       gradient_type: Any = None, into: Gradients | None = None,
                       accumulate: bool = False, threads: int = 0, backend: str = "",
                       **options: Unpack[AttentionOptions]) -> Gradients:
    """The gradients of `attention`, from what it returned.

    Args:
        dout: the gradient that arrives at out; as out, or float32.
        q, k, v, **options: as `attention` had them.
        out, lse: as `attention` returned them (return_lse=True).
        dlse: the gradient that arrives at lse; as lse.
        gradients: which to compute, of "dq", "dk", "dv", "dbias", "dsink"; by default all that exist.
        gradient_type: "float32" gives float32 results for float16 and bfloat16 inputs.
        into: arrays to write to, instead of new ones.
        accumulate: add to what `into` holds.

    Returns:
        Gradients; each as its input in shape and type (dsink float32).

    Raises:
        as `attention`.
    """
    framework = framework_of(q, "q")
    if framework.name == "JAX":
        from . import jax

        _refuse_outputs(into=into, accumulate=checked("accumulate", accumulate) or None)
        return jax.attention_backward(dout, q, k, v, out, lse, dlse=dlse, gradients=gradients,
                                      gradient_type=gradient_type, threads=threads,
                                      backend=backend, **options)
    call = call_of(q, k, v, view, **options)
    threads, backend = checked("threads", threads), checked("backend", backend)
    wanted = wanted_gradients(gradients, call, into)
    if checked("accumulate", accumulate) and into is None:
        raise refuse("accumulate", True, "needs `into`, the arrays to add to")
    results = {name: getattr(into, name) if into is not None else
               _empty_gradient(name, call, framework, gradient_type) for name in wanted}
    arrays: dict[str, Any] = {
        name: call.rows(output(x, name)) if name in ("dq", "dk", "dv") else output(x, name)
        for name, x in results.items()}
    try:
        call.problem().backward(
            call.rows(view(out, "out")), view(lse, "lse"), call.rows(view(dout, "dout")),
            None if dlse is None else view(dlse, "dlse"), **arrays, accumulate=bool(accumulate),
            stream=framework.stream(q), threads=threads, backend=backend)
    except InvalidArgument as error:
        raise call.advised(error, framework.dense) from None
    for x in results.values():
        written(x)
    return Gradients(**results)


def dropout_mask(batch: int, heads: int, len_q: int, len_k: int, p: float, *, seed: int = 0,
                 offset: int = 0) -> Any:
    """Which weights dropout keeps: a NumPy bool array (batch, heads, len_q, len_k), True = kept.

    Any device, type and thread count drops the same ones. Packed sequences use their own row and
    column numbers. Errors: InvalidArgument.
    """
    import numpy

    batch, heads, len_q, len_k = (
        integer(name, size, 0, 2**31 - 1) for name, size in
        (("batch", batch), ("heads", heads), ("len_q", len_q), ("len_k", len_k)))
    p = number("p", p)
    seed, offset = (integer(name, word, 0, 2**64 - 1)
                    for name, word in (("seed", seed), ("offset", offset)))
    q, k = (_core.Array.at(0, "f32", [batch, heads, length, 1], [heads * length, length, 1, 1])
            for length in (len_q, len_k))
    keep = numpy.empty((batch, heads, len_q, len_k), bool)
    problem = _core.Problem(q, k, k, dropout_p=p, dropout_seed=seed, dropout_offset=offset)
    problem.dropout_mask(view(keep, "keep"))
    return keep


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs, on what tiling and why; print it.

    workspace is in bytes; pairs counts the (query, key) pairs that lengths, causal mask and window
    leave visible; flops is 2 (D + Dv) for each forward, 2 (3 D + 2 Dv) backward.
    """

    supported: bool
    backend: str
    kernel: str
    text: str
    workspace: int
    pairs: float
    flops: float

    def __str__(self) -> str:
        return self.text.rstrip("\n")


def explain(q: Array, k: Array, v: Array, *, pass_: Pass = "forward", device: str | None = None,
            threads: int = 0, backend: str = "", **options: Unpack[AttentionOptions]
            ) -> Explanation:
    """How such a call would run. Arguments as `attention`; anything with shape and dtype will do.

    Args:
        pass_: "forward" or "backward".
        device: None is where q is; else "cpu", "cuda:0", or a chip that need not be there: "sm_80".
    """
    problem, which, where = _described(q, k, v, pass_, device, options)
    return Explanation(**problem.explain(which, where, checked("threads", threads),
                                         checked("backend", backend)))


def prepare(q: Array, k: Array, v: Array, *, pass_: Pass = "forward", device: str | None = None,
            backend: str = "", **options: Unpack[AttentionOptions]) -> None:
    """Compiles the GPU kernels of such a call, or finds them, so that the call will not wait.

    Arguments as `explain`. On the CPU there is nothing to do. Errors: Unavailable without NVRTC.
    """
    problem, which, where = _described(q, k, v, pass_, device, options)
    problem.prepare(which, where, checked("backend", backend))


def _described(q: Any, k: Any, v: Any, pass_: str, device: str | None, options: Mapping[str, Any]
               ) -> tuple[_core.Problem, str, str]:
    """What `explain` and `prepare` ask the binding about."""
    call = call_of(q, k, v, shape_only if device is not None else _view_or_shape, **options)
    return (call.problem(), one_of("pass_", pass_, ("forward", "backward")),
            "" if device is None else text("device", device))


def _view_or_shape(x: Any, argument: str) -> _core.Array:
    return view(x, argument) if hasattr(x, "__dlpack__") else shape_only(x, argument)


def _empty_gradient(name: str, call: Call, framework: Framework, type: Any) -> Any:
    if name == "dsink":
        return framework.empty(call.extras["sink"].shape, "f32", call.q)
    source = getattr(call, name[1:]) if name != "dbias" else call.extras["bias"]
    own = call.read(source, name[1:]).type if type is None else type_name("gradient_type", type)
    return _made(call, framework, source.shape, own, 0)


def _made(call: Call, framework: Framework, shape: Sequence[int], type: str, padding: float) -> Any:
    """A new array; the library does not write rows outside of every sequence, so they hold this."""
    array = framework.empty(shape, type, call.q)
    if call.is_ragged():
        array[...] = padding
    return array


def _refuse_outputs(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            raise refuse(name, "given", "JAX's arrays cannot be written to; leave it out",
                         Unsupported)
