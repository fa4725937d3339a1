"""Values of any Python type, checked and made the number, word or pair that the binding takes.

What a number means, and its limits, are the library's to check.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from .errors import WrongType, refuse

Check = Callable[[str, Any], Any]  # of an argument's name and value


def number(argument: str, value: Any) -> float:
    """Errors: WrongType, also for a tensor that requires a gradient, which would be lost here."""
    if type(value) is float:
        return value
    if getattr(value, "requires_grad", False):
        raise refuse(argument, "a tensor that requires grad",
                     f"has no gradient; give a number: float({argument})", WrongType)
    if not isinstance(value, (bool, str)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise refuse(argument, shown(value), "must be a number", WrongType)


def integer(argument: str, value: Any, low: int, high: int) -> int:
    """Errors: WrongType for no integer, InvalidArgument for one outside of [low, high]."""
    if type(value) is not int:
        if isinstance(value, bool) or hasattr(value, "requires_grad"):
            raise refuse(argument, shown(value), "must be an integer", WrongType)
        try:
            value = operator.index(value)
        except (TypeError, ValueError):
            raise refuse(argument, shown(value), "must be an integer", WrongType) from None
    whole: int = value
    if not low <= whole <= high:
        raise refuse(argument, whole, f"must be between {low} and {high}")
    return whole


def for_each(argument: str, value: Any, what: Sequence[str]) -> list[Any]:
    """One number for all of `what`, or a number for each. Errors: WrongType for another count."""
    if not hasattr(value, "__len__") or getattr(value, "shape", None) == ():
        return [value] * len(what)
    if len(value) != len(what):
        raise refuse(argument, value, f"must be an integer, or ({', '.join(what)})", WrongType)
    return list(value)


def flag(argument: str, value: Any) -> bool:
    """A bool of Python or NumPy. Errors: WrongType."""
    if value is True or value is False:
        return value
    if _is_numpy_bool(value):
        return bool(value)
    raise refuse(argument, shown(value), "must be True or False", WrongType)


def text(argument: str, value: Any) -> str:
    """Errors: WrongType."""
    if isinstance(value, str) and value.isprintable():  # neither a zero nor half a surrogate pair
        return value
    raise refuse(argument, shown(value), "must be a string that can be printed", WrongType)


def one_of(*words: str) -> Check:
    """A check for one of these words. Its errors: InvalidArgument."""
    def check(argument: str, value: Any) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise refuse(argument, shown(value), f"must be {' or '.join(map(repr, words))}")

    return check


def optional_number(argument: str, value: Any) -> float | None:
    return None if value is None else number(argument, value)


def length(argument: str, value: Any) -> int:
    """None is 0."""
    return 0 if value is None else integer(argument, value, 0, 2**63 - 1)


def position(argument: str, value: Any) -> int:
    return integer(argument, value, 0, 2**31 - 1)


def word64(argument: str, value: Any) -> int:
    """64 bits as a signed number: PyTorch's schemas and XLA's attributes have no unsigned ones."""
    word = integer(argument, value, 0, 2**64 - 1)
    return word if word < 2**63 else word - 2**64


def seed(argument: str, value: Any) -> Any:
    """A word64; or an array, which is read together with the call's other arrays."""
    # The compiler knows of a symbolic integer that it is one, but not what attributes it lacks.
    is_number = isinstance(value, int) or not hasattr(value, "shape")
    return word64(argument, value) if is_number else value


def causal(argument: str, value: Any) -> str | bool:
    """The alignment of the diagonal; or True, whose alignment depends on the lengths."""
    if value is None or value is False:
        return "none"
    if value is True or (isinstance(value, str) and value in ("none", "top_left", "bottom_right")):
        return value
    if _is_numpy_bool(value):
        return True if value else "none"
    raise refuse(argument, shown(value),
                 "must be False, True, 'none', 'top_left' or 'bottom_right'")


def window(argument: str, value: Any) -> tuple[int, int]:
    """Keys to the left and to the right of the diagonal; -1 is unbounded."""
    if value is None:
        return -1, -1
    sides: Any = (value, value)
    if isinstance(value, (tuple, list)) or len(getattr(value, "shape", ())) > 0:
        sides = tuple(value)
    if len(sides) != 2:
        raise refuse(argument, shown(value), "must be None, a number of keys, or a pair of these")
    left, right = (-1 if size is None else integer(argument, size, -1, 2**63 - 1)
                   for size in sides)
    return left, right


def as_given(argument: str, value: Any) -> Any:
    """An array, which is checked when it is read."""
    return value


def run_options(threads: Any, backend: Any) -> dict[str, Any]:
    """Where a call runs, as keywords of the binding. Errors: InvalidArgument, WrongType."""
    return {"threads": integer("threads", threads, 0, 2**31 - 1),
            "backend": text("backend", backend)}


def shown(value: Any) -> str:
    """A value in an error's text: short, whatever it is."""
    if hasattr(value, "shape"):
        return f"a {class_name(value)} of shape {tuple(value.shape)}"
    return reprlib.repr(value)


def class_name(x: object) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _is_numpy_bool(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
