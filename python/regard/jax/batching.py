"""jax.vmap of a pass: the mapped axis joins the batch, or the heads, of one call.

Joining the batch moves no memory. It is impossible where a sink, which has no batch axis, is mapped
or has a gradient: then the axis joins the heads. Packed sequences are computed one after another,
and so are calls with dropout, because its mask depends on the numbers of batch entry and head. vmap
thus gives the results of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from . import calls
from .calls import Arrays, Spec

# Arrays with the batch and the heads of q. The layout applies to _ROWS only.
_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_SUMS = ("lse", "dlse")
_SCORES = ("bias", "mask", "row_spans", "key_spans", "dbias")
_BATCH, _HEADS = 0, 1  # axes of (B, H, S, D)
Pass = Callable[[Arrays], dict[str, Any]]


def forward(spec: Spec, out_type: str, with_lse: bool, arrays: Arrays) -> tuple[Any, Any]:
    """`calls.forward`, with a rule for vmap."""
    def run(arrays: Arrays) -> dict[str, Any]:
        out, lse = calls.forward(spec, out_type, with_lse, arrays)
        return {"out": out, "lse": lse} if with_lse else {"out": out}

    made = _mappable(spec, run, ())(arrays)
    return made["out"], made.get("lse")


def backward(spec: Spec, types: Mapping[str, str], arrays: Arrays) -> dict[str, Any]:
    """`calls.backward`, with a rule for vmap."""
    def run(arrays: Arrays) -> dict[str, Any]:
        return calls.backward(spec, types, arrays)

    def of_joined(arrays: Arrays) -> dict[str, Any]:
        return backward(spec, {**types, "dbias": "f32"}, arrays)  # parts of a sum: see _Fold.part

    is_narrow = types.get("dbias") in ("f16", "bf16")
    return _mappable(spec, run, tuple(types), of_joined if is_narrow else None)(arrays)


def _mappable(spec: Spec, run: Pass, gradients: tuple[str, ...], of_joined: Pass | None = None
              ) -> Pass:
    """of_joined: what computes a call that stands for several, if that is not the same."""
    mappable = jax.custom_batching.custom_vmap(run)

    @mappable.def_vmap
    def rule(size: int, of_arguments: Sequence[Mapping[str, bool]], arrays: Arrays
             ) -> tuple[Any, Any]:
        mapped, = of_arguments
        if size == 0:
            struct: Any = jax.ShapeDtypeStruct
            one = {name: struct(x.shape[int(mapped[name]):], x.dtype) for name, x in arrays.items()}
            made = {name: jnp.zeros((0, *x.shape), x.dtype)
                    for name, x in jax.eval_shape(run, one).items()}
            return made, {name: True for name in made}
        into = _axis_to_join(spec, mapped, arrays, gradients)
        if into is None:
            alone = {name: x for name, x in arrays.items() if not mapped[name]}
            made = jax.lax.map(lambda one: mappable({**alone, **one}),
                               {name: x for name, x in arrays.items() if mapped[name]})
        else:
            fold = _Fold(into, size, spec, mapped, arrays, "dbias" in gradients)
            joined = (of_joined or mappable)(
                {name: fold.join(name, x) for name, x in arrays.items()})
            made = {name: fold.part(name, x) for name, x in joined.items()}
        return made, {name: True for name in made}

    return mappable


def _axis_to_join(spec: Spec, mapped: Mapping[str, bool], arrays: Arrays,
                  gradients: tuple[str, ...]) -> int | None:
    if {"cu_seqlens_q", "q_positions"} & set(arrays) or spec.options["dropout_p"] > 0:
        return None
    if not mapped.get("sink") and "dsink" not in gradients:
        return _BATCH
    return None if mapped.get("seqused_q") or mapped.get("seqused_k") else _HEADS


@dataclass(frozen=True)
class _Fold:
    """Joins the mapped axis, which is the first one of the `mapped` arrays, to the axis `into`."""

    into: int
    size: int
    spec: Spec
    mapped: Mapping[str, bool]
    arrays: Arrays
    wants_dbias: bool

    def join(self, name: str, x: Any) -> Any:
        axis = self._axis(name)
        rank = x.ndim - self.mapped[name]
        if name == "alibi_slopes" and rank == 1:  # has no batch yet
            if not self.mapped[name] and self.into == _BATCH:
                return x
            if self.into == _BATCH:
                x = jnp.broadcast_to(x[:, None], (self.size, self._length(_BATCH), x.shape[-1]))
            else:
                axis = 0
        if axis is None:
            return x
        if name in _SCORES:
            length = x.shape[axis + self.mapped[name]]
            if not self.mapped[name] and length == 1 and not (name == "bias" and self.wants_dbias):
                return x  # broadcasts over the joined axis as well
            shape = list(x.shape)
            shape[axis + self.mapped[name]] = self._length(axis)
            x = jnp.broadcast_to(x, shape)
        if not self.mapped[name]:
            x = jnp.broadcast_to(x, (self.size, *x.shape))
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], self.size * x.shape[axis + 1], *x.shape[axis + 2:])

    def part(self, name: str, x: Any) -> Any:
        """The inverse for a result: the mapped axis becomes the first one."""
        axis = self._axis(name)
        assert axis is not None  # of every result: see _axis_to_join
        x = x.reshape(*x.shape[:axis], self.size, x.shape[axis] // self.size, *x.shape[axis + 1:])
        x = jnp.moveaxis(x, axis, 0)
        if name == "dbias" and self._shape("bias")[axis] == 1 and x.shape[axis + 1] > 1:
            x = x.sum(axis + 1, keepdims=True)
        return x.astype(self.arrays["bias"].dtype) if name == "dbias" else x

    def _axis(self, name: str) -> int | None:
        """The number of the axis to join in an array of one problem; None if the array lacks it."""
        if name in ("sink", "dsink"):
            return 0 if self.into == _HEADS else None
        if name in ("seqused_q", "seqused_k"):
            return 0 if self.into == _BATCH else None
        if name in _ROWS and self.into == _HEADS and self.spec.layout == "bshd":
            return 2
        return self.into

    def _length(self, axis: int) -> int:
        """The number of batch entries or query heads of one problem."""
        return self._shape("q")[2 if axis == _HEADS and self.spec.layout == "bshd" else axis]

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of the array in one problem."""
        return tuple(self.arrays[name].shape[int(self.mapped[name]):])
