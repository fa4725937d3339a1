"""What a plan remembers: what was made once for it, and the calls that were right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .visibility import plain


class Memo:
    """Tensors and other values by name. A copy in another process begins empty."""

    def __init__(self) -> None:
        self._on_device: dict[Any, Tensor] = {}
        self._values: dict[Any, Any] = {}

    def tensor(self, name: Any, device: Any, make: Callable[[], Tensor]) -> Tensor:
        """What `make` returns, on a device, made once."""
        key = name, str(device)
        if key not in self._on_device:
            self._on_device[key] = plain(lambda: make().to(device))()
        return self._on_device[key]

    def value(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once; not to be changed, and no tensor of a GPU: `tensor`
        copies those when no stream is in between."""
        if key not in self._values:
            self._values[key] = plain(make)()
        return self._values[key]

    def __reduce__(self) -> Any:
        return Memo, ()


class AcceptedCalls:
    """What was made of calls whose arguments were right, by all that their checks depend on. A copy
    in another process begins empty."""

    MOST = 256

    def __init__(self) -> None:
        self._calls: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        """None where there is nothing."""
        return self._calls.get(key)

    def add(self, key: Any, call: Any) -> None:
        if len(self._calls) >= self.MOST:
            self._calls.clear()
        self._calls[key] = call

    def __reduce__(self) -> Any:
        return AcceptedCalls, ()
