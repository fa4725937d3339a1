"""Both passes of NumPy's and CuPy's arrays: one call of the binding, which reads them by their own
interfaces. What is not a plain array in this machine's byte order takes the general path, and so do
CuPy's arrays of a device that is not current."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from . import _core
from .checks import run_options
from .element_types import NAMES, type_name
from .gradients import GRADIENTS, Gradients
from .kept_options import NO_ARRAYS, REFUSED, KeptOptions, separated

FRAMEWORKS = ("numpy", "cupy")  # the modules of the arrays' classes


@lru_cache(maxsize=2)
def _framework(name: str) -> _core.DirectArrays:
    """The binding's side of `numpy` or `cupy`; made when the first of its arrays has come."""
    import numpy

    names = {"f64": "float64", "f32": "float32", "f16": "float16", "boolean": "bool", "i32": "int32"}
    dtypes = {short: numpy.dtype(name) for short, name in names.items()}
    if name == "numpy":
        return _core.DirectNumPy(
            {"ndarray": numpy.ndarray, "empty": numpy.empty, "zeros": numpy.zeros, **dtypes})
    cupy: Any = importlib.import_module("cupy")
    return _core.DirectCuPy({
        "ndarray": cupy.ndarray, "empty": cupy.empty, "zeros": cupy.zeros,
        "device": cupy.cuda.runtime.getDevice,
        "stream": lambda: cupy.cuda.get_current_stream().ptr, **dtypes})


@lru_cache(maxsize=1024, typed=True)
def _options(made_type: Any, multiprocessors: Any, threads: Any, backend: Any, **given: Any
             ) -> KeptOptions:
    """made_type: of out, or of gradients. Errors: TypeError, ValueError."""
    import numpy

    if type(multiprocessors) is not int or multiprocessors != 0 or type(threads) is not int:
        raise TypeError
    if not isinstance(made_type, (str, type, numpy.dtype, type(None))):
        raise TypeError  # what may say something else the next time
    type_ = None
    if made_type is not None:
        short = type_name("out_type", made_type)
        if short == "bf16":
            raise TypeError  # a type of ml_dtypes
        type_ = numpy.dtype(NAMES[short])
    where = run_options(threads, backend)
    return KeptOptions(given, False, type_, where["threads"], where["backend"])


def attention(q: Any, k: Any, v: Any, given: dict[str, Any], out: Any, lse: Any, return_lse: Any,
              continue_from: Any, out_type: Any, multiprocessors: Any, threads: Any,
              backend: Any) -> Any:
    """The result; or None where the general path must take the call. q: of one of FRAMEWORKS."""
    try:
        arrays, values = separated(given) if given else (NO_ARRAYS, given)
        return _framework(q.__class__.__module__).forward(
            _options(out_type, multiprocessors, threads, backend, **values), q, k, v, arrays, out,
            lse, return_lse, continue_from)
    except REFUSED:
        return None


def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any,
                       given: dict[str, Any], dlse: Any, delta: Any, gradients: Any,
                       gradient_type: Any, into: Any, accumulate: Any, multiprocessors: Any,
                       threads: Any, backend: Any) -> Gradients | None:
    """As `attention`."""
    try:
        arrays, values = separated(given) if given else (NO_ARRAYS, given)
        return Gradients(*_framework(q.__class__.__module__).backward(
            _options(gradient_type, multiprocessors, threads, backend, **values), q, k, v, arrays,
            dout, out, lse, dlse, delta, _wanted(gradients, into, arrays), into is not None,
            accumulate))
    except REFUSED:
        return None


def _wanted(gradients: Any, into: Any, arrays: dict[str, Any]) -> tuple[Any, ...]:
    """For each gradient the array of `into`, or True for a new one; None where it is not wanted.
    Errors: TypeError, ValueError."""
    if into is None:
        found: tuple[Any, ...] = (True, True, True, True if "bias" in arrays else None,
                                  True if "sink" in arrays else None)
    elif type(into) is Gradients:
        found = into.dq, into.dk, into.dv, into.dbias, into.dsink
    else:
        raise TypeError
    if gradients is None:
        return found
    if type(gradients) not in (tuple, list):
        raise TypeError  # an iterator can be read once only
    wanted: list[Any] = [None] * len(GRADIENTS)
    for name in gradients:
        if not isinstance(name, str):  # an array of one name is equal to it
            raise TypeError
        place = GRADIENTS.index(name)
        if found[place] is None:
            raise ValueError
        wanted[place] = found[place]
    return tuple(wanted)
