"""The options of a direct call, which are parsed once for each combination and kept.

The direct paths of NumPy and PyTorch read arrays in the binding, without the checks whose errors
give advice. A call that they refuse takes the general path, which raises these errors.
"""

from __future__ import annotations

from typing import Any

from . import _core
from .options import ARRAYS, OPTIONS

PLAIN = (bool, int, float, str, tuple, type(None))
NO_ARRAYS: dict[str, Any] = {}
REFUSED = (TypeError, ValueError)  # InvalidArgument and WrongType among them
_ARRAYS = frozenset(ARRAYS)


class KeptOptions(_core.DirectOptions):
    """One combination of options. `checked` are the given ones, in the binding's form."""

    def __init__(self, given: dict[str, Any], equal_heads: bool, made_type: Any, threads: int,
                 backend: str) -> None:
        """made_type: the framework's dtype of out, or None. Errors: TypeError, ValueError."""
        for name, value in given.items():
            if name not in OPTIONS or type(value) not in PLAIN:
                raise TypeError
            if name == "scale" and value == 0:
                raise TypeError  # -0.0 would be found as 0.0
        self.checked = {name: OPTIONS[name].check(name, value) for name, value in given.items()}
        self.layout = self.checked.pop("layout", "bhsd")
        super().__init__(dict(self.checked), self.layout == "bshd", equal_heads, threads, backend,
                         made_type)
        if self.checked.get("causal") is True:
            self.checked["causal"] = "bottom_right"


def separated(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays, and values that may be kept. Errors: TypeError."""
    arrays, values = {}, {}
    for name, value in given.items():
        if name not in _ARRAYS:
            values[name] = value
        elif value is not None:
            arrays[name] = value
    if "window" in values and type(values["window"]) is tuple:
        if not all(type(side) in (int, type(None)) for side in values["window"]):
            raise TypeError  # (1, True) would be found as (1, 1)
    return arrays, values
