"""Hostile arrays and options: an error of the library's own, or the right result, never a crash.

REGARD_FUZZ_EXAMPLES says how many of each (60 by default, for the time that it takes).
"""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import oracle
import pytest
import regard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = settings(max_examples=int(os.environ.get("REGARD_FUZZ_EXAMPLES", "60")), deadline=None,
                    suppress_health_check=list(HealthCheck), derandomize=True, database=None)
TYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
ODD_TYPES = [np.int64, np.int32, np.uint8, bool, np.complex64, np.longdouble, ">f4", ">i4", object,
             "U3", "datetime64[s]", [("a", np.float32)], ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1.5e-1}


def numbers(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ------------------------------------------------------------------------------------------- arrays

def plain(x, draw):
    return x


def read_only(x, draw):
    x.flags.writeable = False
    return x


def reversed_axes(x, draw):
    """The same numbers, with negative strides."""
    axes = draw(st.sets(st.integers(0, max(0, x.ndim - 2))))
    at = tuple(slice(None, None, -1) if axis in axes else slice(None) for axis in range(x.ndim))
    return np.ascontiguousarray(x[at])[at]


def gaps(x, draw):
    """Every second row of an array whose other rows are NaN."""
    if x.ndim < 2 or x.dtype.kind not in "fV":
        return x
    wide = np.full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1] + 3), np.nan).astype(x.dtype)
    view = wide[..., ::2, 1:1 + x.shape[-1]]
    view[...] = x
    return view


def last_axis_swapped(x, draw):
    """A last stride that is not 1."""
    return np.asfortranarray(x)


def byte_order(x, draw):
    return x.astype(x.dtype.newbyteorder()) if x.dtype.kind == "f" else x


def broadcast(x, draw):
    """Stride 0 along the first axis."""
    return np.broadcast_to(x[:1], x.shape) if x.ndim and x.shape[0] else x


def masked(x, draw):
    return np.ma.masked_array(x, False)


def no_array(x, draw):
    return draw(st.sampled_from([None, 3, "rows", b"rows", [1.0], {}, object(), x.tolist,
                                 memoryview(b"1234"), np.float32(1), x.shape]))


def other_type(x, draw):
    dtype = draw(st.sampled_from(ODD_TYPES))
    try:
        return np.zeros(x.shape, dtype)
    except TypeError:
        return x


def other_shape(x, draw):
    shape = list(x.shape)
    change = draw(st.sampled_from(["more", "fewer", "size", "empty"]))
    if change == "more":
        shape.insert(0, draw(st.integers(0, 2)))
    elif change == "fewer" and shape:
        shape.pop()
    elif shape:
        shape[draw(st.integers(0, len(shape) - 1))] = 0 if change == "empty" else draw(
            st.integers(1, 9))
    return np.ones(shape, x.dtype)


def misaligned(x, draw):
    memory = np.zeros(x.nbytes + 1, np.uint8)
    view = memory[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


HARMLESS = [plain, read_only, reversed_axes, gaps, broadcast]
HOSTILE = [last_axis_swapped, byte_order, masked, no_array, other_type, other_shape, misaligned]


def spans(draw, shape, length):
    made = np.random.default_rng(draw(st.integers(0, 1000))).integers(-2, length + 3, shape, np.int32)
    return made * draw(st.sampled_from([1, 1, 2**25]))


@st.composite
def calls(draw):
    """q, k, v and options, of which any may have been spoilt."""
    batch, group, heads = (draw(st.integers(0, 3)) for _ in range(3))
    len_q, len_k, dim, dim_v = (draw(st.integers(0, 40)) for _ in range(4))
    dtype = draw(st.sampled_from(TYPES))
    seed = draw(st.integers(0, 1000))
    arguments = {"q": numbers((batch, heads * group, len_q, dim), dtype, seed),
                 "k": numbers((batch, heads, len_k, dim), dtype, seed + 1),
                 "v": numbers((batch, heads, len_k, dim_v), dtype, seed + 2)}
    scores = (batch, heads * group, len_q, len_k)
    extra = {"bias": lambda: numbers(scores[draw(st.integers(0, 3)):], dtype, seed + 3),
             "mask": lambda: numbers(scores[draw(st.integers(0, 3)):], np.float32, seed + 4) > -1,
             "row_spans": lambda: spans(draw, (len_q, 2), len_k),
             "key_spans": lambda: spans(draw, (batch, 1, len_k, 6), len_q),
             "sink": lambda: numbers(scores[1:2], np.float32, seed + 5),
             "alibi_slopes": lambda: abs(numbers(scores[1:2], np.float32, seed + 6)),
             "causal": lambda: draw(st.sampled_from([True, "top_left", "bottom_right"])),
             "window": lambda: draw(st.sampled_from([3, (2, None), (None, 0), np.int64(1)])),
             "scale": lambda: draw(st.floats(-2, 2)),
             "softcap": lambda: draw(st.floats(0.5, 50))}
    for name in draw(st.sets(st.sampled_from(sorted(extra)), max_size=4)):
        arguments[name] = extra[name]()
    names = [name for name, x in arguments.items() if isinstance(x, np.ndarray)]
    hostile = draw(st.booleans())
    for name in names:
        change = draw(st.sampled_from(HARMLESS))
        if hostile and draw(st.integers(0, 4)) == 0:
            change = draw(st.sampled_from(HOSTILE))
        arguments[name] = change(arguments[name], draw)
    return arguments


def truth(arguments):
    more = {name: x for name, x in arguments.items() if name not in ("q", "k", "v", "causal")}
    lengths = arguments["q"].shape[2], arguments["k"].shape[2]
    causal = arguments.get("causal", "none")
    more["causal"] = "bottom_right" if causal is True and lengths[0] == lengths[1] else causal
    if "window" in more:
        window = more["window"]
        sides = window if isinstance(window, tuple) else (window, window)
        more["window"] = tuple(-1 if side is None else int(side) for side in sides)
    return oracle.attention(arguments["q"], arguments["k"], arguments["v"], **more)


def is_right(found, wanted, dtype):
    limit = TOLERANCE[np.dtype(dtype).name] * max(
        1.0, np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
    np.testing.assert_allclose(np.asarray(found).astype(np.float64), wanted, rtol=0, atol=limit)


@EXAMPLES
@given(calls())
def test_arrays(arguments):
    rows = [arguments.pop(name) for name in ("q", "k", "v")]
    try:
        out, lse = regard.attention(*rows, return_lse=True, **arguments)
    except regard.InvalidArgument as error:
        assert error.argument and str(error).startswith(f"{error.argument} = ")
        return
    want = truth({"q": rows[0], "k": rows[1], "v": rows[2]} | arguments)
    is_right(out, want["out"], rows[0].dtype)
    is_right(lse, want["lse"], np.float64 if rows[0].dtype == np.float64 else np.float32)
    gradients = regard.attention_backward(out, *rows, out, lse, **arguments)
    assert gradients.dq.shape == rows[0].shape


@EXAMPLES
@given(st.data())
def test_outputs(data):
    """An output may be anything, and may share memory with inputs or the other output."""
    shape, size = (1, 2, 6, 8), 96
    memory = numbers(6 * size, np.float32, data.draw(st.integers(0, 99)))
    places = st.one_of(st.integers(0, 5).map(lambda n: n * size), st.integers(0, 5 * size))
    begins = {name: data.draw(places) for name in ("q", "k", "v", "out")}
    arrays = {name: memory[begin:begin + size].reshape(shape) for name, begin in begins.items()}
    lse = memory[(begin := data.draw(places)):begin + 12].reshape(shape[:3])
    out = arrays.pop("out")
    change = data.draw(st.sampled_from([plain, plain, plain, read_only, broadcast, *HOSTILE]))
    out = change(out, data.draw)
    before = memory.copy()
    rows = {name: before[begins[name]:begins[name] + size].reshape(shape) for name in arrays}
    want = truth(rows)
    try:
        regard.attention(*arrays.values(), out=out, lse=lse)
    except (regard.InvalidArgument, regard.Unsupported):
        assert (memory == before).all()
        return
    if out is None:
        return
    is_right(out, want["out"], np.float32)
    is_right(lse, want["lse"], np.float32)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-2**70, 2**70), st.floats(), st.text(max_size=5),
    st.binary(max_size=3), st.complex_numbers(), st.lists(st.integers(-3, 3), max_size=3),
    st.tuples(st.integers(-3, 2**66), st.floats()), st.dictionaries(st.text(), st.integers()),
    st.sampled_from([np.float32(0.5), np.int8(-1), np.uint64(2**63), np.bool_(True), np.nan,
                     np.ones(2), np.ones((0, 3)), np.array(2), object(), object, len, 10**400]))
OPTIONS = ["bias", "mask", "row_spans", "key_spans", "causal", "window", "scale", "softcap", "alibi_slopes", "sink",
           "dropout_p", "dropout_seed", "dropout_offset", "cu_seqlens_q", "cu_seqlens_k",
           "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k", "q_positions",
           "k_position", "batch_begin", "head_begin", "layout", "precision",
           "deterministic", "return_lse", "out_type", "out", "lse", "threads", "backend"]


@pytest.mark.parametrize("surface", ["numpy", "torch"])
@EXAMPLES
@given(options=st.dictionaries(st.sampled_from(OPTIONS), ANYTHING, min_size=1, max_size=3))
def test_options(surface, options):
    q = numbers((1, 2, 6, 8), np.float32, 0)
    if surface == "torch":
        q = pytest.importorskip("torch").from_numpy(q)
    try:
        out = regard.attention(q, q, q, **options)
    except regard.Error as error:
        assert str(error).startswith(f"{error.argument} = ") and len(str(error)) < 600
    else:
        assert out is not None


@EXAMPLES
@given(options=st.dictionaries(
    st.sampled_from(["gradients", "gradient_type", "into", "accumulate", "dlse", "threads",
                     "backend", "scale", "causal", "window"]), ANYTHING, min_size=1, max_size=3))
def test_options_of_backward(options):
    q = numbers((1, 2, 6, 8), np.float32, 0)
    out, lse = regard.attention(q, q, q, return_lse=True)
    try:
        regard.attention_backward(q, q, q, q, out, lse, **options)
    except regard.Error as error:
        assert str(error).startswith(f"{error.argument} = ")
