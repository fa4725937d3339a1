"""The calls that PyTorch's own attention serves while Regard is installed in its place."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..mask_value import Mask
from .kernels import TYPES

_LARGEST_SCALE = 2.0**120  # of float32 scores, see src/problem/describe.cpp
_told: set[str] = set()


def left_to_pytorch(*tensors: Any, dropout_p: Any = 0.0, scale: Any = None,
                    enable_gqa: bool = False) -> bool:
    """Whether Regard cannot take a call with these; a warning says so once for each reason.
    tensors: those of the call, with query, key and value in front where enable_gqa is True."""
    reason = _why_not(tensors) or _why_not_options(tensors, dropout_p, scale, enable_gqa)
    if reason is None:
        return False
    if not torch.compiler.is_compiling() and reason not in _told:
        _told.add(reason)
        warnings.warn(f"regard.torch.install: PyTorch's own attention runs for {reason}",
                      stacklevel=3)
    return True


def _why_not(tensors: tuple[Any, ...]) -> str | None:
    for x in tensors:
        if x is None or type(x) is Mask:
            continue
        if not isinstance(x, Tensor):
            return f"a {type(x).__name__}"
        if is_distributed(x):
            return "DTensors"
        if x.is_nested:
            return "nested tensors"
        if x.device.type not in ("cpu", "cuda", "meta"):
            return f"device {x.device.type}"
        if x.layout != torch.strided:
            return f"layout {x.layout}"
        if x.dtype not in TYPES or x.dtype == torch.int32:
            return f"tensors of {x.dtype}"
    if torch._C._are_functorch_transforms_active():
        return "transforms of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode derivatives"
    if not torch.compiler.is_compiling() and any(map(_is_unaligned, tensors)):
        return "memory that is not aligned to its elements"
    return None


def _is_unaligned(x: Any) -> bool:
    is_plain = type(x) in (Tensor, torch.nn.Parameter)  # others may have no memory
    return is_plain and not x.is_meta and x.data_ptr() % x.element_size() != 0


def _why_not_options(tensors: tuple[Any, ...], dropout_p: Any, scale: Any, enable_gqa: bool
                     ) -> str | None:
    """What PyTorch computes, and Regard refuses."""
    if isinstance(dropout_p, (int, float)) and dropout_p == 1:
        return "dropout_p=1"
    if isinstance(scale, (int, float)) and not abs(scale) <= _LARGEST_SCALE:
        return "a scale that is not finite, or above 2^120"
    if enable_gqa:
        _, key, value = tensors[:3]
        if key.dim() > 2 and value.dim() > 2 and key.shape[-3] != value.shape[-3]:
            return "other heads of value than of key"
    return None


# By name, because PyTorch's modules of these classes take seconds to import.
def is_distributed(x: Tensor) -> bool:
    """Whether x is a DTensor."""
    return type(x).__name__ == "DTensor"


def is_jagged(x: Any) -> bool:
    """Whether x is a nested tensor of layout torch.jagged."""
    return type(x).__name__ == "NestedTensor"


def is_causal_bias(x: Any) -> bool:
    """Whether x is of torch.nn.attention.bias: a causal mask, whose elements are not initialised."""
    return type(x).__name__ == "CausalBias" and isinstance(x, Tensor)
