"""Element types: their names, which ones an argument may have, and the error for another one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .checks import shown
from .errors import Error, WrongType, refuse
from .options import FLOATS, OPTIONS

# The library's names by those that frameworks use, and back.
TYPE_NAMES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
              "bool": "bool", "int32": "i32"}
NAMES = {short: name for name, short in TYPE_NAMES.items()}
_SUMS = ("float32", "float64")
_ALLOWED = {name: option.types for name, option in OPTIONS.items()} | {
    "keep": ("bool",), "dsink": ("float32",), "lse": _SUMS, "dlse": _SUMS}
_CASTS = {"numpy": ".astype(np.{})", "cupy": ".astype(cupy.{})", "jax": ".astype(jnp.{})",
          "jaxlib": ".astype(jnp.{})", "torch": ".to(torch.{})", "ml_dtypes": ".astype(np.{})"}


_TYPES = {argument: frozenset(TYPE_NAMES[name] for name in names)
          for argument, names in _ALLOWED.items()}
_FLOAT_TYPES = frozenset(TYPE_NAMES[name] for name in FLOATS)


def allowed_types(argument: str) -> frozenset[str]:
    """"f32" and so on."""
    return _TYPES.get(argument, _FLOAT_TYPES)


def type_name(argument: str, dtype: object) -> str:
    """"f32" of "f32", "float32", numpy.float32, torch.float32, ... Errors: WrongType."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = str(name).rsplit(".", 1)[-1]
    name = TYPE_NAMES.get(name, name)
    if name not in _FLOAT_TYPES:
        raise refuse(argument, shown(dtype), "must be float64, float32, float16 or bfloat16",
                     WrongType)
    return name


def result_type(argument: str, dtype: object, array: str, own: str) -> str:
    """"f32" and so on of a result whose type the caller gives: float32, or that of `array`, `own`.
    Errors: WrongType; InvalidArgument for another one."""
    type = type_name(argument, dtype)
    if type not in (own, "f32"):
        raise refuse(argument, NAMES[type],
                     f"must be float32 or {array}'s type, {NAMES.get(own, own)}")
    return type


def element_type(x: Any, argument: str) -> str:
    """"f32" of an array of float32. Errors: WrongType for what the argument cannot hold."""
    type = _type_of(x.dtype)
    if type not in allowed_types(argument):
        raise wrong_element_type(x, argument)
    refuse_foreign(x, argument)
    return type


def refuse_foreign(x: Any, argument: str) -> None:
    """Errors: WrongType for an array of NumPy in another machine's byte order."""
    if getattr(x.dtype, "isnative", True) is False:
        raise refuse(argument, f"{x.dtype.str} {list(x.shape)}",
                     "must have this machine's byte order: "
                     f"{argument}.astype({argument}.dtype.newbyteorder('='))", WrongType)


@lru_cache(maxsize=64)  # NumPy takes two microseconds to make the name
def _type_of(dtype: Any) -> str:
    return TYPE_NAMES.get(getattr(dtype, "name", None) or str(dtype).rpartition(".")[2], "")


def wrong_element_type(x: Any, argument: str) -> Error:
    """The error, with an expression that converts the array where there is one."""
    dtype = str(x.dtype).rpartition(".")[2]
    allowed = _ALLOWED.get(argument, FLOATS)
    if len(allowed) > 1:
        reason = f"must hold {', '.join(allowed[:-1])} or {allowed[-1]}"
    elif allowed == ("bool",):
        reason = f"must be bool: {argument} != 0"
        if dtype in FLOATS:
            reason += "; what is added to the scores is the bias"
    else:
        package = type(x).__module__.partition(".")[0]
        reason = f"must be {allowed[0]}: {argument}{_CASTS.get(package, ' as {}').format(*allowed)}"
    return refuse(argument, f"{dtype} {list(x.shape)}", reason, WrongType)
