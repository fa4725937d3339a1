"""The chapter "Edges" of docs/semantics.md: rows that see nothing, padding, NaN, huge scores."""

import mmap

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from solve import TYPES, close, is_zero, normal, problem, same_bits, solve, with_values

SINK = np.array([0.5, -1.25], np.float32)


def hides_row_3(how, rows, columns):
    """Options under which row 3 of every head sees no key and most other rows see some."""
    if how == "bias":
        bias = np.zeros((1, 1, rows, columns), np.float32)
        bias[..., 3, :] = -np.inf
        return {"bias": bias}
    mask = np.ones((1, 1, rows, columns), bool)
    mask[..., 3, :] = False
    return {"mask": mask}


EMPTY = {
    "mask": lambda: (hides_row_3("mask", 9, 70), [3]),
    "bias": lambda: (hides_row_3("bias", 9, 70), [3]),
    "bottom_right": lambda: ({"causal": "bottom_right", "seqused_k": np.array([5, 5], np.int32)},
                             [0, 1, 2, 3]),
    "window": lambda: ({"window": (-1, -1), "causal": "top_left", "mask": hides_row_3(
        "mask", 9, 70)["mask"]}, [3]),
    "left_window": lambda: ({"causal": "top_left", "window": (2, -1),
                             "seqused_k": np.array([4, 4], np.int32)}, [6, 7, 8]),
}


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("how", EMPTY)
@pytest.mark.parametrize("sink", [None, SINK], ids=["bare", "sink"])
def test_row_that_sees_nothing(how, sink, type, backend):
    options, empty = EMPTY[how]()
    options |= {} if sink is None else {"sink": sink}
    p = problem(2, 2, 1, 9, 70, 20, type=type)
    dlse = normal(2, 2, 9, type="f64" if type == "f64" else "f32", seed=9)
    got = solve(**p, dlse=dlse, backend=backend, **options)
    assert is_zero(got["out"][:, :, empty]) and is_zero(got["dq"][:, :, empty])
    want = -np.inf if sink is None else sink[None, :, None]
    assert np.array_equal(got["lse"][:, :, empty], np.broadcast_to(want, (2, 2, len(empty))))
    if "bias" in options:
        assert is_zero(got["dbias"][:, :, empty])
    # It adds exactly 0 to every gradient, whatever arrives there (its dlse still moves a sink).
    other = solve(**(p | {"dout": with_values(p["dout"], np.s_[:, :, empty], 777.0)}), dlse=dlse,
                  backend=backend, **options)
    same_bits(other, got, [name for name in got if name != "out"])
    wild = solve(**(p | {"dout": with_values(p["dout"], np.s_[:, :, empty], np.nan)}), dlse=dlse,
                 backend=backend, **options)
    for name in ("dq", "dk", "dv"):
        close(wild[name], got[name], name)


@pytest.mark.parametrize("sink", [None, SINK], ids=["bare", "sink"])
@pytest.mark.parametrize("type", TYPES)
def test_no_keys_at_all(type, sink, backend):
    p = problem(2, 2, 1, 5, 0, 8, type=type)
    options = {} if sink is None else {"sink": sink}
    dlse = normal(2, 2, 5, type="f64" if type == "f64" else "f32")
    got = solve(**p, dlse=dlse, backend=backend, **options)
    assert is_zero(got["out"]) and is_zero(got["dq"])
    if sink is None:
        assert np.all(got["lse"] == -np.inf)
    else:
        assert np.array_equal(got["lse"], np.broadcast_to(sink[None, :, None], (2, 2, 5)))
        np.testing.assert_allclose(got["dsink"], dlse.sum(axis=(0, 2)), rtol=1e-5)


@pytest.mark.parametrize("type", TYPES)
def test_no_queries(type, backend):
    """Sq = 0: no row adds to the gradients, which are therefore 0 (or stay, accumulated)."""
    p = problem(2, 2, 1, 0, 6, 8, type=type)
    got = solve(**p, backend=backend, sink=SINK)
    assert all(is_zero(got[name]) for name in ("dk", "dv", "dsink"))
    start = {"dk": normal(2, 1, 6, 8, type=type), "dv": normal(2, 1, 6, 8, type=type, seed=3)}
    got = solve(**p, backend=backend, into={name: x.copy() for name, x in start.items()},
                accumulate=True)
    same_bits(got, start)


@pytest.mark.parametrize("type", TYPES)
def test_no_batch(type, backend):
    solve(**problem(0, 2, 1, 4, 6, 8, type=type), backend=backend)
    got = solve(**problem(0, 2, 1, 4, 6, 8, type=type), backend=backend, sink=SINK,
                bias=normal(1, 2, 4, 6, type=type))
    assert is_zero(got["dsink"]) and is_zero(got["dbias"])


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("features", [
    ("bias", "sink", "grouped", "odd"), ("bias_keys", "mask", "bottom_right", "value_size"),
    ("packed", "bias_head"), ("seqused", "bias"), ("alibi_batch", "dropout", "dlse"),
], ids="+".join)
def test_gaps_change_no_bit_and_are_not_written(features, type, backend):
    poisoned = cases.make(features + ("gaps",), type)
    clean = cases.make(features + ("gaps",), type)
    for array in [*clean.inputs.values(), clean.dout, clean.dlse]:
        if array is None:
            continue
        content = array.copy()
        cases.room(array).view(np.uint8)[...] = 0
        array[...] = content
    got, want = cases.run(poisoned, backend), cases.run(clean, backend)
    same_bits(got, want)
    for name in got:
        assert got.keeps_between(name), name


@pytest.mark.parametrize("type", TYPES)
def test_rows_past_seqused_are_never_read_nor_written(type, backend):
    p = problem(3, 2, 1, 19, 75, 20, type=type)
    used_q, used_k = np.array([11, 0, 19], np.int32), np.array([40, 75, 3], np.int32)
    bias = normal(3, 2, 19, 75, type="f32")
    options = {"seqused_q": used_q, "seqused_k": used_k, "causal": "bottom_right"}
    want = solve(**p, backend=backend, bias=bias, **options)
    bias = bias.copy()
    p = {name: x.copy() for name, x in p.items()}
    for b in range(3):
        for name, used in (("q", used_q), ("dout", used_q), ("k", used_k), ("v", used_k)):
            p[name][b, :, used[b] :] = cases.sentinel((1,), p[name].dtype)[0]
        bias[b, :, used_q[b] :] = np.nan
        bias[b, :, :, used_k[b] :] = np.nan
    got = solve(**p, backend=backend, bias=bias, **options)
    same_bits(got, want)
    for b in range(3):
        for name, used in (("out", used_q), ("dq", used_q), ("dk", used_k), ("dv", used_k)):
            tail = got[name][b, :, used[b] :]
            assert tail.tobytes() == cases.sentinel(tail.shape, tail.dtype).tobytes(), name


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_spoilt_row_spoils_no_other(poison, type, backend):
    p = problem(1, 2, 2, 70, 90, 24, type=type)
    bias = normal(1, 1, 70, 90, type="f32")
    want = solve(**p, bias=bias, backend=backend)
    others = [i for i in range(70) if i != 33]
    spoilt = {"bias": with_values(bias, (0, 0, 33, 40), poison)}
    if np.isnan(poison):
        spoilt["q"] = with_values(p["q"], (0, 0, 33, 2), poison)
    for name, array in spoilt.items():
        got = solve(**(p | {"bias": bias} | {name: array}), backend=backend)
        assert np.isnan(regard.load(got["out"][0, 0, 33])).all()
        for result in ("out", "lse", "dq"):
            close(got[result][0, 0, others], want[result][0, 0, others], result)
            if name == "q":
                close(got[result][0, 1], want[result][0, 1], result)
        close(got["dbias"][0, 0, others], want["dbias"][0, 0, others], "dbias", type)
        if name == "q":
            close(got["dk"][:, 1], want["dk"][:, 1], "dk")


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", ["mask", "bias", "top_left", "window"])
def test_a_hidden_pair_spoils_nothing(how, poison, type, backend):
    rows, columns, at = 40, 100, 71
    p = problem(1, 2, 1, rows, columns, 24, type=type)
    options = {}
    if how == "mask":
        options["mask"] = np.ones((1, 1, rows, columns), bool)
        options["mask"][..., at] = False
    elif how == "bias":
        options["bias"] = normal(1, 1, rows, columns, type="f32")
        options["bias"][..., at] = -np.inf
    elif how == "top_left":
        options["causal"] = "top_left"
    else:
        options |= {"causal": "top_left", "window": (7, 3)}
    want = solve(**p, backend=backend, **options)
    for names in (("k",), ("v",), ("k", "v")):
        spoilt = {name: with_values(p[name], np.s_[:, :, at], poison) for name in names}
        got = solve(**(p | spoilt), backend=backend, **options)
        for name in want:
            close(got[name], want[name], f"{name} with {names}", type)
        assert is_zero(got["dk"][:, :, at]) and is_zero(got["dv"][:, :, at])


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_spoilt_row_reaches_only_the_keys_it_sees(poison, type, backend):
    """Row 10 sees keys 0 to 10: its NaN may reach their gradients and no others."""
    p = problem(1, 2, 2, 40, 100, 24, type=type)
    want = solve(**p, backend=backend, causal="top_left")
    for name in ("q", "dout"):
        spoilt = {name: with_values(p[name], np.s_[0, 0, 10], poison)}
        got = solve(**(p | spoilt), backend=backend, causal="top_left")
        others = [i for i in range(40) if i != 10]
        for result in ("out", "lse", "dq"):
            close(got[result][0, 0, others], want[result][0, 0, others], result)
        for result in ("dk", "dv"):
            close(got[result][0, 0, 11:], want[result][0, 0, 11:], result)
            close(got[result][0, 1], want[result][0, 1], result)


@pytest.mark.parametrize("type", TYPES)
def test_a_spoilt_key_reaches_only_the_rows_that_see_it(type, backend):
    p = problem(1, 2, 1, 40, 40, 24, type=type)
    want = solve(**p, backend=backend, causal="top_left")
    for name in ("k", "v"):
        spoilt = {name: with_values(p[name], np.s_[:, :, 25], np.nan)}
        got = solve(**(p | spoilt), backend=backend, causal="top_left")
        for result in ("out", "lse", "dq"):
            close(got[result][:, :, :25], want[result][:, :, :25], f"{result} with {name}")
        assert np.isnan(regard.load(got["out"][:, :, 25:])).all()


@pytest.mark.parametrize("type", TYPES)
def test_a_hidden_bias_of_nan_spoils_nothing(type, backend):
    p = problem(2, 2, 2, 33, 80, 24, type=type)
    mask = np.random.default_rng(3).random((2, 1, 33, 80)) < 0.6
    bias = normal(2, 2, 33, 80, type="f32")
    want = solve(**p, backend=backend, mask=mask, bias=bias)
    hidden = np.broadcast_to(~mask, bias.shape)
    for poison in (np.nan, np.inf):
        got = solve(**p, backend=backend, mask=mask, bias=np.where(hidden, poison, bias).astype(
            np.float32))
        for name in want:
            close(got[name], want[name], name, type)
        assert not got["dbias"][hidden].any()


def hiding_options(how, bias):
    """Options by which every third pair is hidden, or most; the bias; and which pairs are seen."""
    rows, columns = bias.shape[2:]
    pair = np.add.outer(np.arange(rows), np.arange(columns)) % 3 != 0
    if how == "mask":
        return {"mask": pair[None, None]}, bias, pair
    if how == "mask_keys":
        return {"mask": pair[None, None, :1]}, bias, np.broadcast_to(pair[:1], pair.shape)
    if how == "bias":
        hidden = regard.store(np.where(pair, regard.load(bias), -np.inf), bias.dtype)
        return {}, hidden, pair
    if how == "top_left":
        return {"causal": "top_left"}, bias, np.tri(rows, columns, dtype=bool)
    count, length = (rows, columns) if how == "row_spans" else (columns, rows)
    begin = np.arange(count) % (length - 20)
    spans = np.stack([begin, begin + 9, begin + 11, begin + 19], -1).astype(np.int32)
    at = np.arange(length)[None] - begin[:, None]
    seen = (at >= 0) & (at < 19) & (at != 9) & (at != 10)
    return {how: spans[None, None]}, bias, seen if how == "row_spans" else seen.T


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("how", ["mask", "mask_keys", "bias", "top_left", "row_spans", "key_spans"])
def test_a_row_of_nan_reaches_dbias_of_its_visible_pairs(how, type, backend, dim=24, **more):
    """And not of its hidden ones, nor dk and dv of their keys. Key 20 has a score of -inf."""
    rows, columns, at = 40, 104, 24
    p = problem(1, 2, 2, rows, columns, dim, type=type)
    bias = normal(1, 2, rows, columns, type=type if type in ("f16", "bf16") else "f32", seed=7)
    options, bias, seen = hiding_options(how, bias)
    options |= {"backend": backend, **more}
    want = solve(**p, bias=bias, **options)
    spoilt = p | {"q": with_values(p["q"], np.s_[:, :, at], np.nan)}
    got = solve(**spoilt, bias=bias, **options)
    hidden, others = ~seen[at], [i for i in range(rows) if i != at]
    assert np.isnan(regard.load(got["dbias"])[:, :, at, seen[at]]).all()
    assert is_zero(got["dbias"][:, :, at, hidden])
    close(got["dbias"][:, :, others], want["dbias"][:, :, others], "dbias", type)
    for name in ("dk", "dv"):
        close(got[name][:, :, hidden], want[name][:, :, hidden], name)
    row = {"q": np.s_[..., 0], "k": np.s_[:, :, 20, 0]}
    infinite = {name: with_values(p[name], row[name], value)
                for name, value in (("q", 1), ("k", -np.inf))}
    first = int(np.argmax(seen[at]))
    got = solve(**(p | infinite), bias=with_values(bias, np.s_[:, :, at, first], np.nan), **options)
    assert np.isnan(regard.load(got["dbias"])[:, :, at, seen[at]]).all()
    assert is_zero(got["dbias"][:, :, at, hidden])


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("size", [1e3, 1e4])
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_scores(sign, size, type, backend):
    """Scores of that size, of both signs and all of one sign, keep the rule of accuracy."""
    for one_sign in (False, True):
        case = cases.make(("bottom_right",), type, sizes=(40, 150))
        factor = np.sqrt(size / 4)
        for name in ("q", "k"):
            values = case.values[name] * factor
            if one_sign:
                values = np.abs(values) * (sign if name == "q" else 1)
            stored = regard.store(values, regard.DTYPES[type])
            case.inputs[name], case.values[name] = stored, regard.load(stored)
        results = cases.run(case, backend)
        assert all(np.isfinite(regard.load(array)).all() for array in results.values())
        if type in ("f64", "f32"):
            cases.compare(case, results)
        else:
            got, want = regard.load(results["out"]), case.truth["out"]
            assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.parametrize("type", TYPES)
def test_score_of_minus_infinity_row_beside_huge_ones(type, backend):
    """A row whose visible keys come after whole blocks of hidden ones keeps its sum."""
    p = problem(1, 1, 1, 8, 300, 16, type=type)
    mask = np.zeros((1, 1, 8, 300), bool)
    mask[..., 280:] = True
    got = solve(**p, backend=backend, mask=mask)
    want = solve(p["q"], p["k"][:, :, 280:].copy(), p["v"][:, :, 280:].copy(), p["dout"],
                 backend=backend)
    close(got["out"], want["out"])
    close(got["dk"][:, :, 280:], want["dk"])
    assert is_zero(got["dk"][:, :, :280])


@pytest.mark.parametrize("type", ["bf16", "f32"])
def test_strides_over_2_to_the_31(type, backend):
    """Batch entries 2^31 + 16 elements apart, in memory that is reserved but never filled."""
    p = problem(2, 1, 1, 20, 70, 16, type=type)
    want = solve(**p, backend=backend)
    dtype, apart = regard.DTYPES[type], 2**31 + 16
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it since 3.13

    def far(array):
        memory = mmap.mmap(-1, (apart + array[0].size) * dtype.itemsize,
                           flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        room = np.frombuffer(memory, dtype)
        result = np.lib.stride_tricks.as_strided(
            room, array.shape, (apart * dtype.itemsize, *array.strides[1:]))
        result[...] = array
        return result

    into = {name: far(want[name]) for name in ("out", "dq", "dk", "dv")}
    for array in into.values():
        array[...] = cases.sentinel((1,), dtype)[0]
    got = solve(**{name: far(array) for name, array in p.items()}, backend=backend, into=into)
    same_bits(got, want)


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_one_key_gives_its_value_exactly(type, backend):
    """Every finite value of the type goes through unchanged, and comes back through dv."""
    every = np.arange(65536, dtype=np.uint16).view(regard.DTYPES[type]).reshape(8, 1, 128, 64)
    values = np.where(np.isfinite(regard.load(every)), regard.load(every), 1.0)
    if type == "bf16":  # bf16 instructions take denormal numbers for 0
        values[np.abs(values) < 2.0**-126] = 0
    v = regard.store(values.reshape(-1, 1, 1, 64), regard.DTYPES[type])
    keys = normal(len(v), 1, 1, 16, type=type)
    got = solve(keys, keys, v, backend=backend)
    assert np.array_equal(regard.load(got["out"]), regard.load(v))
    small = regard.store(np.where(np.abs(values) < 200, values, 1).reshape(-1, 1, 1, 64), v.dtype)
    got = solve(keys, keys, np.zeros_like(v), small, backend=backend)
    assert np.array_equal(regard.load(got["dv"]), regard.load(small))
