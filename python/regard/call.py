"""From a user's arrays and options to one `_core.Problem`, and the shapes of its results.

Shared by the functions of attention.py and by the operators of the frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import _core
from .errors import WrongType, refuse
from .settings import Settings, causal_name, window_pair

# Optional arrays, by the names that users and the binding give them.
EXTRAS = ("bias", "mask", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q",
          "seqused_k")
LAYOUTS = ("bhsd", "bshd")


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
        return _core.Problem(self.rows(self.q, "q"), self.rows(self.k, "k"), self.rows(self.v, "v"),
                             arrays, **self.settings.keywords())

    def rows(self, x: Any, argument: str) -> _core.Array:
        """q, k, v, out and their gradients, which follow the layout."""
        array = self.read(x, argument)
        return array.swapped(1, 2) if self.layout == "bshd" and not self.packed else array

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
    if layout not in LAYOUTS:
        raise refuse("layout", repr(layout), "must be 'bhsd' or 'bshd'")
    packed = extras["cu_seqlens_q"] is not None
    for name, x in (("q", q), ("k", k), ("v", v)):
        shape = getattr(x, "shape", None)
        if shape is None:
            raise refuse(name, f"a {type(x).__name__}", "must be an array", WrongType)
        if len(shape) != (3 if packed else 4):
            wanted = ("3 dimensions, (total, H, D), as cu_seqlens_q is given" if packed else
                      f"4 dimensions, ({', '.join(layout.upper())}), or 3 with cu_seqlens_q")
            raise refuse(name, f"an array of shape {tuple(shape)}", f"must have {wanted}")
    if packed:
        if max_seqlen_q is None or max_seqlen_k is None:
            missing = "max_seqlen_q" if max_seqlen_q is None else "max_seqlen_k"
            raise refuse(missing, None, "must be given with cu_seqlens_q: the longest sequence")
        lengths = max_seqlen_q, max_seqlen_k
    else:
        axis = 1 if layout == "bshd" else 2
        lengths = q.shape[axis], k.shape[axis]
    settings = Settings(causal=causal_name(causal, *lengths), window=window_pair(window),
                        max_seqlen_q=max_seqlen_q or 0, max_seqlen_k=max_seqlen_k or 0, **options)
    return Call(q, k, v, extras, settings, layout, read)
