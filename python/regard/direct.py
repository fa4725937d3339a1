"""`regard.attention` of NumPy's and CuPy's arrays: one call of the binding, which reads them by their
own interfaces. What is not a plain array in this machine's byte order takes the general path, and
so do CuPy's arrays of a device that is not current."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from . import _core
from .checks import run_options
from .element_types import NAMES, type_name
from .kept_options import NO_ARRAYS, REFUSED, KeptOptions, separated


@lru_cache(maxsize=2)
def _framework(name: str) -> _core.DirectArrays:
    """The binding's side of `numpy` or `cupy`; made when the first of its arrays has come."""
    import numpy

    names = {"f64": "float64", "f32": "float32", "f16": "float16", "boolean": "bool", "i32": "int32"}
    dtypes = {short: numpy.dtype(name) for short, name in names.items()}
    if name == "numpy":
        return _core.DirectNumPy({"ndarray": numpy.ndarray, "empty": numpy.empty, **dtypes})
    cupy: Any = importlib.import_module("cupy")
    return _core.DirectCuPy({
        "ndarray": cupy.ndarray, "empty": cupy.empty, "device": cupy.cuda.runtime.getDevice,
        "stream": lambda: cupy.cuda.get_current_stream().ptr, **dtypes})


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
    """The result; or None where the general path must take the call. q: of NumPy or CuPy."""
    try:
        arrays, values = separated(given) if given else (NO_ARRAYS, given)
        return _framework(q.__class__.__module__).forward(
            _options(out_type, threads, backend, **values), q, k, v, arrays, return_lse)
    except REFUSED:
        return None
