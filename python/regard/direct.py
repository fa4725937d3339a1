"""`regard.attention` of NumPy's arrays: one call of the binding, which reads them by their array
interface. What is not a plain array in this machine's byte order takes the general path."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from . import _core
from .checks import run_options
from .element_types import NAMES, type_name
from .kept_options import NO_ARRAYS, REFUSED, KeptOptions, separated


@lru_cache(maxsize=1)
def _numpy() -> Any:
    """The binding's side; made when the first array of NumPy has come."""
    import numpy

    dtypes = {short: numpy.dtype(NAMES[short]) for short in ("f64", "f32", "f16")}
    return _core.DirectNumPy({"ndarray": numpy.ndarray, "empty": numpy.empty, **dtypes})


@lru_cache(maxsize=1024, typed=True)
def _options(out_type: Any, threads: Any, backend: Any, **given: Any) -> KeptOptions:
    import numpy

    type_ = None
    if out_type is not None:
        short = type_name("out_type", out_type)
        if short == "bf16":
            raise TypeError  # a type of ml_dtypes
        type_ = numpy.dtype(NAMES[short])
    where = run_options(threads, backend)
    return KeptOptions(given, False, type_, where["threads"], where["backend"])


def attention(q: Any, k: Any, v: Any, given: dict[str, Any], return_lse: Any, out_type: Any,
              threads: Any, backend: Any) -> Any:
    """The result; or None where the general path must take the call."""
    try:
        arrays, values = separated(given) if given else (NO_ARRAYS, given)
        return _numpy().forward(_options(out_type, threads, backend, **values), q, k, v, arrays,
                                return_lse)
    except REFUSED:
        return None
