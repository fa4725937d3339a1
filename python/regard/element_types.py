"""Which element types an argument may have, and what to do with an array of another one."""

from __future__ import annotations

from typing import Any

from .errors import Error, WrongType, refuse
from .settings import TYPE_NAMES

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ALLOWED = {
    "mask": ("bool",), "keep": ("bool",),
    "alibi_slopes": ("float32",), "sink": ("float32",), "dsink": ("float32",),
    "cu_seqlens_q": ("int32",), "cu_seqlens_k": ("int32",),
    "seqused_q": ("int32",), "seqused_k": ("int32",),
    "lse": ("float32", "float64"), "dlse": ("float32", "float64"),
}
_CASTS = {"numpy": ".astype(np.{})", "cupy": ".astype(cupy.{})", "jax": ".astype(jnp.{})",
          "jaxlib": ".astype(jnp.{})", "torch": ".to(torch.{})", "ml_dtypes": ".astype(np.{})"}


_TYPES = {argument: frozenset(TYPE_NAMES[name] for name in names)
          for argument, names in _ALLOWED.items()}
_FLOAT_TYPES = frozenset(TYPE_NAMES[name] for name in _FLOATS)


def allowed_types(argument: str) -> frozenset[str]:
    """"f32" and so on."""
    return _TYPES.get(argument, _FLOAT_TYPES)


def element_type(x: Any, argument: str) -> str:
    """"f32" of an array of float32. Errors: WrongType for what the argument cannot hold."""
    dtype = getattr(x.dtype, "name", None) or str(x.dtype).rpartition(".")[2]
    type = TYPE_NAMES.get(dtype, "")
    if type not in allowed_types(argument):
        raise wrong_element_type(x, argument)
    if getattr(x.dtype, "isnative", True) is False:
        raise refuse(argument, f"{x.dtype.str} {list(x.shape)}",
                     "must have this machine's byte order: "
                     f"{argument}.astype({argument}.dtype.newbyteorder('='))", WrongType)
    return type


def wrong_element_type(x: Any, argument: str) -> Error:
    """The refusal, with the expression that makes what is wanted where there is one."""
    dtype = str(x.dtype).rpartition(".")[2]
    allowed = _ALLOWED.get(argument, _FLOATS)
    if len(allowed) > 1:
        reason = f"must hold {', '.join(allowed[:-1])} or {allowed[-1]}"
    elif allowed == ("bool",):
        reason = f"must be bool: {argument} != 0"
        if dtype in _FLOATS:
            reason += "; what is added to the scores is the bias"
    else:
        package = type(x).__module__.partition(".")[0]
        reason = f"must be {allowed[0]}: {argument}{_CASTS.get(package, ' as {}').format(*allowed)}"
    return refuse(argument, f"{dtype} {list(x.shape)}", reason, WrongType)
