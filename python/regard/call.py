"""From a user's arrays and options to one `_core.Problem`, and the shapes of its results.

Shared by the functions of attention.py and by the operators of the frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import _core
from .errors import InvalidArgument, WrongType, refuse
from .options import checked, unknown_option
from .repair import advised, layout_advice
from .settings import Settings, causal_name, window_pair

# Optional arrays, by the names that users and the binding give them.
EXTRAS = ("bias", "mask", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q",
          "seqused_k")
# Every keyword that says what is computed.
OPTION_NAMES = (*EXTRAS, "layout", *Settings.__dataclass_fields__)


@dataclass
class Call:
    """One problem in a user's terms.

    `read` turns an array and its argument's name into a `_core.Array`.
    """

    q: Any
    k: Any
    v: Any
    extras: Mapping[str, Any]
    settings: Settings
    layout: str
    read: Callable[[Any, str], _core.Array]
    packed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.packed = self.extras.get("cu_seqlens_q") is not None

    def problem(self) -> _core.Problem:
        arrays = {name: self.read(x, name) for name, x in self.extras.items() if x is not None}
        q, k, v = (self.rows(self.read(x, name))
                   for name, x in (("q", self.q), ("k", self.k), ("v", self.v)))
        return _core.Problem(q, k, v, arrays, **self.settings.keywords())

    def rows(self, array: _core.Array) -> _core.Array:
        """As the library has q, k, v, out and their gradients, which follow the layout."""
        return array.swapped(1, 2) if self.layout == "bshd" and not self.packed else array

    def advised(self, error: InvalidArgument, dense: str) -> InvalidArgument:
        """The library's error, with advice where the shapes tell what was meant."""
        shapes = {name: x.shape for name, x in self.extras.items() if hasattr(x, "shape")}
        return advised(error, self.q.shape, self.k.shape, self.v.shape, self.layout, shapes, dense)

    def is_ragged(self) -> bool:
        """Whether rows may lie outside of every sequence."""
        return self.packed or any(self.extras[name] is not None
                                  for name in ("seqused_q", "seqused_k"))

    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    def lse_shape(self) -> tuple[int, ...]:
        """(B, Hq, Sq), whatever the layout; packed (Hq, total_q)."""
        if self.packed:
            return self.q.shape[1], self.q.shape[0]
        heads, length = (2, 1) if self.layout == "bshd" else (1, 2)
        return self.q.shape[0], self.q.shape[heads], self.q.shape[length]


def call_of(q: Any, k: Any, v: Any, read: Callable[[Any, str], _core.Array], *,
            layout: str = "bhsd", causal: Any = False, window: Any = None,
            max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
            **options: Any) -> Call:
    """options: fields of Settings, and EXTRAS. Errors: InvalidArgument, WrongType."""
    extras = {name: options.pop(name, None) for name in EXTRAS}
    for name, value in options.items():
        if name not in Settings.__dataclass_fields__:
            raise unknown_option(name, value, OPTION_NAMES)
    layout = checked("layout", layout)
    packed = extras["cu_seqlens_q"] is not None
    _require_rows({"q": q, "k": k, "v": v}, layout, packed)
    sizes = {"max_seqlen_q": checked("max_seqlen_q", max_seqlen_q),
             "max_seqlen_k": checked("max_seqlen_k", max_seqlen_k)}
    if packed:
        for name, size in sizes.items():
            if size is None:
                raise refuse(name, None, "must be given with cu_seqlens_q: the longest sequence")
        len_q, len_k = sizes["max_seqlen_q"], sizes["max_seqlen_k"]
    else:
        axis = 1 if layout == "bshd" else 2
        len_q, len_k = q.shape[axis], k.shape[axis]
    advice = "" if packed else layout_advice(q.shape, k.shape, v.shape, layout)
    more: dict[str, Any] = {name: checked(name, value) for name, value in options.items()}
    settings = Settings(causal=causal_name(causal, len_q, len_k, advice),
                        window=window_pair(window), max_seqlen_q=sizes["max_seqlen_q"] or 0,
                        max_seqlen_k=sizes["max_seqlen_k"] or 0, **more)
    return Call(q, k, v, extras, settings, layout, read)


def _require_rows(arrays: Mapping[str, Any], layout: str, packed: bool) -> None:
    for name, x in arrays.items():
        shape = getattr(x, "shape", None)
        if shape is None:
            raise refuse(name, f"a {type(x).__name__}", "must be an array", WrongType)
        if len(shape) != (3 if packed else 4):
            wanted = ("3 dimensions, (total, H, D), as cu_seqlens_q is given" if packed else
                      f"4 dimensions, ({', '.join(layout.upper())}), or 3 with cu_seqlens_q")
            raise refuse(name, f"an array of shape {tuple(shape)}", f"must have {wanted}")
