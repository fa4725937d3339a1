"""Regard in the place of torch.nn.functional.scaled_dot_product_attention, and back.

Callers reach that function by three ways: as an attribute of torch.nn.functional, which is also
where torch.nn's own modules look it up; under a name that they imported it by, which is found by
going through the loaded modules; and in C++ by the inference path of torch.nn.MultiheadAttention
and torch.nn.TransformerEncoderLayer, which is switched off.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Optional

import torch
from torch import Tensor

from .kernels import TYPES
from .sdpa import scaled_dot_product_attention

_original = torch._C._nn.scaled_dot_product_attention  # whatever others made of functional's
_lock = threading.Lock()
_fast_path_before: Optional[bool] = None  # None: not installed
_reasons_told: set[str] = set()


def install() -> None:
    """Makes torch.nn.functional.scaled_dot_product_attention use Regard, in this process.

    Also for torch.nn's modules, and for modules loaded by now that imported it by name. What Regard
    cannot take (other devices and element types, nested tensors, transforms of torch.func,
    forward-mode derivatives) goes to PyTorch's own, and a warning says so once for each
    reason. Code that torch.compile compiled before stays as it is where it does not look the
    function up again. Calling it twice is calling it once.
    """
    global _fast_path_before
    with _lock:
        if _fast_path_before is None:
            _fast_path_before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            _replace(_original, _attention)


def uninstall() -> None:
    """Undoes `install`; without one, does nothing."""
    global _fast_path_before
    with _lock:
        if _fast_path_before is not None:
            _replace(_attention, _original)
            torch.backends.mha.set_fastpath_enabled(_fast_path_before)
            _fast_path_before = None


@contextmanager
def installed() -> Iterator[None]:
    """`install` for the length of a with statement; inside of another, the outer one decides."""
    was_installed = _fast_path_before is not None
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _replace(old: Any, by: Any) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__ == __name__:
            continue
        # torch.compile recognises PyTorch's functions by looking them up there.
        if module.__name__ == "torch._C._nn":
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, by)


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Any:
    reason = _why_not(query, key, value, attn_mask)
    tensors = query, key, value, attn_mask
    if reason is None and torch.overrides.has_torch_function(tensors):
        # A subclass of Tensor may have its own attention, as torch.nn.attention.bias has.
        return torch.overrides.handle_torch_function(
            _attention, tensors, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
            enable_gqa=enable_gqa)
    if reason is None:
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                            scale, enable_gqa)
    if not torch.compiler.is_compiling() and reason not in _reasons_told:
        _reasons_told.add(reason)
        warnings.warn(f"regard.torch.install: PyTorch's own attention runs for {reason}",
                      stacklevel=2)
    return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                     enable_gqa=enable_gqa)


def _why_not(query: Any, key: Any, value: Any, attn_mask: Any) -> str | None:
    """What about the call is not for Regard; None for nothing."""
    for x in (query, key, value, attn_mask):
        if x is None:
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
