"""Relations between solved problems that hold whatever the right numbers are."""

import numpy as np
import pytest

import regard_ctypes as regard
from solve import TYPES, close, normal, problem, solve


def loaded(results):
    return {name: regard.load(array) for name, array in results.items()}


def relative(got, want, type, what=""):
    limit = {"f64": 1e-11, "f32": 1e-5, "f16": 8e-3, "bf16": 6e-2}[type]
    got, want = (x if x.dtype == np.float64 else regard.load(x) for x in (got, want))
    error = np.abs(got - want).max(initial=0)
    assert error <= limit * (np.abs(want).max(initial=0) + 1e-300), f"{what}: {error:.3g}"


@pytest.mark.parametrize("type", TYPES)
def test_permuted_keys(type, backend):
    p = problem(2, 4, 2, 33, 130, 24, type=type)
    bias = normal(1, 4, 33, 130, type="f32")
    order = np.random.default_rng(4).permutation(130)
    want = solve(**p, bias=bias, backend=backend)
    got = solve(**(p | {"k": p["k"][:, :, order], "v": p["v"][:, :, order]}),
                bias=np.ascontiguousarray(bias[..., order]), backend=backend)
    for name in ("out", "lse", "dq"):
        relative(got[name], want[name], type, name)
    for name in ("dk", "dv"):
        relative(got[name], want[name][:, :, order], type, name)
    relative(got["dbias"], want["dbias"][..., order], type, "dbias")


@pytest.mark.parametrize("type", TYPES)
def test_a_constant_in_every_score_of_a_row(type, backend):
    p = problem(2, 2, 2, 33, 130, 24, type=type)
    shift = np.linspace(-40, 40, 33, dtype=np.float32).reshape(1, 1, 33, 1)
    want = solve(**p, bias=np.zeros_like(shift), backend=backend)
    got = solve(**p, bias=shift, backend=backend)
    for name in ("out", "dq", "dk", "dv"):
        relative(got[name], want[name], type, name)
    np.testing.assert_allclose(got["lse"], want["lse"] + shift[..., 0], rtol=1e-5, atol=1e-5)
    assert np.abs(got["dbias"]).max() < 0.1  # the sum of ds over a row is 0


@pytest.mark.parametrize("type", TYPES)
def test_duplicated_keys_add_log_2(type, backend):
    p = problem(2, 2, 1, 33, 75, 24, type=type)
    want = solve(**p, backend=backend)
    twice = {name: np.concatenate([p[name]] * 2, axis=2) for name in ("k", "v")}
    got = solve(**(p | twice), backend=backend)
    np.testing.assert_allclose(got["lse"], want["lse"] + np.log(2), rtol=2e-6)
    relative(got["out"], want["out"], type)
    relative(got["dq"], want["dq"], type)
    for name in ("dk", "dv"):
        halves = regard.load(got[name])
        relative(halves[:, :, :75] + halves[:, :, 75:], want[name], type, name)


@pytest.mark.parametrize("type", TYPES)
def test_split_keys_merge_by_lse(type, backend):
    """Parts of the keys, with f32 outputs, weighted by exp(lse - whole lse), make the whole."""
    p = problem(2, 2, 1, 33, 200, 24, type=type)
    want = solve(**p, backend=backend)
    wide = np.dtype(np.float64 if type == "f64" else np.float32)
    parts = []
    for part in (np.s_[:, :, :3], np.s_[:, :, 3:130], np.s_[:, :, 130:]):
        parts.append(loaded(solve(p["q"], p["k"][part], p["v"][part], backend=backend,
                                  into={"out": np.zeros(p["q"].shape, wide)})))
    lse = np.logaddexp.reduce([part["lse"] for part in parts])
    np.testing.assert_allclose(want["lse"], lse, rtol=2e-6)
    out = sum(part["out"] * np.exp(part["lse"] - lse)[..., None] for part in parts)
    relative(want["out"], out, type)
    # The gradients of a part, told the whole's out and lse, are the whole's.
    for part in (np.s_[:, :, :3], np.s_[:, :, 3:130]):
        attention = regard.Attention(p["q"], p["k"][part].copy(), p["v"][part].copy())
        dk = np.zeros_like(p["k"][part])
        regard.backward(attention, want["out"], want["lse"], p["dout"], gradients={"dk": dk},
                        backend=backend)
        relative(dk, want["dk"][part], type)


@pytest.mark.parametrize("type", TYPES)
def test_grouped_heads_are_repeated_heads(type, backend):
    p = problem(2, 6, 2, 33, 75, 24, type=type)
    got = solve(**p, backend=backend, causal="bottom_right")
    repeated = {name: np.repeat(p[name], 3, axis=1) for name in ("k", "v")}
    want = solve(**(p | repeated), backend=backend, causal="bottom_right")
    for name in ("out", "lse", "dq"):
        close(got[name], want[name], name)
    for name in ("dk", "dv"):
        total = regard.load(want[name]).reshape(2, 2, 3, 75, 24).sum(axis=2)
        relative(got[name], total, type, name)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"scale": -0.4},
                                     {"dropout": (0.4, 1, 2)}, {"window": (20, 9)}], ids=str)
def test_sum_of_q_dq_is_sum_of_k_dk(options, type, backend):
    """Both are the sum of score * ds over a head; a softcap or a bias would not change that."""
    p = problem(2, 3, 3, 64, 75, 24, type=type)
    got = loaded(solve(**p, backend=backend, **options))
    q, k = regard.load(p["q"]), regard.load(p["k"])
    left, right = (q * got["dq"]).sum(axis=(2, 3)), (k * got["dk"]).sum(axis=(2, 3))
    size = np.abs(q * got["dq"]).sum(axis=(2, 3))
    limit = {"f64": 1e-12, "f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}[type]
    assert np.all(np.abs(left - right) <= limit * size)


@pytest.mark.parametrize("type", TYPES)
def test_visibility_in_three_words(type, backend):
    """A causal window as options, as a mask, and as a bias of -inf."""
    p = problem(2, 2, 1, 50, 130, 24, type=type)
    i, j = np.ogrid[:50, :130]
    seen = (j <= i + 80) & (j >= i + 80 - 30)
    want = solve(**p, backend=backend, causal="bottom_right", window=(30, -1))
    masked = solve(**p, backend=backend, mask=seen[None, None].copy())
    biased = solve(**p, backend=backend, bias=np.where(seen, 0, -np.inf).astype(np.float32)[
        None, None].copy())
    for name in want:
        relative(masked[name], want[name], type, name)
        relative(biased[name], want[name], type, name)


@pytest.mark.parametrize("type", TYPES)
def test_scale_of_v_and_dout(type, backend):
    """out is linear in v, and every gradient in dout: powers of two change no rounding."""
    p = problem(2, 2, 1, 33, 75, 24, type=type)
    want = loaded(solve(**p, backend=backend))
    quarter = {name: regard.store(regard.load(p[name]) * 4, p[name].dtype)
               for name in ("v", "dout")}
    by_v = loaded(solve(**(p | {"v": quarter["v"]}), backend=backend))
    assert np.array_equal(by_v["out"], want["out"] * 4)
    assert np.array_equal(by_v["dv"], want["dv"])
    by_dout = loaded(solve(**(p | {"dout": quarter["dout"]}), backend=backend))
    assert np.array_equal(by_dout["dv"], want["dv"] * 4)
    relative(by_dout["dq"], want["dq"] * 4, type)


@pytest.mark.parametrize("type", TYPES)
def test_sink_is_a_key_without_a_value(type, backend):
    p = problem(2, 2, 2, 33, 75, 24, type=type)
    sink = np.array([0.75, -2.0], np.float32)
    got = solve(**p, backend=backend, sink=sink)
    bias = np.zeros((1, 2, 1, 76), np.float32)
    bias[..., 75] = sink[:, None]
    extra = {name: np.concatenate([p[name], np.zeros_like(p[name][:, :, :1])], axis=2)
             for name in ("k", "v")}
    want = solve(**(p | extra), backend=backend, bias=bias)
    for name in ("out", "lse", "dq"):
        relative(got[name], want[name], type, name)
    for name in ("dk", "dv"):
        relative(got[name], want[name][:, :, :75], type, name)
    relative(got["dsink"], want["dbias"][0, :, 0, 75], type, "dsink")


@pytest.mark.parametrize("type", TYPES)
def test_lse_gradient_is_the_probabilities(type, backend):
    """With dout = 0 and dlse = 1, dbias is P itself and each of its rows sums to 1."""
    p = problem(1, 2, 2, 33, 75, 24, type=type)
    p["dout"] = np.zeros_like(p["dout"])
    wide = np.float64 if type == "f64" else np.float32
    bias = normal(1, 2, 33, 75).astype(wide)
    got = solve(**p, dlse=np.ones((1, 2, 33), wide), backend=backend, bias=bias)
    np.testing.assert_allclose(got["dbias"].sum(axis=-1), 1, rtol=2e-2 if type == "bf16" else 2e-3)
    assert got["dbias"].min() >= 0 and np.all(regard.load(got["dv"]) == 0)
    probabilities = got["dbias"].astype(np.float64)
    want = np.einsum("bhij,bhjd->bhid", probabilities, regard.load(p["k"])) / np.sqrt(24)
    relative(got["dq"], want, type)
