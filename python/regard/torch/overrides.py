"""Offers a call to overrides of PyTorch's function: __torch_function__ of modes and of subclasses.

They know PyTorch's own function, by identity, and reach its default implementation by calling it.
A mode below all others puts Regard there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .limits import is_causal_bias

_overrides: Any = torch.overrides


class DefaultImplementation(TorchFunctionMode):
    """Runs `replacement` where overrides call `original` and no override is left."""

    def __init__(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        super().__init__()
        self.original, self.replacement = original, replacement

    def offer(self, *arguments: Any, **options: Any) -> Any:
        """The result of the overrides of a call, of which there is at least one."""
        given = *arguments, *options.values()
        # What Regard alone takes, such as a Mask, would not pass through PyTorch's parser.
        known = all(isinstance(x, (int, float, type(None))) or hasattr(x, "__torch_function__")
                    for x in given)
        with _at_the_bottom(self):
            return _overrides.handle_torch_function(
                self.original if known else self.replacement, given, *arguments, **options)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is not self.original and func is not self.replacement:
            return func(*args, **options)
        overloaded = _overrides._get_overloaded_args((*args, *options.values()))
        if not overloaded:
            return self.replacement(*args, **options)
        for x in overloaded:
            # A CausalBias compares with what torch.nn.functional holds, which is the replacement.
            public = self.replacement if is_causal_bias(x) else func
            with self:
                result = x.__torch_function__(public, types, args, options)
            if result is not NotImplemented:
                return result
        raise TypeError("no implementation found for scaled_dot_product_attention on types that "
                        f"implement __torch_function__: {[type(x) for x in overloaded]}")


@contextmanager
def _at_the_bottom(mode: TorchFunctionMode) -> Iterator[None]:
    """Modes are called from the top of their stack."""
    above = _overrides._get_current_function_mode_stack()
    if above and above[0] is mode:
        yield
        return
    _replace_modes(above, [mode, *above])
    try:
        yield
    finally:
        _replace_modes([mode, *above], above)


def _replace_modes(old: list[TorchFunctionMode], new: list[TorchFunctionMode]) -> None:
    for _ in old:
        _overrides._pop_mode()
    for mode in new:
        _overrides._push_mode(mode)
