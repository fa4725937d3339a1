"""Regard in the place of torch.nn.functional.scaled_dot_product_attention, and back.

Callers reach that function by three ways: as an attribute of torch.nn.functional, which is also
where torch.nn's own modules look it up; under a name that they imported it by, which is found by
going through the loaded modules; and in C++ from the inference path of torch.nn.MultiheadAttention
and torch.nn.TransformerEncoderLayer, which fast_path.py replaces. TorchScript, which compiles a
function's text and calls operators in C++, keeps PyTorch's attention.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import fast_path
from .limits import left_to_pytorch
from .sdpa import scaled_dot_product_attention

_original = torch._C._nn.scaled_dot_product_attention  # whatever others made of functional's
_lock = threading.Lock()
_is_installed = False


def install() -> None:
    """Makes torch.nn.functional.scaled_dot_product_attention use Regard, in this process.

    Also for torch.nn's modules, and for modules loaded by now that imported it by name. What Regard
    cannot take (other devices and element types, nested tensors, transforms of torch.func,
    forward-mode derivatives) goes to PyTorch's own, and a warning says so once for each
    reason; so does what torch.jit.script compiles, without one. Code that torch.compile compiled before stays as it is where it does not look the
    function up again. Calling it twice is calling it once.
    """
    global _is_installed
    with _lock:
        if not _is_installed:
            _replace(dict(_pairs()))
            _is_installed = True


def uninstall() -> None:
    """Undoes `install`; without one, does nothing."""
    global _is_installed
    with _lock:
        if _is_installed:
            _replace({by: old for old, by in _pairs()})
            _is_installed = False


@contextmanager
def installed() -> Iterator[None]:
    """`install` for the length of a with statement; inside of another, the outer one decides."""
    was_installed = _is_installed
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _pairs() -> tuple[tuple[Any, Any], ...]:
    """PyTorch's functions, and what stands in for them."""
    return ((_original, _attention),
            (fast_path.native_multi_head_attention, fast_path.multi_head_attention),
            (fast_path.native_encoder_layer, fast_path.encoder_layer))


def _replace(by: dict[Any, Any]) -> None:
    by_id = {id(old): new for old, new in by.items()}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith(__package__):
            continue
        # torch.compile recognises PyTorch's functions by looking them up there.
        if module.__name__ == "torch._C._nn":
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Any:
    tensors = query, key, value, attn_mask
    if left_to_pytorch(*tensors):
        return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                         enable_gqa=enable_gqa)
    if torch.overrides.has_torch_function(tensors):
        # A subclass of Tensor may have its own attention, as torch.nn.attention.bias has.
        return torch.overrides.handle_torch_function(
            _attention, tensors, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
            enable_gqa=enable_gqa)
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                                        enable_gqa)


# TorchScript takes a function that it knows by an operator's name for the operator itself.
_builtins: Any = torch.jit._builtins
for _old, _new in _pairs():
    _builtins._register_builtin(_new, _builtins._find_builtin(_old))
