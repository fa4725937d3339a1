"""`regard.check`: the results of one call compared with float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .attention import attention, attention_backward
from .arrays import framework_of, view
from .call import Call, call_of
from .checks import flag
from .docstrings import documented
from .errors import refuse
from .exact import Exact, Space
from .gradients import GRADIENTS
from .mask_options import resolved
from .typing import Array, AttentionOptions

if TYPE_CHECKING:
    from .typing import Unpack

# (factor, units): the largest error of an output may be `factor` times the error of the unfused
# computation plus `units` roundings of the largest result. Gradients may also be off by the rounding
# of the lse, which is that of every weight of a row. For float64, where the reference itself is
# rounded, _LIMIT_F64 holds instead: of the largest result, or of what inputs of this size can sum to.
_FACTORS = {"out": (2, 4), "lse": (2, 8)}
_FACTORS_OF_GRADIENTS = (3, 6)
_ROUNDING = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
_STEP = {"f64": 2.0**-1074, "f32": 2.0**-125, "f16": 2.0**-24, "bf16": 2.0**-125}  # without subnormals
_LIMIT_F64 = 1e-12


@dataclass(frozen=True)
class CheckedOutput:
    """One result: its errors, the error of an unfused computation in the same type, the verdict.

    error and unfused are the largest absolute differences from float64. relative is the norm of the
    difference over the norm of the float64 result. Both are inf where a NaN or an infinity is in
    the wrong place. For float64, unfused is 0, because the reference is the unfused computation.
    """

    name: str
    type: str
    error: float
    relative: float
    unfused: float
    right: bool


@dataclass(frozen=True)
class Check:
    """The verdict of `check`; print it. It is true if every output is right."""

    call: str
    outputs: tuple[CheckedOutput, ...]

    @property
    def right(self) -> bool:
        return all(output.right for output in self.outputs)

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        rows = [("output", "type", "max error", "relative", "max error, unfused", "verdict")]
        rows += [(x.name, x.type, f"{x.error:.2e}", f"{x.relative:.2e}",
                  "-" if x.type == "f64" else f"{x.unfused:.2e}",
                  "right" if x.right else "WRONG") for x in self.outputs]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip()
                 for row in rows]
        return "\n".join([self.call, *lines])


@documented
def check(q: Array, k: Array, v: Array, *, backward: bool = False, dout: Array | None = None,
          dlse: Array | None = None, out_type: Any = None, threads: int = 0, backend: str = "",
          show: bool = True, **options: Unpack[AttentionOptions]) -> Check:
    """Runs this very call, and compares its results with the definition in float64.

    The definition is computed with NumPy on the CPU, or with PyTorch or CuPy on the device of q. It
    takes a block of rows at a time: memory stays linear in the sequence, and the time is the time
    of plain matrix products. The same code in q's type, with every matrix rounded to it, gives the
    error of an unfused computation.

    Args:
        q, k, v, out_type, threads, backend, **options: as `attention`; finite values.
        backward: True: also every gradient.
        dout: the gradient with respect to out; None is random numbers. With it, backward is True.
        {dlse}
        show: print the table.

    Returns:
        Check: true if every output is right: its largest and its relative error are at most twice
        the errors of the unfused computation (for gradients three times), plus a few roundings of
        the result and, for gradients, of the sum of its terms' absolute values.

    Raises:
        as `attention`; InvalidArgument for NaN or infinity in q, k, v or dout.
    """
    backward = flag("backward", backward) or dout is not None
    framework = framework_of(q, "q")
    q, k, v = (_without_gradient(x) for x in (q, k, v))
    given = {name: _without_gradient(x) for name, x in resolved(q, k, {**options}).items()}
    call = call_of(q, k, v, view, given)
    space = Space(q)
    where: dict[str, Any] = {"threads": threads, "backend": backend}
    out, lse = attention(q, k, v, return_lse=True, out_type=out_type, **where, **given)
    found = {"out": out, "lse": lse}
    if backward:
        dout = _random_like(out, space) if dout is None else dout
        gradients = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **where, **given)
        found |= {name: getattr(gradients, name) for name in GRADIENTS
                  if getattr(gradients, name) is not None}
    finite = {"q": q, "k": k, "v": v} | ({"dout": dout} if backward else {})
    for name, x in finite.items():
        if not bool(space.xp.isfinite(space.cast(space.here(x), "f64")).all()):
            raise refuse(name, "an array with NaN or infinity", "must be finite to be compared")
    result = Check(_title(call, framework.name), _judged(call, space, found, dout, dlse))
    if flag("show", show):
        print(result)
    return result


def _without_gradient(x: Any) -> Any:
    return x.detach() if hasattr(x, "detach") else x


def _title(call: Call, framework: str) -> str:
    shapes = ", ".join(f"{name} {list(x.shape)}"
                       for name, x in (("q", call.q), ("k", call.k), ("v", call.v)))
    array = call.read(call.q, "q")
    return f"attention of {array.type} {shapes}, {framework} on {array.device}"


def _judged(call: Call, space: Space, found: dict[str, Any], dout: Any, dlse: Any
            ) -> tuple[CheckedOutput, ...]:
    type = call.read(call.q, "q").type
    definition = Exact(call, space, dout if "dq" in found else None, dlse, with_terms=True)
    exact = definition.run()
    unfused = Exact(call, space, definition.dout, dlse, work="f64" if type == "f64" else "f32",
                    rounded=_rounding(space, type, call.options["precision"])).run()
    sizes = _sizes(call, space, definition.dout, dlse) if type == "f64" else {}
    rounded_lse = 0.0 if type == "f64" else _ROUNDING["f32"] * _largest(space, exact["lse"])
    noises = {name: _noise(name, type, call, _largest(space, x))
              for name, x in definition.terms.items()}
    return tuple(_compared(name, space, x, exact[name], unfused[name], noises.get(name, 0.0),
                           sizes.get(name), 0.0 if name in _FACTORS else rounded_lse)
                 for name, x in found.items())


def _noise(name: str, type: str, call: Call, terms: float) -> float:
    """What rounding may leave of a gradient whose terms cancel, such as those of a single key: the
    arithmetic's, and in sums of few elements that of the type, because the error of an unfused
    computation may be small there by luck. terms: the sum of their absolute values."""
    noise = _ROUNDING["f64" if type == "f64" else "f32"] * terms
    shape = call.options["sink"].shape if name == "dsink" else ()
    if name == "dbias":
        shape = tuple(call.options["bias"].shape)[:-1]
    if name in ("dsink", "dbias"):
        rows = math.prod(call.q.shape[:-1]) / max(1, math.prod(shape))  # that an element sums
        noise += _ROUNDING[type] * terms * 2 / max(1.0, rows * call.v.shape[-1]) ** 0.5
    return noise


def _largest(space: Space, x: Any) -> float:
    """The largest finite absolute value; 0 of no elements."""
    finite = space.xp.where(space.xp.isfinite(x), x, 0.0)
    return float(abs(finite).max()) if math.prod(x.shape) else 0.0


def _sizes(call: Call, space: Space, dout: Any, dlse: Any) -> dict[str, float]:
    """What a term of each result can be at most, from the largest elements of the inputs."""
    def size(x: Any) -> float:
        return 0.0 if x is None else _largest(space, space.cast(space.here(x), "f64"))

    q, k, v = size(call.q), size(call.k), size(call.v)
    scale = call.options["scale"]
    scale = call.q.shape[-1] ** -0.5 if scale is None else abs(scale)
    dscore = 2 * call.v.shape[-1] * size(dout) * v + size(dlse)
    return {"out": v, "lse": 1.0, "dq": scale * dscore * k, "dk": scale * dscore * q,
            "dv": size(dout), "dbias": dscore, "dsink": dscore}


def _rounding(space: Space, type: str, precision: str) -> Callable[[Any], Any]:
    """Rounds each intermediate matrix to q's type; float32 as tensor cores do with `precision`."""
    if type in ("f64", "f32") and precision == "full":
        return lambda x: x
    if type == "f32" and precision == "tf32":
        def to_tf32(x: Any) -> Any:
            mantissa, exponent = space.xp.frexp(x)
            return space.xp.ldexp(space.xp.round(mantissa * 2048) / 2048, exponent)

        return to_tf32
    narrow = "bf16" if type == "f32" else type
    return lambda x: space.cast(space.cast(x, narrow), "f32")


def _compared(name: str, space: Space, found: Any, exact: Any, unfused: Any, noise: float,
              size: float | None, rounded_lse: float) -> CheckedOutput:
    """noise: an absolute error that each element may have. size: of a term, for float64."""
    own = view(found, name).type
    got = space.cast(space.here(found), "f64")
    unfused = space.cast(space.cast(unfused, own), "f64")  # as it would be stored
    error, norm = _errors(space, got, exact)
    unfused_error, unfused_norm = _errors(space, unfused, exact)
    largest, whole = _largest(space, exact), _norm(space, exact)
    if own == "f64" and size is not None:
        right = error <= _LIMIT_F64 * max(size, largest)
    else:
        factor, units = _FACTORS.get(name, _FACTORS_OF_GRADIENTS)
        unit, noise = units * _ROUNDING[own] + rounded_lse, units * (noise + _STEP[own])
        right = (error <= factor * unfused_error + unit * largest + noise and
                 norm <= factor * unfused_norm + unit * whole + noise * math.prod(exact.shape) ** 0.5)
    return CheckedOutput(name, own, error, norm / whole if whole else norm, unfused_error, right)


def _errors(space: Space, found: Any, exact: Any) -> tuple[float, float]:
    """The largest absolute difference, and the norm of the difference."""
    xp = space.xp
    if not math.prod(exact.shape):
        return 0.0, 0.0
    finite = xp.isfinite(exact)
    if not bool(xp.where(finite, xp.isfinite(found), found == exact).all()):
        return math.inf, math.inf
    difference = xp.where(finite, found, 0.0) - xp.where(finite, exact, 0.0)
    return float(abs(difference).max()), _norm(space, difference)


def _norm(space: Space, x: Any) -> float:
    """Of the finite elements."""
    return math.sqrt(float((space.xp.where(space.xp.isfinite(x), x, 0.0) ** 2).sum()))


def _random_like(out: Any, space: Space) -> Any:
    """Normal numbers with the shape, type and device of out."""
    import numpy

    numbers = numpy.random.default_rng(0).standard_normal(tuple(out.shape))
    if space.torch:
        return space.from_numpy(numbers).to(out.dtype)
    if framework_of(out, "out").name == "JAX":
        import jax.numpy

        return jax.numpy.asarray(numbers.astype(out.dtype))
    return space.xp.asarray(numbers).astype(out.dtype)
