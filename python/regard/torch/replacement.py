"""Puts Regard in the place of torch.nn.functional.scaled_dot_product_attention, and takes it away.

Callers reach that function in three ways: as an attribute of torch.nn.functional, as torch.nn's own
modules do; under a name by which a module has imported it, which a search of the loaded modules
finds; and in C++, from the inference path of torch.nn.MultiheadAttention and
torch.nn.TransformerEncoderLayer, which fast_path.py replaces. TorchScript compiles the text of a
function and calls operators in C++, and therefore keeps PyTorch's attention.
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

from . import direct, fast_path, sdpa
from .limits import is_causal_bias, is_jagged, left_to_pytorch
from .overrides import DefaultImplementation

_original = torch._C._nn.scaled_dot_product_attention  # even if others replaced functional's
_lock = threading.Lock()
_is_installed = False
_is_kept = False  # until `uninstall`
_statements = 0  # of `installed` that are open, in all threads


def install() -> None:
    """Makes torch.nn.functional.scaled_dot_product_attention use Regard, in this process.

    This includes torch.nn's modules, and all loaded modules that have imported the function by
    name. PyTorch's own function runs where Regard cannot (other devices and element types, nested
    tensors, transforms of torch.func, forward-mode derivatives), with one warning for each reason.
    It also runs in code of torch.jit.script, without a warning, and in code that torch.compile has
    compiled before and that does not look the function up again. A second call has no effect.
    """
    global _is_kept
    with _lock:
        _is_kept = True
        _set_installed(True)


def uninstall() -> None:
    """Undoes `install`, and open statements of `installed`; without these, does nothing."""
    global _is_kept
    with _lock:
        _is_kept = False
        _set_installed(False)


@contextmanager
def installed() -> Iterator[None]:
    """`install` for the length of a with statement. Where several are open, nested or in threads,
    the last one to end undoes it; and none does after `install`."""
    global _statements
    with _lock:
        _statements += 1
        _set_installed(True)
    try:
        yield
    finally:
        with _lock:
            _statements -= 1
            if _statements == 0 and not _is_kept:
                _set_installed(False)


def _set_installed(wanted: bool) -> None:
    """For a caller that holds the lock."""
    global _is_installed
    if wanted != _is_installed:
        _replace({old: new for old, new in _pairs()} if wanted else
                 {new: old for old, new in _pairs()})
        _is_installed = wanted


def _pairs() -> tuple[tuple[Any, Any], ...]:
    """PyTorch's functions, and their replacements."""
    return ((_original, scaled_dot_product_attention),
            (fast_path.native_multi_head_attention, fast_path.multi_head_attention),
            (fast_path.native_encoder_layer, fast_path.encoder_layer))


def _replace(by: dict[Any, Any]) -> None:
    by_id = {id(old): new for old, new in by.items()}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith(__package__):
            continue
        # torch.compile looks PyTorch's functions up there to recognise them.
        if module.__name__ == "torch._C._nn":
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


# Under PyTorch's name, by which others, such as its context_parallel, replace what they find.
def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False) -> Any:
    found = direct.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                                scale, enable_gqa)
    if found is not None:
        return found
    if isinstance(dropout_p, bool):  # `self.training and p` is a number for PyTorch
        dropout_p = float(dropout_p)
    tensors = query, key, value, attn_mask
    if _has_overrides(tensors):
        # The compiler offers PyTorch's function to overrides itself.
        offer = _original if torch.compiler.is_dynamo_compiling() else _default.offer
        return offer(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                     enable_gqa=enable_gqa)
    if left_to_pytorch(*tensors, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa):
        return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                         enable_gqa=enable_gqa)
    return sdpa.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                             scale, enable_gqa)


def _has_overrides(tensors: tuple[Any, ...]) -> bool:
    """Without those of tensors that are left to PyTorch, or that sdpa.py knows."""
    if not torch.overrides.has_torch_function(tensors) or any(map(is_jagged, tensors)):
        return False
    return not (torch.compiler.is_dynamo_compiling() and is_causal_bias(tensors[-1]))


_default = DefaultImplementation(_original, scaled_dot_product_attention)

# TorchScript compiles a function that it knows by an operator's name as that operator.
_builtins: Any = torch.jit._builtins
for _old, _new in _pairs():
    _builtins._register_builtin(_new, _builtins._find_builtin(_old))
