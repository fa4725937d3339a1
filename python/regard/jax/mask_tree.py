"""Masks as trees of JAX: their arrays are arguments of a compiled function, the rest is part of it."""

from __future__ import annotations

from typing import Any

import jax

from ..mask_value import Mask

_ARRAYS = ("row_spans", "key_spans", "dense")
_VALUES = ("len_q", "len_k", "causal", "window", "whole_lengths")


def _flattened(mask: Mask) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return (tuple(getattr(mask, name) for name in _ARRAYS),
            tuple(getattr(mask, name) for name in _VALUES))


def _mask_of(values: tuple[Any, ...], arrays: tuple[Any, ...]) -> Mask:
    """Without checks: JAX makes trees of other things than arrays as well."""
    mask = object.__new__(Mask)
    for name, value in zip(_ARRAYS + _VALUES, (*arrays, *values)):
        object.__setattr__(mask, name, value)
    return mask


jax.tree_util.register_pytree_node(Mask, _flattened, _mask_of)
