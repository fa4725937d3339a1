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
from ..arrays import NAMES, shape_only
from ..call import EXTRAS, Call
from ..errors import InvalidArgument
from ..settings import Settings

Arrays = Mapping[str, Any]
Result = tuple[tuple[int, ...], Any, float]  # shape, type, what is there before the call

for (_target, _platform), _handler in _core.xla_handlers().items():
    jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


@dataclass(frozen=True)
class Spec:
    """What a compiled program knows of a call, beside the shapes and types of its arrays.

    The arrays go by name: q, k, v, those of EXTRAS that are given, and dropout_seed (uint32, low
    and high word) where it is an array.
    """

    settings: Settings
    layout: str
    threads: int
    backend: str

    def call(self, arrays: Arrays) -> Call:
        extras = {name: arrays.get(name) for name in EXTRAS}
        return Call(arrays["q"], arrays["k"], arrays["v"], extras, self.settings, self.layout,
                    shape_only)

    def check(self, arrays: Arrays, pass_: str) -> None:
        """What shapes, types and settings tell. Errors: as `regard.attention`."""
        call = self.call(arrays)
        try:
            call.problem().explain(pass_, "cpu", 0, "reference")
        except InvalidArgument as error:
            raise call.advised(error, "a copy of {} with dense rows") from None

    @cached_property
    def attributes(self) -> dict[str, Any]:
        s = self.settings
        seed = s.dropout_seed - (s.dropout_seed >> 63 << 64)  # the same 64 bits, signed
        offset = s.dropout_offset - (s.dropout_offset >> 63 << 64)
        return dict(
            has_scale=np.int64(s.scale is not None), scale=np.float64(s.scale or 0),
            softcap=np.float64(s.softcap), causal=s.causal, window_left=np.int64(s.window[0]),
            window_right=np.int64(s.window[1]), dropout_p=np.float64(s.dropout_p),
            dropout_seed=np.int64(seed), dropout_offset=np.int64(offset),
            max_seqlen_q=np.int64(s.max_seqlen_q), max_seqlen_k=np.int64(s.max_seqlen_k),
            precision=s.precision, deterministic=np.int64(s.deterministic),
            threads=np.int64(self.threads), backend=self.backend)


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
    """Of lse and dlse."""
    return jnp.float64 if arrays["q"].dtype == jnp.float64 else jnp.float32


def _call(target: str, spec: Spec, call: Call, arrays: Arrays,
          results: Mapping[str, Result]) -> dict[str, Any]:
    names, operands = list(arrays), list(arrays.values())
    # The library leaves alone what lies beyond a sequence's end.
    ragged = call.packed or any(name in arrays for name in ("seqused_q", "seqused_k"))
    aliases: dict[int, int] = {}
    for index, (shape, dtype, empty) in enumerate(results.values()):
        if ragged:
            aliases[len(operands)] = index
            names.append("zeros")
            operands.append(jnp.full(shape, empty, dtype))
    axes = _varying(*operands)
    struct: Any = jax.ShapeDtypeStruct
    shapes = [struct(shape, dtype) for shape, dtype, _ in results.values()]
    made = jax.ffi.ffi_call(target, shapes, input_output_aliases=aliases)(
        *(_vary(x, axes) for x in operands), operands=" ".join(names), results=" ".join(results),
        rows_first=np.int64(spec.layout == "bshd" and not call.packed), **spec.attributes)
    return {name: _vary(x, axes) for name, x in zip(results, made)}


# Within jax.shard_map an array's type says over which axes of the mesh it varies. Operands of a
# call vary over the same ones (the gradient of one that did not is then summed over them), and so
# do the results, which XLA's call does not know.

def vary_alike(arrays: Arrays) -> dict[str, Any]:
    axes = _varying(*arrays.values())
    return {name: _vary(x, axes) for name, x in arrays.items()}


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
