"""The calls that PyTorch's own attention serves while Regard is installed in its place."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..mask_value import Mask
from .kernels import TYPES

_told: set[str] = set()


def left_to_pytorch(*tensors: Any) -> bool:
    """Whether Regard cannot take a call with these; a warning says so once for each reason."""
    reason = _why_not(tensors)
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
    return None
