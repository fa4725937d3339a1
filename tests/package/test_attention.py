"""regard.attention and attention_backward against the float64 oracle, for each framework.

The library's arithmetic is tested by tests/python; here it is that every keyword, type and layout
arrives, and that every result comes back.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import oracle
import philox
import pytest
import regard
from conftest import DTYPES

TOLERANCE = {"f64": 1e-11, "f32": 2e-5, "f16": 2e-2, "bf16": 1.5e-1}
B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 21, 37, 16, 24

# Keywords of regard.attention; arrays by name, made in `inputs`.
CASES = {
    "plain": {},
    "top left": {"causal": "top_left"},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (5, 3)},
    "left window": {"window": (7, None), "causal": "bottom_right"},
    "window of one number": {"window": 4},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": (B, HQ, SQ, SK)},
    "broadcast bias": {"bias": (1, HQ, 1, SK)},
    "bias of keys": {"bias": (SK,)},
    "mask": {"mask": (B, 1, SQ, SK)},
    "slopes": {"alibi_slopes": (HQ,)},
    "slopes of each entry": {"alibi_slopes": (B, HQ)},
    "sink": {"sink": (HQ,)},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 11, "dropout_offset": 5},
    "lengths": {"seqused_q": [20, 3], "seqused_k": [1, 37]},
    "positions": {"causal": True, "q_positions": [[40], [50]], "k_position": 32,
                  "alibi_slopes": (HQ,), "dropout_p": 0.25, "dropout_seed": 11, "batch_begin": 3,
                  "head_begin": 2},
    "many": {"bias": (B, 1, SQ, SK), "sink": (HQ,), "softcap": 2.0, "causal": "bottom_right",
             "dropout_p": 0.5, "dropout_seed": 3, "window": (9, None)},
}
PACKED = {"cu_seqlens_q": [0, 9, 9, 30], "cu_seqlens_k": [0, 4, 15, 40], "max_seqlen_q": 21,
          "max_seqlen_k": 25}


def inputs(random, framework, type, options, packed=False):
    """The arrays as NumPy and as the framework has them, and the same options for each."""
    def made(x, dtype=DTYPES[type]):
        array = x.astype(dtype)
        return array, framework.make(array)

    q, k, v, dout = (random.standard_normal(shape) for shape in (
        [(30, HQ, D), (40, HKV, D), (40, HKV, DV), (30, HQ, DV)] if packed else
        [(B, HQ, SQ, D), (B, HKV, SK, D), (B, HKV, SK, DV), (B, HQ, SQ, DV)]))
    lse_shape = (HQ, 30) if packed else (B, HQ, SQ)
    ours, truth = {}, {}
    for name, value in options.items():
        if name in ("bias", "mask", "alibi_slopes", "sink"):
            x = random.standard_normal(value)
            x = x > -0.5 if name == "mask" else abs(x) if name == "alibi_slopes" else x
            dtype = {"bias": DTYPES[type], "mask": bool}.get(name, np.float32)
            truth[name], ours[name] = made(x, dtype)
        elif name.startswith(("cu_", "seqused", "q_positions")):
            truth[name], ours[name] = made(np.array(value), np.int32)
        else:
            ours[name] = value
            if name == "window":
                sides = (value, value) if isinstance(value, int) else value
                truth[name] = tuple(-1 if side is None else side for side in sides)
            elif name == "causal":
                truth[name] = "top_left" if value is True else value
            elif not name.startswith("dropout") and name not in ("batch_begin", "head_begin"):
                truth[name] = value
    if "dropout_p" in options:
        batch = len(options["cu_seqlens_q"]) - 1 if packed else B
        lengths = (options["max_seqlen_q"], options["max_seqlen_k"]) if packed else (SQ, SK)
        truth["p"] = philox.realised(options["dropout_p"])
        places = {name: options[name] for name in ("k_position", "batch_begin", "head_begin")
                  if name in options}
        if "q_positions" in options:
            places["row_positions"] = oracle.row_positions(options["q_positions"], B, SQ)
        truth["keep"] = philox.keep_mask(
            options["dropout_p"], options["dropout_seed"], options.get("dropout_offset", 0), batch,
            HQ, *lengths, **places)
    dlse = random.standard_normal(lse_shape)
    lse_type = np.float64 if type == "f64" else np.float32
    rows = {name: made(x) for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout))}
    rows["dlse"] = made(dlse, lse_type)
    return SimpleNamespace(truth={name: pair[0] for name, pair in rows.items()} | truth,
                           rows={name: pair[1] for name, pair in rows.items()}, options=ours)


def close(got, want, type):
    assert got.shape == want.shape
    scale = max(1.0, np.abs(want[np.isfinite(want)]).max(initial=0))
    # -inf, of rows that see nothing, must be where it belongs.
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[type] * scale)


def compare(case, framework, type, layout="bhsd"):
    want = oracle.attention(**case.truth)

    def rows(x):
        return x.swapaxes(1, 2) if layout == "bshd" else x

    q, k, v, dout = (rows(case.rows[name]) for name in ("q", "k", "v", "dout"))
    out, lse = regard.attention(q, k, v, return_lse=True, layout=layout, **case.options)
    assert out.dtype == q.dtype
    used = case.options.get("seqused_q")
    if used is not None:  # rows of padding: out and gradients are 0, lse -inf
        real = np.arange(SQ) < framework.to_numpy(used)[:, None, None]
        want["lse"] = np.where(real, want["lse"], -np.inf)
    close(framework.to_numpy(rows(out)), want["out"], type)
    close(framework.to_numpy(lse), want["lse"], type)
    got = regard.attention_backward(dout, q, k, v, out, lse, dlse=case.rows["dlse"],
                                    layout=layout, **case.options)
    for name in ("dq", "dk", "dv"):
        close(framework.to_numpy(rows(getattr(got, name))), want[name], type)
    for name in ("dbias", "dsink"):
        if name in want:
            held = "f32" if name == "dsink" and type == "f64" else type
            close(framework.to_numpy(getattr(got, name)), want[name], held)
        else:
            assert getattr(got, name) is None


@pytest.mark.parametrize("type", ["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_options(name, type, framework, random):
    if type in framework.types:
        compare(inputs(random, framework, type, CASES[name]), framework, type)


@pytest.mark.parametrize("type", DTYPES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_types_and_layouts(type, layout, framework, random):
    if type in framework.types:
        options = {"bias": (1, HQ, SQ, SK), "sink": (HQ,), "causal": "bottom_right"}
        compare(inputs(random, framework, type, options), framework, type, layout)


@pytest.mark.parametrize("name", ["plain", "bottom right", "window", "softcap", "dropout", "sink"])
def test_packed(name, framework, random):
    case = inputs(random, framework, "f32", PACKED | CASES[name], packed=True)
    compare(case, framework, "f32")


def test_wide_results(framework, random):
    """float32 out and gradients of bf16 inputs, closer to float64 than bf16 could be."""
    case = inputs(random, framework, "f16", {})
    q, k, v, dout = (case.rows[name] for name in ("q", "k", "v", "dout"))
    out, lse = regard.attention(q, k, v, out_type="float32", return_lse=True)
    want = oracle.attention(**case.truth)
    error = np.abs(framework.to_numpy(out) - want["out"]).max()
    narrow = np.abs(want["out"].astype(np.float16) - want["out"]).max()
    assert "float32" in str(out.dtype) and error < 1.5 * narrow
    got = regard.attention_backward(dout, q, k, v, out, lse, gradient_type="float32")
    assert all("float32" in str(x.dtype) for x in (got.dq, got.dk, got.dv))


def test_chosen_gradients_and_accumulation(framework, random):
    case = inputs(random, framework, "f32", {"bias": (1, 1, SQ, SK)})
    q, k, v, dout = (case.rows[name] for name in ("q", "k", "v", "dout"))
    out, lse = regard.attention(q, k, v, return_lse=True, **case.options)
    arguments = (dout, q, k, v, out, lse)
    whole = regard.attention_backward(*arguments, **case.options)
    part = regard.attention_backward(*arguments, gradients=["dk", "dbias"], **case.options)
    assert part.dq is None and part.dv is None
    assert (framework.to_numpy(part.dk) == framework.to_numpy(whole.dk)).all()
    twice = regard.attention_backward(*arguments, into=part, accumulate=True, **case.options)
    assert twice.dk is part.dk
    close(framework.to_numpy(twice.dk), 2 * framework.to_numpy(whole.dk), "f32")
    close(framework.to_numpy(twice.dbias), 2 * framework.to_numpy(whole.dbias), "f32")


def test_given_outputs(framework, random):
    case = inputs(random, framework, "f32", {})
    q, k, v = (case.rows[name] for name in ("q", "k", "v"))
    want, want_lse = regard.attention(q, k, v, return_lse=True)
    out, lse = 0 * want, 0 * want_lse
    got = regard.attention(q, k, v, out=out, lse=lse)
    assert got is out
    assert (framework.to_numpy(out) == framework.to_numpy(want)).all()
    assert (framework.to_numpy(lse) == framework.to_numpy(want_lse)).all()


def test_strides_are_read_in_place(random):
    """Views with gaps, reversed and broadcast axes; arrays that may not be written to."""
    base = random.standard_normal((3, 2, 50, 40)).astype(np.float32)
    q, k = base[:, :, ::2, 3:19], base[:, ::-1, ::-1, 20:36]
    v = np.broadcast_to(base[:, :1, :, :8], (3, 2, 50, 8))
    for x in (q, k):
        x.flags.writeable = False
    copies = [np.ascontiguousarray(x) for x in (q, k, v)]
    assert (regard.attention(q, k, v) == regard.attention(*copies)).all()


def test_empty_sizes():
    q, k = np.ones((2, 3, 0, 8), np.float32), np.ones((2, 3, 5, 8), np.float32)
    assert regard.attention(q, k, k).shape == (2, 3, 0, 8)
    out, lse = regard.attention(k, q, q, return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_dropout_mask_is_the_oracles():
    got = regard.dropout_mask(2, 3, 17, 70, 0.3, seed=2**40 + 1, offset=2**33)
    assert (got == philox.keep_mask(0.3, 2**40 + 1, 2**33, 2, 3, 17, 70)).all()
    assert regard.dropout_probability(0.3) == philox.realised(0.3)


class Speaks:
    """Somebody's array class, known by DLPack alone."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_any_array_that_speaks_dlpack(random):
    arrays = [random.standard_normal((1, 2, 9, 8)) for _ in range(3)]
    out = np.empty_like(arrays[0])
    assert regard.attention(*map(Speaks, arrays), out=Speaks(out)) is not None
    assert (out == regard.attention(*arrays)).all()
    with pytest.raises(regard.WrongType, match="give out"):
        regard.attention(*map(Speaks, arrays))


def test_threads_run_side_by_side(random):
    """The interpreter is free while the library computes: calls of several threads are right."""
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = (random.standard_normal((1, 2, 300, 32)).astype(np.float32) for _ in range(3))
    want = regard.attention(q, k, v)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: regard.attention(q, k, v), range(32)):
            assert (got == want).all()


CHANGED_TABLES = """
import threading
import numpy as np, regard

rows = [np.ones((2048, 2, 16), np.float32) for _ in range(3)]
table = np.arange(0, 2049, 64, dtype=np.int32)
good = table.copy()

def attend():
    for _ in range(100):
        try:
            regard.attention(*rows, cu_seqlens_q=table, cu_seqlens_k=table, max_seqlen_q=64,
                             max_seqlen_k=64)
        except regard.InvalidArgument:
            pass

caller = threading.Thread(target=attend)
caller.start()
while caller.is_alive():
    table[5:] = 2**30
    table[5:] = good[5:]
"""


def test_tables_that_another_thread_changes():
    """They are copied before they are checked: such a call is refused, or runs, and never crashes."""
    done = subprocess.run([sys.executable, "-c", CHANGED_TABLES], capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
