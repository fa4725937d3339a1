"""Attention and its gradients for the arrays of any framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _core, direct
from .arrays import Framework, framework_of, output, shape_only, view, written
from .call import Call, call_of
from .checks import flag, integer, number, one_of, run_options, text, word64
from .docstrings import documented
from .element_types import result_type, type_name
from .errors import InvalidArgument, Unsupported, refuse
from .gradients import GRADIENTS, Gradients, sums_type, wanted_gradients
from .mask_options import resolved
from .mask_value import Mask
from .typing import Array, ArrayT, AttentionOptions, Pass

if TYPE_CHECKING:
    from .typing import Unpack


# out has q's static type; lse, and an out of another element type, have none.
@overload
def attention(q: ArrayT, k: Array, v: Array, *, return_lse: Literal[False] = False,
              out_type: None = None, out: Array | None = None, lse: Array | None = None,
              continue_from: bool = False, multiprocessors: int = 0, threads: int = 0,
              backend: str = "", **options: Unpack[AttentionOptions]) -> ArrayT: ...


@overload
def attention(q: ArrayT, k: Array, v: Array, *, return_lse: Literal[True],
              out_type: None = None, out: Array | None = None, lse: Array | None = None,
              continue_from: bool = False, multiprocessors: int = 0, threads: int = 0,
              backend: str = "", **options: Unpack[AttentionOptions]) -> tuple[ArrayT, Any]: ...


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: bool = False, out_type: Any = None,
              out: Array | None = None, lse: Array | None = None, continue_from: bool = False,
              multiprocessors: int = 0, threads: int = 0, backend: str = "",
              **options: Unpack[AttentionOptions]) -> Any: ...


@documented
def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, out_type: Any = None,
              out: Any = None, lse: Any = None, continue_from: bool = False,
              multiprocessors: int = 0, threads: int = 0, backend: str = "", **options: Any) -> Any:
    """softmax(scale q k^T + bias) v, exactly, in memory linear in the sequence.

    Arrays of NumPy, PyTorch, JAX or CuPy are read in place, and results are arrays of the same
    framework on the same device; on a GPU the work is queued on the framework's current stream.
    PyTorch's and JAX's results are differentiable.

    Args:
        {q}
        {k}
        {v}
        {options}
        {return_lse}
        {out_type}
        out, lse: arrays to write to (not for JAX; PyTorch's then carry no gradient).
        continue_from: True: out (float32; float64 for float64) and lse, both given, hold a result
            over other keys, and become the result over both sets. An lse of -inf is an empty set.
        {multiprocessors}
        {threads}
        {backend}

    Returns:
        {results}

    Raises:
        {errors}
    """
    if "mask" in options:
        options = resolved(q, k, options)
    if q.__class__.__module__ in direct.FRAMEWORKS:
        result = direct.attention(q, k, v, options, out, lse, return_lse, continue_from, out_type,
                                  multiprocessors, threads, backend)
        if result is not None:
            return result
    into = _into(out, lse, continue_from, multiprocessors)
    framework = framework_of(q, "q")
    if framework.name == "JAX":
        from . import jax

        _refuse_outputs(out=out, lse=lse)
        return jax.attention(q, k, v, return_lse=return_lse, out_type=out_type, threads=threads,
                             backend=backend, **options)
    if framework.name == "PyTorch" and out is None and lse is None:
        from . import torch

        if options.get("dropout_p"):
            options.setdefault("dropout_seed", 0)
        return torch.attention(q, k, v, return_lse=return_lse, out_type=out_type, threads=threads,
                               backend=backend, **options)
    call = call_of(q, k, v, view, options)
    where = run_options(threads, backend)
    where |= framework.on_threads(where["threads"])
    return_lse = flag("return_lse", return_lse)
    wants_lse = return_lse or lse is not None
    try:
        problem = call.problem()
        own = problem.type
        type = own if out_type is None else result_type("out_type", out_type, "q", own)
        if out is None:
            out = _made(call, framework, call.out_shape(), type, 0)
        elif out_type is not None:
            _require_type("out_type", type, out, "out")
        if lse is None and wants_lse:
            lse = _made(call, framework, call.lse_shape(), sums_type(problem), -math.inf)
        problem.forward(call.rows(output(out, "out")), output(lse, "lse") if wants_lse else None,
                        stream=framework.stream(q), **into, **where)
    except InvalidArgument as error:
        raise call.advised(error, framework.dense) from None
    written(out)
    if wants_lse:
        written(lse)
    return (out, lse) if return_lse else out


@documented
def attention_backward(dout: Array, q: Array, k: Array, v: Array, out: Array | None, lse: Array, *,
                       dlse: Array | None = None, delta: Array | None = None,
                       gradients: Iterable[str] | None = None, gradient_type: Any = None,
                       into: Gradients | None = None, accumulate: bool = False,
                       multiprocessors: int = 0, threads: int = 0, backend: str = "",
                       **options: Unpack[AttentionOptions]) -> Gradients:
    """The gradients of `attention`, from what it returned.

    Args:
        {dout}
        q, k, v, **options: as `attention` had them.
        {out}
            None with delta.
        {lse}
        {dlse}
        delta: as lse; sum(dout out) - dlse of each row, instead of out and dlse (not for JAX): calls
            over different keys of one result share it.
        {gradients}
        {gradient_type}
        into: arrays to write to, instead of new ones.
        accumulate: True: add to what `into` holds.
        {multiprocessors}
        {threads}
        {backend}

    Returns:
        Gradients; each has the shape and the type of its input (dsink is float32).

    Raises:
        as `attention`.
    """
    given: dict[str, Any] = {**options}
    if "mask" in given:
        given = resolved(q, k, given)
    if q.__class__.__module__ in direct.FRAMEWORKS:
        found = direct.attention_backward(dout, q, k, v, out, lse, given, dlse, delta, gradients,
                                          gradient_type, into, accumulate, multiprocessors, threads,
                                          backend)
        if found is not None:
            return found
    framework = framework_of(q, "q")
    if framework.name == "JAX":
        from . import jax

        _refuse_outputs(into=into, accumulate=flag("accumulate", accumulate) or None, delta=delta,
                        multiprocessors=multiprocessors or None)
        return jax.attention_backward(dout, q, k, v, out, lse, dlse=dlse, gradients=gradients,
                                      gradient_type=gradient_type, threads=threads,
                                      backend=backend, **given)
    call = call_of(q, k, v, view, given)
    where = run_options(threads, backend)
    where |= framework.on_threads(where["threads"])
    wanted = wanted_gradients(gradients, call, into)
    if flag("accumulate", accumulate) and into is None:
        raise refuse("accumulate", True, "needs `into`, the arrays to add to")
    results = {name: getattr(into, name) if into is not None else
               _empty_gradient(name, call, framework, gradient_type) for name in wanted}
    if into is not None and gradient_type is not None:
        for name in [name for name in wanted if name != "dsink"]:  # which is float32
            _require_type("gradient_type", type_name("gradient_type", gradient_type), results[name],
                          name)
    arrays: dict[str, Any] = {
        name: call.rows(output(x, name)) if name in GRADIENTS[:3] else output(x, name)
        for name, x in results.items()}
    try:
        call.problem().backward(
            None if out is None else call.rows(view(out, "out")), view(lse, "lse"),
            call.rows(view(dout, "dout")), None if dlse is None else view(dlse, "dlse"),
            delta=None if delta is None else view(delta, "delta"), **arrays,
            accumulate=bool(accumulate), multiprocessors=_multiprocessors(multiprocessors),
            stream=framework.stream(q), **where)
    except InvalidArgument as error:
        raise call.advised(error, framework.dense) from None
    for x in results.values():
        written(x)
    return Gradients(**results)


def dropout_mask(batch: int, heads: int, len_q: int, len_k: int, p: float, *, seed: Any = 0,
                 offset: int = 0) -> Any:
    """Which weights dropout keeps: a NumPy bool array (batch, heads, len_q, len_k), True = kept.

    seed and offset are a call's dropout_seed and dropout_offset. Every device, element type and
    number of threads drops the same ones. The rows and columns of a packed sequence are counted
    from its own beginning. Errors: InvalidArgument.
    """
    import numpy

    batch, heads, len_q, len_k = (
        integer(name, size, 0, 2**31 - 1) for name, size in
        (("batch", batch), ("heads", heads), ("len_q", len_q), ("len_k", len_k)))
    p = number("p", p)
    dropout_probability(p)  # which refuses others, also where no weight is asked for
    seed = (framework_of(seed, "seed").seed_number(seed, "seed") if hasattr(seed, "shape") else
            word64("seed", seed))
    offset = word64("offset", offset)
    keep = numpy.empty((batch, heads, len_q, len_k), bool)
    if not keep.size:
        return keep
    q, k = (_core.Array.at(name, 0, "f32", [batch, heads, length, 1],
                           [heads * length, length, 1, 1])
            for name, length in (("len_q", len_q), ("len_k", len_k)))
    options = {"dropout_p": p, "dropout_seed": seed, "dropout_offset": offset}
    _core.Problem(q, k, k, options).dropout_mask(view(keep, "keep"))
    return keep


def dropout_probability(p: float) -> float:
    """The probability that dropout realises for `p`: the nearest multiple of 1/65536 below 1.

    Errors: InvalidArgument, WrongType for a p that is no number in [0, 1).
    """
    return _core.dropout_probability(number("p", p))


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs, on what tiling and why; print it.

    workspace is in bytes. pairs counts the (query, key) pairs that lengths, causal mask and window
    leave visible; for each of them flops counts 2 (D + Dv) forward, 2 (3 D + 2 Dv) backward.
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


@documented
def explain(q: Array, k: Array, v: Array, *, pass_: Pass = "forward", device: str | None = None,
            threads: int = 0, backend: str = "", **options: Unpack[AttentionOptions]
            ) -> Explanation:
    """How such a call would run. Arguments as `attention`; arrays need only a shape and a dtype.

    Where `mask` is a Mask, the text also gives its density and tiles, as far as they are found within
    a second or two, for which the host waits if the mask is on a GPU: of spans of one kind, and of
    any mask of up to 2^28 pairs. It says so where calls like this one read a tile map that the mask
    has kept.

    Args:
        pass_: "forward" or "backward".
        device: None is where q is; or "cpu", "cuda:0", or a chip that need not be there: "sm_80".
    """
    problem, which, where = _described(q, k, v, pass_, device, options)
    found = problem.explain(which, where, **run_options(threads, backend))
    mask = options.get("mask")
    if isinstance(mask, Mask):
        from .masks.visible import summary

        found["text"] = f"{found['text'].rstrip()}\nshown      {summary(mask)}\n"
    return Explanation(**found)


@documented
def prepare(q: Array, k: Array, v: Array, *, pass_: Pass = "forward", device: str | None = None,
            backend: str = "", **options: Unpack[AttentionOptions]) -> None:
    """Compiles the GPU kernels of such a call, or finds them, so that the call will not wait.

    Arguments as `explain`. On the CPU there is nothing to do. Errors: Unavailable without NVRTC.
    """
    problem, which, where = _described(q, k, v, pass_, device, options)
    problem.prepare(which, where, text("backend", backend))


def _described(q: Any, k: Any, v: Any, pass_: str, device: str | None, options: Any
               ) -> tuple[_core.Problem, str, str]:
    """The arguments of `explain` and `prepare` for the binding."""
    call = call_of(q, k, v, shape_only if device is not None else _view_or_shape,
                   resolved(q, k, options))
    return (call.problem(), one_of("forward", "backward")("pass_", pass_),
            "" if device is None else text("device", device))


def _view_or_shape(x: Any, argument: str) -> _core.Array:
    return view(x, argument) if hasattr(x, "__dlpack__") else shape_only(x, argument)


def _into(out: Any, lse: Any, continue_from: Any, multiprocessors: Any) -> dict[str, Any]:
    """Keywords of the binding that belong to given outputs. Errors: InvalidArgument, WrongType."""
    continues, limit = flag("continue_from", continue_from), _multiprocessors(multiprocessors)
    if continues and (out is None or lse is None):
        raise refuse("continue_from", True, "needs out and lse, which hold the result to continue")
    if limit and out is None:
        raise refuse("multiprocessors", limit, "needs out, an array to write to")
    return {"continue_from": continues, "multiprocessors": limit}


def _require_type(argument: str, asked: str, given: Any, name: str) -> None:
    own = output(given, name).type
    if own != asked:
        raise refuse(argument, asked, f"{name} is given, and is {own}")


def _multiprocessors(limit: Any) -> int:
    return integer("multiprocessors", limit, 0, 2**31 - 1)


def _empty_gradient(name: str, call: Call, framework: Framework, type: Any) -> Any:
    if name == "dsink":
        return framework.empty(call.options["sink"].shape, "f32", call.q)
    source = getattr(call, name[1:]) if name != "dbias" else call.options["bias"]
    own = call.read(source, name[1:]).type
    if type is not None:
        own = result_type("gradient_type", type, name[1:], own)
    return _made(call, framework, source.shape, own, 0)


def _made(call: Call, framework: Framework, shape: Sequence[int], type: str, padding: float) -> Any:
    """A new array. Rows outside of all sequences, which the library skips, hold `padding`."""
    array = framework.empty(shape, type, call.q)
    if call.is_ragged():
        array[...] = padding
    return array


def _refuse_outputs(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            raise refuse(name, "given", "JAX's arrays cannot be written to; leave it out",
                         Unsupported)
