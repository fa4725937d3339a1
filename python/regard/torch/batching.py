"""The operators under vmap: a call for each index of the batched dimension.

There are two kinds of vmap: that of torch.func, and an older one, which torch.autograd still uses
for is_grads_batched and for vectorize=True.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_vmap_of_autograd: Any = torch._C


def register(library: Any, forward: Callable[..., Sequence[Tensor]],
             backward: Callable[..., Sequence[Tensor]]) -> None:
    """library: of the operators that these call."""
    def by_func(operator: Callable[..., Sequence[Tensor]]) -> Any:
        def looped(info: Any, axes: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
            slices = [x.movedim(axis, 0) if isinstance(x, Tensor) and axis is not None else None
                      for x, axis in zip(arguments, axes)]
            found = _looped(operator, arguments, slices)
            return (found, 0) if operator is backward else (tuple(found), (0, 0))

        return looped

    def by_autograd(*arguments: Any) -> list[Tensor]:
        level = _vmap_of_autograd._vmapmode_decrement_nesting() + 1
        try:
            # A tensor that has no dimension of this level is given one of size 1.
            slices = [torch._remove_batch_dim(x, level, 1, 0) if isinstance(x, Tensor) else None
                      for x in arguments]
            found = _looped(backward, arguments, slices)
            return [x[0] if len(x) == 1 else torch._add_batch_dim(x, 0, level) for x in found]
        finally:
            _vmap_of_autograd._vmapmode_increment_nesting()

    torch.library.register_vmap("regard::forward", by_func(forward), lib=library)
    torch.library.register_vmap("regard::backward", by_func(backward), lib=library)
    library.impl("backward", by_autograd, "Batched")


def _looped(operator: Callable[..., Sequence[Tensor]], arguments: Sequence[Any],
            slices: Sequence[Tensor | None]) -> list[Tensor]:
    """The results of all indices. slices: of a batched argument, along its first dimension."""
    size = max(len(x) for x in slices if x is not None)
    if size == 0:  # a call of zeros tells the shapes, and what has a gradient
        slices = [None if x is None else torch.cat([x, x.new_zeros(1, *x.shape[1:])])
                  for x in slices]
    found = [operator(*(x if along is None else along[min(i, len(along) - 1)]
                        for x, along in zip(arguments, slices))) for i in range(max(size, 1))]
    return [torch.stack(results)[:size] for results in zip(*found)]
