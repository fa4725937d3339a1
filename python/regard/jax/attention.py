"""Differentiable attention for JAX, and its gradients as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import refuse_masked, shape_only
from ..call import Call, call_of
from ..checks import flag, run_options
from ..docstrings import documented
from ..element_types import TYPE_NAMES, refuse_foreign, result_type
from ..errors import Unsupported, WrongType, refuse
from ..gradients import GRADIENTS, Gradients, sums_type, wanted_gradients
from ..mask_options import resolved
from ..options import ARRAYS, OPTIONS
from . import batching
from .calls import Arrays, Spec, sharded_as, vary_alike
from .seeds import seed_words

if TYPE_CHECKING:
    from ..typing import AttentionOptions, Unpack

# Compiled functions return them.
jax.tree_util.register_dataclass(Gradients, data_fields=[*GRADIENTS], meta_fields=[])


@documented
def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, out_type: Any = None,
              threads: int = 0, backend: str = "", **options: Unpack[AttentionOptions]) -> Any:
    """softmax(scale q k^T + bias) v, exactly, in memory linear in the sequence.

    For JAX arrays (NumPy's are converted), under jit, vmap, scan, shard_map and checkpoint, with
    first derivatives in reverse mode for q, k, v, bias and sink, also through lse. Options that are
    no arrays are part of the compiled program.

    Args:
        {q}
        {k}
        {v}
        {options}
        dropout_seed: an int, part of the program: another one compiles anew. Or an array, an
            operand like any other: an integer of shape (), or a key of jax.random (typed, or its
            two uint32). An integer array drops the same weights as that int.
        {return_lse}
        {out_type}
        {threads}
        {backend}

    Returns:
        {results}

    Raises:
        Errors of `regard`, when traced, for what shapes and options tell. What only values or the
        device tell (cu_seqlens, a backend, memory) is a jax.errors.JaxRuntimeError when run, or
        JAX's ValueError where the program has run before; its text holds the library's
        "argument = value: reason".
    """
    spec, arrays, call = _described(q, k, v, threads, backend, options)
    return_lse = flag("return_lse", return_lse)
    own = call.read(call.q, "q").type
    type = own if out_type is None else result_type("out_type", out_type, "q", own)
    out, lse = _attend(spec, type, return_lse, vary_alike(arrays))
    out = sharded_as(out, call.q)
    return (out, lse) if return_lse else out


@documented
def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None,
                       gradients: Iterable[str] | None = None, gradient_type: Any = None,
                       threads: int = 0, backend: str = "",
                       **options: Unpack[AttentionOptions]) -> Gradients:
    """The gradients of `attention`, from what it returned.

    Args:
        {dout}
        q, k, v, **options: as `attention` had them.
        {out}
        {lse}
        {dlse}
        {gradients}
        {gradient_type}
        {threads}
        {backend}

    Returns:
        Gradients; each has the shape and the type of its input (dsink is float32).

    Raises:
        as `attention`.
    """
    spec, arrays, call = _described(q, k, v, threads, backend, options)
    wanted = wanted_gradients(gradients, call)
    sums = sums_type(call.problem())
    own = call.read(call.q, "q").type
    for name, x, shape, allowed in (("out", out, call.out_shape(), (own, "f32")),
                                    ("dout", dout, call.out_shape(), (own, "f32")),
                                    ("lse", lse, call.lse_shape(), (sums,)),
                                    ("dlse", dlse, call.lse_shape(), (sums,))):
        if name == "dlse" and dlse is None:
            continue
        arrays[name] = as_array(x, name)
        read = shape_only(arrays[name], name)
        if tuple(read.shape) != tuple(shape) or read.type not in allowed:
            raise refuse(name, f"{read.type} {list(read.shape)}",
                         f"must be {' or '.join(dict.fromkeys(allowed))} {list(shape)}")
    types = _types(wanted, arrays, gradient_type)
    found = _gradients(spec, types, vary_alike(arrays))
    bias = options.get("bias")
    if bias is not None and "dbias" in found:  # of rank 4, as _described makes the bias
        found["dbias"] = found["dbias"].reshape(bias.shape)
    return Gradients(**found)


# ------------------------------------------------------------------------------------- derivatives

@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(spec: Spec, out_type: str, with_lse: bool, arrays: Arrays) -> tuple[Any, Any]:
    spec.check(arrays, "forward")
    return batching.forward(spec, out_type, with_lse, arrays)


def _attend_forward(spec: Spec, out_type: str, with_lse: bool, arrays: Arrays) -> Any:
    values = {name: x.value for name, x in arrays.items()}
    # One element for a gradient that is asked for, no element for another one. A shape can say
    # this, the structure cannot: JAX may combine the residuals of one set of gradients with the
    # structure of the set that it traced last.
    asked = {name: jnp.zeros(int(arrays[name[1:]].perturbed)) for name in GRADIENTS
             if name[1:] in arrays}
    spec.check(values, "backward")
    run = partial(batching.forward, spec, out_type, True)
    out, lse = _first_derivative_only(run, values)
    return (out, lse if with_lse else None), (values, out, lse, asked)


def _attend_backward(spec: Spec, out_type: str, with_lse: bool, kept: Any, arrived: Any) -> Any:
    values, out, lse, asked = kept
    dout, dlse = arrived
    arrays = {**values, "out": out, "lse": lse,
              "dout": jnp.zeros(out.shape, out.dtype) if _is_zero(dout) else dout}
    if with_lse and not _is_zero(dlse):
        arrays["dlse"] = dlse
    wanted = [name for name, mark in asked.items() if mark.size]
    found = _gradients(spec, _types(wanted, values, None), arrays)
    for name in asked.keys() - found.keys():
        found[name] = _zero_of(values[name[1:]])
    return ({name: found.get("d" + name) for name in values},)


_differentiable.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
_attend = jax.jit(_differentiable, static_argnums=(0, 1, 2), inline=True)


def _zero_of(x: Any) -> Any:
    make: Callable[..., Any] = jax.custom_derivatives.zero_from_primal
    return make(x, symbolic_zeros=True)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _gradients(spec: Spec, types: Mapping[str, str], arrays: Arrays) -> dict[str, Any]:
    found: dict[str, Any] = _compiled_gradients(spec, tuple(types.items()), arrays)
    return found


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _compiled_gradients(spec: Spec, types: tuple[tuple[str, str], ...], arrays: Arrays) -> Any:
    spec.check(arrays, "backward")
    return _first_derivative_only(partial(batching.backward, spec, dict(types)), arrays)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _first_derivative_only(run: Callable[[Arrays], Any], arrays: Arrays) -> Any:
    return run(arrays)


@_first_derivative_only.defjvp
def _refuse_second(run: Any, primals: Any, tangents: Any) -> Any:
    raise refuse("q", "differentiated twice",
                 "attention has first derivatives, in reverse mode (jax.grad, jax.vjp)",
                 Unsupported)


def _types(gradients: Iterable[str], arrays: Arrays, gradient_type: Any) -> dict[str, str]:
    """The element type of each gradient, by name."""
    own = {name: TYPE_NAMES[arrays[name[1:]].dtype.name] for name in gradients}
    if gradient_type is None:
        return own
    return {name: type if name == "dsink" else  # which is float32
            result_type("gradient_type", gradient_type, name[1:], type)
            for name, type in own.items()}


# --------------------------------------------------------------------------------------- arguments

def _described(q: Any, k: Any, v: Any, threads: int, backend: str, given: Mapping[str, Any]
               ) -> tuple[Spec, dict[str, Any], Call]:
    """The call, checked as far as possible without the values of its arrays."""
    options = resolved(q, k, dict(given))
    for name in ARRAYS:
        if options.get(name) is not None:
            options[name] = as_array(options[name], name)
    packed = options.get("cu_seqlens_q") is not None
    for name in ("bias", "mask", *(() if packed else ("row_spans", "key_spans"))):
        x = options.get(name)
        if x is not None and x.ndim < 4:
            options[name] = x.reshape((1,) * (4 - x.ndim) + x.shape)
    seed = options.get("dropout_seed", 0)
    if hasattr(seed, "shape"):
        options["dropout_seed"] = 0
        if not isinstance(seed, (jax.Array, np.ndarray, np.generic)):
            raise refuse("dropout_seed", f"a {type(seed).__name__}",
                         "must be an integer, or an array of JAX or NumPy", WrongType)
    for name, value in options.items():
        if name in OPTIONS and name not in ARRAYS and isinstance(value, jax.Array):
            raise refuse(name, f"a JAX array of shape {value.shape}",
                         "must be a Python value: it is part of the compiled program", WrongType)
    call = call_of(as_array(q, "q"), as_array(k, "k"), as_array(v, "v"), shape_only, options)
    call.problem()
    arrays = {"q": call.q, "k": call.k, "v": call.v}
    arrays |= {name: call.options[name] for name in ARRAYS if call.options[name] is not None}
    if not isinstance(seed, int) and call.options["dropout_p"] > 0:
        arrays["dropout_seed"] = seed_words(seed)
    items = tuple(item for item in call.options.items() if item[0] not in ARRAYS)
    return Spec(items, call.layout, **run_options(threads, backend)), arrays, call


def as_array(x: Any, argument: str) -> Any:
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, (np.ndarray, np.generic)):
        refuse_masked(x, argument)
        refuse_foreign(x, argument)
        return jnp.asarray(x)
    raise refuse(argument, f"a {type(x).__name__}", "must be an array of JAX or NumPy", WrongType)
