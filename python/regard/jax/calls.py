"""The library's two passes as calls that XLA makes, for arrays of one problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from ..arrays import shape_only
from ..call import Call
from ..element_types import NAMES
from ..errors import InvalidArgument
from ..options import ARRAYS

_jax_sharding: Any = jax.sharding  # without types
Arrays = Mapping[str, Any]
Result = tuple[tuple[int, ...], Any, float]  # shape, type, value before the call

for (_target, _platform), _handler in _core.xla_handlers().items():
    jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


@dataclass(frozen=True)
class Spec:
    """The part of a call that is compiled into a program, next to its arrays' shapes and types.

    items: the options that are no arrays. Arrays go by name: q, k, v, those of ARRAYS that are
    given, and dropout_seed (uint32, low and high word) where it is an array.
    """

    items: tuple[tuple[str, Any], ...]
    layout: str
    threads: int
    backend: str

    @cached_property
    def options(self) -> dict[str, Any]:
        return dict(self.items)

    def call(self, arrays: Arrays) -> Call:
        options = {name: arrays.get(name) for name in ARRAYS} | self.options
        return Call(arrays["q"], arrays["k"], arrays["v"], options, self.layout, shape_only)

    def check(self, arrays: Arrays, pass_: str) -> None:
        """Checks shapes, types and options. Errors: as `regard.attention`."""
        call = self.call(arrays)
        try:
            call.problem().explain(pass_, "cpu", 0, "reference")
        except InvalidArgument as error:
            raise call.advised(error, "a copy of {} with dense rows") from None

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """Of XLA's call: an option that is None is left out, a pair becomes two numbers."""
        found: dict[str, Any] = {"layout": self.layout, "backend": self.backend}
        for name, value in (*self.items, ("threads", self.threads)):
            if isinstance(value, tuple):
                found |= {f"{name}_left": np.int64(value[0]), f"{name}_right": np.int64(value[1])}
            elif isinstance(value, str):
                found[name] = value
            elif value is not None:
                found[name] = np.float64(value) if isinstance(value, float) else np.int64(value)
        return found


def forward(spec: Spec, out_type: str, with_lse: bool, arrays: Arrays) -> tuple[Any, Any]:
    """(out, lse); lse is None without `with_lse`. Rows beyond a sequence's end: 0 and -inf."""
    call = spec.call(arrays)
    results: dict[str, Result] = {"out": (call.out_shape(), NAMES[out_type], 0)}
    if with_lse:
        results["lse"] = (call.lse_shape(), sums_dtype(arrays), -np.inf)
    made = _call("regard_forward", spec, call, arrays, results)
    return made["out"], made.get("lse")


def backward(spec: Spec, types: Mapping[str, str], arrays: Arrays) -> dict[str, Any]:
    """The gradients that `types` names, in its types.

    arrays: also out, lse, dout and, where a gradient arrives at lse, dlse.
    """
    results = {name: (arrays[name[1:]].shape, NAMES[type], 0) for name, type in types.items()}
    return _call("regard_backward", spec, spec.call(arrays), arrays, results) if results else {}


def sums_dtype(arrays: Arrays) -> Any:
    """The type of lse and dlse."""
    return jnp.float64 if arrays["q"].dtype == jnp.float64 else jnp.float32


def _call(target: str, spec: Spec, call: Call, arrays: Arrays,
          results: Mapping[str, Result]) -> dict[str, Any]:
    names, operands = list(arrays), list(arrays.values())
    aliases: dict[int, int] = {}
    for index, (shape, dtype, empty) in enumerate(results.values()):
        if call.is_ragged():  # the library does not write rows outside of every sequence
            aliases[len(operands)] = index
            names.append("zeros")
            operands.append(jnp.full(shape, empty, dtype))
    axes = _varying(*operands)
    struct: Any = jax.ShapeDtypeStruct
    shapes = [struct(shape, dtype) for shape, dtype, _ in results.values()]
    made = jax.ffi.ffi_call(target, shapes, input_output_aliases=aliases)(
        *(_vary(x, axes) for x in operands), operands=" ".join(names), results=" ".join(results),
        **spec.attributes)
    return {name: _vary(x, axes) for name, x in zip(results, made)}


# Within jax.shard_map the type of an array names the mesh axes over which it varies. All operands
# of a call must vary over the same axes (JAX sums the gradient of an operand that did not over
# them). The results vary over these axes too, which must be said here, because XLA's call does not
# tell.

def vary_alike(arrays: Arrays) -> dict[str, Any]:
    axes = _varying(*arrays.values())
    return {name: _vary(_gathered(x), axes) for name, x in arrays.items()}


# On a mesh with explicit axes the type of an array names the axes over which it is sharded. A call
# takes whole arrays, and its result is sharded as q again.

def sharded_as(x: Any, like: Any) -> Any:
    sharding = _sharding(like)
    return x if sharding is None else _jax_sharding.reshard(x, sharding)


def _gathered(x: Any) -> Any:
    sharding = _sharding(x)
    if sharding is None:
        return x
    whole = _jax_sharding.NamedSharding(sharding.mesh, _jax_sharding.PartitionSpec())
    return _jax_sharding.reshard(x, whole)


def _sharding(x: Any) -> Any:
    """That of the type; None where it names no axis."""
    found: Any = getattr(jax.typeof(x), "sharding", None) if hasattr(jax, "typeof") else None
    return found if found is not None and any(axis is not None for axis in found.spec) else None


def _varying(*arrays: Any) -> frozenset[str]:
    axes: set[str] = set()
    for x in arrays:
        type: Any = jax.typeof(x) if hasattr(jax, "typeof") else None
        type = getattr(type, "manual_axis_type", type)  # since JAX 0.10
        axes.update(getattr(type, "varying", ()) or getattr(type, "vma", ()))
    return frozenset(axes)


def _vary(x: Any, axes: frozenset[str]) -> Any:
    more = tuple(axes - _varying(x))
    if not more:
        return x
    lax: Any = jax.lax
    return lax.pcast(x, more, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, more)
