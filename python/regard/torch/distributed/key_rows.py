"""Keys and values of some rows as they are moved: packed, and as views of what was packed."""

from __future__ import annotations

from torch import Tensor

from .call import Pair
from .copies import copy


def packed(k: Tensor, v: Tensor) -> Tensor:
    """(rows, B, Hkv, D + Dv), dense: keys and values as they are moved."""
    rows = k.new_empty(packed_shape(k.shape[2], k, v))
    for x, to in zip((k, v), unpacked(rows, k.shape[-1])):
        copy(to, x)
    return rows


def packed_shape(rows: int, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape that `packed` gives so many rows of keys and values."""
    return rows, *k.shape[:2], k.shape[-1] + v.shape[-1]


def unpacked(rows: Tensor, head_size: int) -> Pair:
    """k and v as views of what `packed` made."""
    both = rows.permute(1, 2, 0, 3)
    return Pair(both[..., :head_size], both[..., head_size:])


def columns(x: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """The part of a bias or mask that belongs to some keys; None is all of them."""
    if x is None or keys is None or x.shape[-1] == 1:
        return x
    return x.index_select(-1, keys)
