"""One call: forward and backward of given arrays through the library, into fresh outputs."""

import numpy as np

import regard_ctypes as regard
from cases import lse_type, sentinel

TYPES = ["f64", "f32", "bf16", "f16"]
NAMES = {dtype: name for name, dtype in regard.DTYPES.items()}


def normal(*shape, type="f64", seed=0):
    """Standard normal values, rounded to type; the same for the same shape and seed."""
    values = np.random.default_rng([seed, len(shape), *shape]).standard_normal(shape)
    return regard.store(values, regard.DTYPES[type])


def problem(batch, heads, heads_kv, rows, columns, dim, dim_v=None, type="f32", seed=0):
    """q, k, v, dout as keyword arguments for solve."""
    dim_v = dim_v or dim
    return {"q": normal(batch, heads, rows, dim, type=type, seed=seed),
            "k": normal(batch, heads_kv, columns, dim, type=type, seed=seed + 1),
            "v": normal(batch, heads_kv, columns, dim_v, type=type, seed=seed + 2),
            "dout": normal(batch, heads, rows, dim_v, type=type, seed=seed + 3)}


def solve(q, k, v, dout=None, dlse=None, backend="", threads=0, accumulate=False, into=None,
          **options):
    """A dict of the arrays out, lse and, given dout, of every gradient; types as the inputs'.

    into gives some of the outputs; the others are filled with NaN before the call.
    """
    packed = q.ndim == 3
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    shapes = {"out": (q.shape[:-1] + v.shape[-1:], q.dtype),
              "lse": (lse_shape, lse_type(NAMES[q.dtype]))}
    if dout is not None:
        shapes |= {"d" + name: (x.shape, x.dtype) for name, x in
                   {"q": q, "k": k, "v": v, "bias": options.get("bias"),
                    "sink": options.get("sink")}.items() if x is not None}
    results = {name: sentinel(*shape) for name, shape in shapes.items()} | (into or {})
    attention = regard.Attention(q, k, v, **options)
    run = {"backend": backend, "threads": threads}
    regard.forward(attention, results["out"], results["lse"], **run)
    if dout is not None:
        gradients = {name: results[name] for name in results if name not in ("out", "lse")}
        regard.backward(attention, results["out"], results["lse"], dout, dlse,
                        accumulate=accumulate, gradients=gradients, **run)
    return results


def with_values(array, index, value):
    """A copy of a float array of any type in which array[index] is value."""
    result = array.copy()
    bf16 = array.dtype == regard.BF16
    result[index] = regard.store(np.float32(value), array.dtype) if bf16 else value
    return result


def same_bits(got, want, names=None):
    for name in names or want:
        assert got[name].tobytes() == want[name].tobytes(), f"{name} differs"


def close(got, want, what="", type=None):
    """Equal to a few roundings of the problem's type: for what another order rounds otherwise."""
    dtype = regard.DTYPES[type] if type else got.dtype
    unit = {8: 1e-13, 4: 2e-6, 2: 2.0**-6}[dtype.itemsize]
    got, want = regard.load(got), regard.load(want)
    np.testing.assert_allclose(got, want, rtol=unit, atol=unit, err_msg=what)


def is_zero(array):
    return not regard.load(array).any()
