"""The options of a call, checked and in the form that the binding takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Union

from .errors import WrongType, refuse
from .options import integer, is_numpy_bool, shown

Causal = Union[bool, Literal["none", "top_left", "bottom_right"]]
Window = Union[None, int, tuple[Union[int, None], Union[int, None]]]
Precision = Literal["full", "tf32", "bf16"]
Layout = Literal["bhsd", "bshd"]

TYPES = ("f64", "f32", "f16", "bf16")
# Element types by the names that frameworks give them.
TYPE_NAMES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
              "bool": "bool", "int32": "i32"}


@dataclass(frozen=True)
class Settings:
    """What is computed, beside the arrays. Fields mean what docs/semantics.md says."""

    scale: float | None = None
    softcap: float = 0.0
    causal: str = "none"
    window: tuple[int, int] = (-1, -1)
    dropout_p: float = 0.0
    dropout_seed: int = 0
    dropout_offset: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    precision: str = "full"
    deterministic: bool = False

    def keywords(self) -> dict[str, Any]:
        """As `_core.Problem` takes them."""
        return dict(self.__dict__)


def causal_name(causal: Causal, len_q: int, len_k: int, advice: str = "") -> str:
    """True is "the" causal mask only where all conventions agree: for as many queries as keys.

    advice: what to add to the refusal of True, where the lengths are not what the caller thinks.
    """
    if causal is None or causal is False:
        return "none"
    if causal is True:
        if len_q != len_k:
            raise refuse("causal", True, f"with {len_q} queries and {len_k} keys say 'top_left' "
                         "(query i sees keys up to i) or 'bottom_right' (the last query sees all)"
                         + advice)
        return "bottom_right"
    if isinstance(causal, str) and causal in ("none", "top_left", "bottom_right"):
        return causal
    if is_numpy_bool(causal):
        return causal_name(bool(causal), len_q, len_k, advice)
    raise refuse("causal", shown(causal),
                 "must be False, True, 'none', 'top_left' or 'bottom_right'")


def window_pair(window: Window) -> tuple[int, int]:
    """None is unbounded, on one side or both; one number bounds both sides."""
    if window is None:
        return -1, -1
    sides: Any = (window, window)
    if not isinstance(window, (int, str)):
        try:
            sides = tuple(window)
        except TypeError:
            pass
    if len(sides) != 2:
        raise refuse("window", shown(window), "must be None, a number of keys, or a pair of these")
    left, right = sides
    return _side(left), _side(right)


def _side(size: Any) -> int:
    return -1 if size is None else integer("window", size, -1, 2**63 - 1)


def type_name(argument: str, dtype: object) -> str:
    """"f32" of "f32", "float32", numpy.float32, torch.float32, ..."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = str(name).rsplit(".", 1)[-1]
    name = TYPE_NAMES.get(name, name)
    if name not in TYPES:
        raise refuse(argument, shown(dtype), "must be float64, float32, float16 or bfloat16",
                     WrongType)
    return name
