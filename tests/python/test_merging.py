"""A problem cut into 1 to 16 sets of keys, put together in the kernels, against the whole."""

import functools

import numpy as np
import pytest

import regard_ctypes as regard
from cases import lse_type
from selection import mostly_exhaustive
from solve import same_bits

B, HEADS, HEADS_KV, D = 2, 4, 2, 16
ROWS, KEYS = 300, 600  # the last block of rows is short
DROPOUT = (0.3, 2**33 + 5, 77)
PIECES = [1, 2, 5, 16]
STARTS = np.arange(0, ROWS, 128, dtype=np.int32)
SINK = np.float32([0.5, -1.0, 3.0, -np.inf])
SLOPES = np.float32([0.01, 0.02, 0.05, 0.1])
OPTIONS = {
    "plain": {},
    "causal": {"causal": "top_left"},
    "window": {"window": (150, 40)},
    "alibi": {"causal": "top_left", "alibi_slopes": SLOPES, "scale": -0.2},
    "dropout": {"dropout": DROPOUT, "sink": SINK},
    "bias and mask": {"bias": True, "mask": True, "softcap": 2.0},
    "spans": {"row_spans": True, "key_spans": True, "sink": SINK},
    "padded": {"seqused_q": np.int32([ROWS, 200]), "seqused_k": np.int32([400, KEYS])},
    "packed": {"packed": True, "sink": SINK},
}


@functools.lru_cache(maxsize=2)
def made(name, type):
    """Arrays by name, in the type, and the options of the whole call."""
    rng = np.random.default_rng(17)
    options = dict(OPTIONS[name])
    packed = options.pop("packed", False)
    heads_first = (lambda h, n: (n * B, h, D)) if packed else (lambda h, n: (B, h, n, D))
    arrays = {name: regard.store(rng.standard_normal(shape), regard.DTYPES[type])
              for name, shape in {"q": heads_first(HEADS, ROWS), "k": heads_first(HEADS_KV, KEYS),
                                  "v": heads_first(HEADS_KV, KEYS),
                                  "dout": heads_first(HEADS, ROWS)}.items()}
    if packed:
        for side, length in (("q", ROWS), ("k", KEYS)):
            options["cu_seqlens_" + side] = np.int32([0, 100, B * length])
            options["max_seqlen_" + side] = B * length - 100
    if "bias" in options:
        options["bias"] = regard.store(rng.standard_normal((B, 1, ROWS, KEYS)), regard.DTYPES[type])
        options["mask"] = rng.random((1, HEADS, ROWS, KEYS)) < 0.6
        options["mask"][:, :, 7] = False
    if "row_spans" in options:
        begin = rng.integers(0, 300, (B, 1, ROWS, 1))
        options["row_spans"] = np.concatenate([begin, begin + 250], -1).astype(np.int32)
        begin = rng.integers(0, 300, (1, HEADS, KEYS, 1))
        options["key_spans"] = np.concatenate([begin, begin + 350], -1).astype(np.int32)
    return arrays, options


def edges(count):
    """Of the keys' pieces: unequal, at multiples of 32."""
    blocks = np.linspace(0, 1, count + 1)[:-1] ** 1.3 * (KEYS // 32)
    return [*(32 * np.maximum(blocks.astype(int), np.arange(count))), KEYS]


def attention(arrays, options, keys, is_first):
    """The call of one piece, and where its keys are in dk and dv."""
    own = dict(options)
    if not is_first:
        own.pop("sink", None)
    if "cu_seqlens_k" in own:
        return packed_piece(arrays, own, keys)
    if {"causal", "window", "alibi_slopes", "dropout"} & set(own):
        own |= {"q_positions": STARTS, "k_position": keys.start}
    for name in ("bias", "mask"):
        if name in own:
            own[name] = np.ascontiguousarray(own[name][..., keys])
    if "row_spans" in own:
        own |= {"row_spans": own["row_spans"] - np.int32(keys.start),
                "key_spans": np.ascontiguousarray(own["key_spans"][:, :, keys])}
    if "seqused_k" in own:
        own["seqused_k"] = np.clip(own["seqused_k"] - keys.start, 0, keys.stop - keys.start).astype(
            np.int32)
    at = np.s_[:, :, keys]
    return regard.Attention(arrays["q"], *(arrays[x][at] for x in "kv"), **own), at


def packed_piece(arrays, own, keys):
    """The piece's share of each sequence."""
    lengths = np.diff(own["cu_seqlens_k"])
    begin, end = (lengths * edge // KEYS for edge in (keys.start, keys.stop))
    first = own["cu_seqlens_k"][:-1]
    rows = np.concatenate([np.arange(a, b) for a, b in zip(first + begin, first + end)])
    own |= {"cu_seqlens_k": np.int32([0, *np.cumsum(end - begin)]),
            "max_seqlen_k": int((end - begin).max())}
    return regard.Attention(arrays["q"], *(arrays[x][rows].copy() for x in "kv"), **own), rows


def merged(name, type, count, backend, **run):
    """out, lse and the gradients of all pieces together, in f32 (f64)."""
    arrays, options = made(name, type)
    sums = lse_type(type)
    packed = "cu_seqlens_k" in options
    shape = arrays["q"].shape[:-1]
    found = {"out": np.full((*shape, D), np.nan, sums),
             "lse": np.full(shape[::-1] if packed else shape, np.nan, sums)}
    found |= {"d" + x: np.zeros(arrays[x].shape, sums) for x in "qkv"}
    if "sink" in options:
        found["dsink"] = np.zeros(HEADS, np.float32)
    cuts = edges(count)
    pieces = [slice(int(a), int(b)) for a, b in zip(cuts, cuts[1:])]
    for keys in pieces:
        call, _ = attention(arrays, options, keys, keys is pieces[0])
        call.continue_from = int(keys is not pieces[0])
        regard.forward(call, found["out"], found["lse"], backend=backend, **run)
    delta = np.einsum("...d,...d->...", regard.load(arrays["dout"]), found["out"]).astype(sums)
    delta = delta.T.copy() if packed else delta
    for keys in pieces:
        call, at = attention(arrays, options, keys, keys is pieces[0])
        own = {"dk": np.zeros_like(found["dk"][at]), "dv": np.zeros_like(found["dv"][at])}
        if keys is pieces[0] and "dsink" in found:
            own["dsink"] = found["dsink"]
        regard.backward(call, None, found["lse"], arrays["dout"], delta=delta, accumulate=True,
                        gradients={"dq": found["dq"], **own}, backend=backend, **run)
        found["dk"][at], found["dv"][at] = own["dk"], own["dv"]
    if "seqused_q" in options:  # what is not a row was not written
        for b, length in enumerate(options["seqused_q"]):
            assert np.isnan(found["out"][b, :, length:]).all()
            found["out"][b, :, length:] = found["lse"][b, :, length:] = 0
    return found


@functools.lru_cache(maxsize=2)
def exact(name, type):
    """The whole in float64, by the textbook."""
    arrays, options = made(name, type)
    wide = {x: regard.load(array).astype(np.float64) for x, array in arrays.items()}
    options = {x: regard.load(array).astype(np.float64) if x == "bias" else array
               for x, array in options.items()}
    shape = wide["q"].shape[:-1]
    call = regard.Attention(wide["q"], wide["k"], wide["v"], **options | (
        {"q_positions": STARTS} if {"causal", "window", "alibi_slopes"} & set(options) else {}))
    out, lse = np.zeros((*shape, D)), np.zeros(shape[::-1] if "cu_seqlens_k" in options else shape)
    regard.forward(call, out, lse, backend="reference")
    gradients = {"d" + x: np.zeros_like(wide[x]) for x in "qkv"}
    if "sink" in options:
        gradients["dsink"] = np.zeros(HEADS, np.float32)
    regard.backward(call, out, lse, wide["dout"], gradients=gradients, backend="reference")
    return {"out": out, "lse": lse, **gradients}


def errors(found, want):
    """Of each result, relative to its largest element."""
    finite = np.isfinite(want["lse"])
    assert np.array_equal(found["lse"][~finite], want["lse"][~finite])
    shown = {name: np.isfinite(x) for name, x in want.items()}
    return {name: np.abs(found[name][where] - want[name][where]).max()
            / np.abs(want[name][where]).max() for name, where in shown.items()}


@pytest.mark.parametrize("count", mostly_exhaustive(PIECES, 16))
@pytest.mark.parametrize("type", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_pieces_are_the_whole(name, type, count, backend):
    """Within the rounding of f32 (f64) and twice the error of one piece: flat in their number."""
    unit = {"f64": 2.0**-53}.get(type, 2.0**-24)
    one = errors(merged(name, type, 1, backend), exact(name, type))
    for result, error in errors(merged(name, type, count, backend), exact(name, type)).items():
        # dsink is f32, and its sum over the rows cancels what P lost in bf16.
        floor = max(unit, 2.0**-(16 if type == "bf16" else 24)) if result == "dsink" else unit
        assert error <= 2 * one[result] + 64 * floor, (result, error, one[result])


@pytest.mark.parametrize("name", ["causal", "bias and mask", "packed"])
def test_one_order_gives_the_same_bits(name, backend):
    found = [merged(name, "f32", 5, backend, threads=threads) for threads in (1, 2, 2)]
    same_bits(found[1], found[0])
    same_bits(found[2], found[0])


@pytest.mark.parametrize("type", ["f64", "f32"])
def test_an_infinite_lse_stays_whatever_hidden_pairs_hold(type):
    """A hidden NaN has the row computed again, in other code."""
    rng = np.random.default_rng(3)
    sums = lse_type(type)
    q, k, v = (regard.store(rng.standard_normal((1, 1, n, 8)), regard.DTYPES[type])
               for n in (40, 70, 70))
    mask = np.ones((1, 1, 1, 70), bool)
    mask[..., -1] = False
    for hidden in (0.0, np.nan):
        v[..., -1, :] = hidden
        out, lse = np.ones((1, 1, 40, 8), sums), np.zeros((1, 1, 40), sums)
        lse[0, 0, 5] = np.inf
        regard.forward(regard.Attention(q=q, k=k, v=v, mask=mask, continue_from=1), out, lse)
        assert lse[0, 0, 5] == np.inf and np.isnan(out[0, 0, 5]).all()
        assert np.isfinite(np.delete(lse[0, 0], 5)).all()
