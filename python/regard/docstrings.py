"""Fills docstrings and signatures from the table of options.

In a docstring, the line `{softcap}` becomes the description of that argument, `{options}` the
descriptions of all options that the docstring does not describe itself, and `{sdpa_options}` those
of the options in SdpaOptions.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from inspect import Parameter
from typing import Any, TypeVar

from .options import OPTIONS, SDPA_OPTIONS, TYPES

ARGUMENTS = {name: option.text for name, option in OPTIONS.items()} | {
    "q": '(B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd", or packed (total_q, Hq, D) with '
         "cu_seqlens_q; float64, float32, float16 or bfloat16; any strides, the last one 1.",
    "k": "(B, Hkv, Sk, D), in the layout and type of q; Hq is a multiple of Hkv, and consecutive "
         "query heads share one head of k and v.",
    "v": "(B, Hkv, Sk, Dv), in the layout and type of q.",
    "return_lse": "True: also return lse, the natural logarithm of the denominator of each row's "
                  "softmax.",
    "out_type": '"float32" gives a float32 out for float16 and bfloat16 inputs.',
    "multiprocessors": "the number of the GPU's multiprocessors that kernels may occupy, so that "
                       "others run at the same time; 0 is all. It limits Hopper's main kernels. "
                       "`attention` takes it together with out.",
    "threads": "of the CPU; 0 is the framework's own for arrays of PyTorch and JAX, and every core for "
               "others.",
    "backend": '"" chooses; otherwise one of `regard.info().backends`.',
    "dout": "the gradient with respect to out; as out, or float32.",
    "out": "as `attention` returned it.",
    "lse": "as `attention` returned it with return_lse=True.",
    "dlse": "the gradient with respect to lse; as lse; None is zero.",
    "gradients": 'which ones to compute, of "dq", "dk", "dv", "dbias" and "dsink"; None is all '
                 "that exist.",
    "gradient_type": '"float32" gives float32 results for float16 and bfloat16 inputs.',
}
SECTIONS = {
    "results": """\
out, (B, Hq, Sq, Dv) in q's layout; or (out, lse), where lse is (B, Hq, Sq), packed (Hq, total_q), \
and float32 (float64 for float64 inputs). A row that sees no key has out 0, and lse -inf or its \
sink; a row past the end of its sequence has out 0 and lse -inf.""",
    "errors": """\
InvalidArgument (a ValueError), WrongType (a TypeError), Unsupported, Unavailable, OutOfMemory or \
DeviceFailure; each names the argument and its value.""",
}

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def documented(function: FunctionT) -> FunctionT:
    """Fills the docstring, and shows the options in the signature instead of **options."""
    signature = inspect.signature(function)
    own = dict(signature.parameters)
    rows = {"options": OPTIONS, "extensions": SDPA_OPTIONS}.get([*own][-1], {})
    if rows:
        own.popitem()
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=row.default, annotation=TYPES[name])
               for name, row in rows.items() if name not in own]
    by_kind = sorted([*options, *own.values()], key=lambda one: one.kind)
    function.__signature__ = signature.replace(parameters=by_kind)  # type: ignore[attr-defined]
    function.__doc__ = function.__doc__ and filled(function.__doc__)
    return function


def filled(text: str) -> str:
    """A docstring with its placeholders replaced."""
    described = {name for names in re.findall(r"^ *(\w+(?:, \w+)*): ", text, re.MULTILINE)
                 for name in names.split(", ")}
    lists = {"options": OPTIONS, "sdpa_options": SDPA_OPTIONS}

    def replace(match: re.Match[str]) -> str:
        indent, name = match.groups()
        if name in SECTIONS:
            return _wrapped(SECTIONS[name], indent, indent)
        names = [one for one in lists.get(name, ()) if one not in described] or [name]
        return "\n".join(_wrapped(f"{one}: {ARGUMENTS[one]}", indent, indent + "    ")
                         for one in names)

    return re.sub(r"^( *)\{(\w+)\}$", replace, text, flags=re.MULTILINE)


def _wrapped(text: str, first: str, others: str) -> str:
    return textwrap.fill(text, 100, initial_indent=first, subsequent_indent=others)
