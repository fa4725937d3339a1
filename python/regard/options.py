"""One option of a call: its Python type checked, and made the number or word that the binding takes.

Any type may arrive here. What a number means, and its limits, are the library's to check.
"""

from __future__ import annotations

import difflib
import operator
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

from .errors import Error, WrongType, refuse

PRECISIONS = ("full", "tf32", "bf16")
LAYOUTS = ("bhsd", "bshd")


def number(argument: str, value: Any) -> float:
    """Errors: WrongType, also for a tensor with a gradient, which would be lost here."""
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
        except TypeError:
            raise refuse(argument, shown(value), "must be an integer", WrongType) from None
    whole: int = value
    if not low <= whole <= high:
        raise refuse(argument, whole, f"must be between {low} and {high}")
    return whole


def flag(argument: str, value: Any) -> bool:
    """A bool, NumPy's included. Errors: WrongType."""
    if value is True or value is False:
        return value
    if is_numpy_bool(value):
        return bool(value)
    raise refuse(argument, shown(value), "must be True or False", WrongType)


def is_numpy_bool(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def one_of(argument: str, value: Any, words: Iterable[str]) -> str:
    """Errors: InvalidArgument."""
    if isinstance(value, str) and value in words:
        return value
    raise refuse(argument, shown(value), f"must be {' or '.join(map(repr, words))}")


def text(argument: str, value: Any) -> str:
    """Errors: WrongType."""
    if isinstance(value, str):
        return value
    raise refuse(argument, shown(value), "must be a string", WrongType)


def _or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda argument, value: None if value is None else check(argument, value)


def _size(argument: str, value: Any) -> int:
    return integer(argument, value, 0, 2**63 - 1)


def _word(argument: str, value: Any) -> int:
    return integer(argument, value, 0, 2**64 - 1)


# What a call takes beside arrays, causal, window and types.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "scale": _or_none(number),
    "softcap": number,
    "dropout_p": number,
    "dropout_seed": _word,
    "dropout_offset": _word,
    "max_seqlen_q": _or_none(_size),
    "max_seqlen_k": _or_none(_size),
    "layout": lambda argument, value: one_of(argument, value, LAYOUTS),
    "precision": lambda argument, value: one_of(argument, value, PRECISIONS),
    "deterministic": flag,
    "return_lse": flag,
    "accumulate": flag,
    "backward": flag,
    "show": flag,
    "threads": lambda argument, value: integer(argument, value, 0, 2**31 - 1),
    "backend": text,
}


def checked(argument: str, value: Any) -> Any:
    """The value as the binding takes it. Errors: InvalidArgument, WrongType."""
    return CHECKS[argument](argument, value)


def unknown_option(name: str, value: Any, known: Iterable[str]) -> Error:
    """The error for a keyword that no call has."""
    near = difflib.get_close_matches(name, list(known), 1)
    return refuse(name, shown(value), "is no option of attention" +
                  (f"; did you mean {near[0]}?" if near else ""), WrongType)


def shown(value: Any) -> str:
    """A value in an error's text: short, whatever it is."""
    if hasattr(value, "shape"):
        return f"a {class_name(value)} of shape {tuple(value.shape)}"
    return reprlib.repr(value)


def class_name(x: object) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
