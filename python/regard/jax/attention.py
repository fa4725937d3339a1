"""Differentiable attention for JAX, and its gradients by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import refuse_masked, shape_only
from ..call import EXTRAS, Call, call_of
from ..errors import Unsupported, WrongType, refuse
from ..gradients import GRADIENTS, Gradients, sums_type, wanted_gradients
from ..options import checked
from ..settings import TYPE_NAMES, Causal, Layout, Precision, Window, type_name
from . import batching
from .calls import Arrays, Spec, vary_alike


def attention(q: Any, k: Any, v: Any, *, bias: Any = None, mask: Any = None,
              causal: Causal = False, window: Window = None, scale: float | None = None,
              softcap: float = 0.0, alibi_slopes: Any = None, sink: Any = None,
              dropout_p: float = 0.0, dropout_seed: Any = 0, dropout_offset: int = 0,
              cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
              max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
              seqused_q: Any = None, seqused_k: Any = None, layout: Layout = "bhsd",
              precision: Precision = "full", deterministic: bool = False,
              return_lse: bool = False, out_type: Any = None, threads: int = 0,
              backend: str = "") -> Any:
    """softmax(scale q k^T + bias) v, exactly, in memory linear in the sequence.

    As `regard.attention`, for JAX arrays (NumPy's are converted): works under jit, vmap, scan,
    shard_map and checkpoint, and has first derivatives in reverse mode for q, k, v, bias and sink,
    also through lse. alibi_slopes get no gradient. Numbers among the arguments are part of the
    compiled program.

    Args:
        dropout_seed: an int, part of the program: another one compiles anew. Or an array, an
            operand like any other: an integer of shape (), or a key of jax.random (typed, or its
            two uint32). For an integer the same weights are dropped as for that int. On a GPU the
            call then waits until the device has computed the seed.

    Returns:
        out, (B, Hq, Sq, Dv) in q's layout, or (out, lse). A row that sees no key, or lies beyond
        its sequence's end, is 0, its lse -inf.

    Raises:
        Errors of `regard`, when traced, for what shapes and settings tell. What only values or the
        device tell (cu_seqlens, a backend, memory) is a jax.errors.JaxRuntimeError when run, whose
        text holds the library's "argument = value: reason".
    """
    spec, arrays, call = _described(
        q, k, v, threads, backend, bias=bias, mask=mask, causal=causal, window=window, scale=scale,
        softcap=softcap, alibi_slopes=alibi_slopes, sink=sink, dropout_p=dropout_p,
        dropout_seed=dropout_seed, dropout_offset=dropout_offset, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q, seqused_k=seqused_k, layout=layout, precision=precision,
        deterministic=deterministic)
    return_lse = checked("return_lse", return_lse)
    own = call.read(call.q, "q").type
    type = own if out_type is None else type_name("out_type", out_type)
    if type not in (own, "f32"):
        raise refuse("out_type", out_type, f"must be float32 or q's type, {call.q.dtype}")
    out, lse = _attend(spec, type, return_lse, vary_alike(arrays))
    return (out, lse) if return_lse else out


def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None,
                       gradients: Iterable[str] | None = None, gradient_type: Any = None,
                       threads: int = 0, backend: str = "", **options: Any) -> Gradients:
    """The gradients of `attention`, from what it returned; as `regard.attention_backward`.

    Args:
        dout: the gradient that arrives at out; as out, or float32.
        q, k, v, **options: as `attention` had them.
        out, lse: as `attention` returned them (return_lse=True).
        dlse: the gradient that arrives at lse; as lse.
        gradients: which to compute, of "dq", "dk", "dv", "dbias", "dsink"; by default all that
            exist.
        gradient_type: "float32" gives float32 results for float16 and bfloat16 inputs.

    Returns:
        Gradients; each as its input in shape and type (dsink float32).

    Raises:
        as `attention`.
    """
    spec, arrays, call = _described(q, k, v, threads, backend, **options)
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
    return Gradients(**_gradients(spec, types, vary_alike(arrays)))


# ------------------------------------------------------------------------------------- derivatives

@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(spec: Spec, out_type: str, with_lse: bool, arrays: Arrays) -> tuple[Any, Any]:
    spec.check(arrays, "forward")
    return batching.forward(spec, out_type, with_lse, arrays)


def _attend_forward(spec: Spec, out_type: str, with_lse: bool, arrays: Arrays) -> Any:
    values = {name: x.value for name, x in arrays.items()}
    # An array of one element for a gradient that is asked for, of none for another. Shapes can say
    # it, structure cannot: JAX may pair the residuals of one set of gradients with the structure of
    # the set that it traced last.
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
    """The element type of each gradient."""
    own = {name: TYPE_NAMES[arrays[name[1:]].dtype.name] for name in gradients}
    if gradient_type is None:
        return own
    type = type_name("gradient_type", gradient_type)
    for name, of_input in own.items():
        if type not in (of_input, "f32"):
            raise refuse("gradient_type", gradient_type,
                         f"must be float32 or the type of {name[1:]}, {of_input}")
    return {name: "f32" if name == "dsink" else type for name in own}


# --------------------------------------------------------------------------------------- arguments

def _described(q: Any, k: Any, v: Any, threads: int, backend: str, **options: Any
               ) -> tuple[Spec, dict[str, Any], Call]:
    """The call, checked as far as it can be without its arrays' values."""
    for name in EXTRAS:
        if options.get(name) is not None:
            options[name] = as_array(options[name], name)
    for name in ("bias", "mask"):
        x = options.get(name)
        if x is not None and x.ndim < 4:
            options[name] = x.reshape((1,) * (4 - x.ndim) + x.shape)
    seed = options.get("dropout_seed", 0)
    if isinstance(seed, (jax.Array, np.ndarray, np.generic)):
        options["dropout_seed"] = 0
    for name, value in options.items():
        if name not in EXTRAS and isinstance(value, jax.Array):
            raise refuse(name, f"a JAX array of shape {value.shape}",
                         "must be a Python value: it is part of the compiled program", WrongType)
    call = call_of(as_array(q, "q"), as_array(k, "k"), as_array(v, "v"), shape_only, **options)
    call.problem()
    arrays = {"q": call.q, "k": call.k, "v": call.v,
              **{name: x for name, x in call.extras.items() if x is not None}}
    if not isinstance(seed, int) and call.settings.dropout_p > 0:
        arrays["dropout_seed"] = _seed_words(seed)
    spec = Spec(call.settings, call.layout, checked("threads", threads),
                checked("backend", backend))
    return spec, arrays, call


def as_array(x: Any, argument: str) -> Any:
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, (np.ndarray, np.generic)):
        refuse_masked(x, argument)
        return jnp.asarray(x)
    raise refuse(argument, f"a {type(x).__name__}", "must be an array of JAX or NumPy", WrongType)


def _seed_words(seed: Any) -> Any:
    """Two uint32, low and high, of an integer or a key."""
    if isinstance(seed, (np.ndarray, np.generic)) and seed.shape == () and seed.dtype.kind in "iu":
        number = checked("dropout_seed", int(seed))  # JAX may not have 64 bits for it
        return jnp.asarray(np.array([number & 0xFFFFFFFF, number >> 32], np.uint32))
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(seed)
        if words.shape == (2,):
            return words[::-1]
    elif seed.shape == (2,) and seed.dtype == jnp.uint32:
        return jnp.asarray(seed)[::-1]
    elif seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer):
        seed = jnp.asarray(seed)
        wide = seed.dtype.itemsize == 8
        high = (seed >> 32).astype(jnp.uint32) if wide else jnp.uint32(0)
        return jnp.stack([seed.astype(jnp.uint32), high])
    raise refuse("dropout_seed", f"an array of {seed.dtype} and shape {seed.shape}",
                 "must be an integer of shape (), or a key of jax.random of two words", WrongType)
