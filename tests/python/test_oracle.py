"""Tests of the yardsticks themselves: the oracle by closed forms and differences, Philox by its
published vectors, the rounding to bf16."""

import numpy as np
import pytest

import cases
import philox
from oracle import attention
from regard_ctypes import from_bf16, to_bf16


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


# The known answers that Random123 publishes (kat_vectors, philox4x32 10).
@pytest.mark.parametrize("counter, key, answer", [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_known_answers(counter, key, answer):
    assert tuple(int(word) for word in philox.philox4x32(counter, key, 10)) == answer


@pytest.mark.parametrize("value, bits", [
    (1.0, 0x3F80), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (1 + 2**-8 + 2**-20, 0x3F81),
    (-0.0, 0x8000), (np.inf, 0x7F80), (3.4e38, 0x7F80), (3.38e38, 0x7F7E), (2.0**-133, 0x0001),
    (2.0**-134, 0x0000), (np.nan, 0x7FC0),
])
def test_bf16_rounds_to_nearest_even(value, bits):
    assert int(to_bf16(np.array([value], np.float32))["bf16"][0]) == bits


def test_bf16_round_trip():
    every = np.arange(65536, dtype=np.uint16)
    values = from_bf16(every.view([("bf16", np.uint16)]))
    back = to_bf16(values)["bf16"]
    nan = np.isnan(values)
    assert np.array_equal(back[~nan], every[~nan]) and np.isnan(values).sum() == 2 * 127


def test_equal_scores_give_the_mean():
    v = random(1, 1, 5, 3)
    got = attention(np.zeros((1, 1, 2, 4)), random(1, 1, 5, 4), v)
    np.testing.assert_allclose(got["out"][0, 0], np.tile(v[0, 0].mean(axis=0), (2, 1)), rtol=1e-14)
    np.testing.assert_allclose(got["lse"], np.log(5), rtol=1e-15)


def test_two_keys_are_a_sigmoid():
    q, k, v = random(1, 1, 1, 2), random(1, 1, 2, 2, seed=1), np.array([[[[0.0], [1.0]]]])
    got = attention(q, k, v, scale=0.7, dout=np.ones((1, 1, 1, 1)))
    x = 0.7 * (q[0, 0, 0] @ (k[0, 0, 1] - k[0, 0, 0]))
    y = 1 / (1 + np.exp(-x))
    np.testing.assert_allclose(got["out"].item(), y, rtol=1e-14)
    slope = 0.7 * y * (1 - y)
    np.testing.assert_allclose(got["dq"][0, 0, 0], slope * (k[0, 0, 1] - k[0, 0, 0]), rtol=1e-12)
    np.testing.assert_allclose(got["dk"][0, 0, 1], slope * q[0, 0, 0], rtol=1e-12)
    np.testing.assert_allclose(got["dv"][0, 0, :, 0], [1 - y, y], rtol=1e-14)


def seen(sq, sk, **options):
    """Which keys each row sees, read off the output when v is the identity."""
    got = attention(np.zeros((1, 1, sq, 1)), np.zeros((1, 1, sk, 1)), np.eye(sk)[None, None],
                    **options)
    return (got["out"][0, 0] > 0).astype(int).tolist()


@pytest.mark.parametrize("options, picture", [
    ({"causal": "top_left"}, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]),
    ({"causal": "bottom_right"}, [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]),
    ({"window": (1, 0)}, [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]),
    ({"window": (0, -1)}, [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]),
    ({"window": (0, 1), "causal": "top_left"}, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]),
    ({"causal": "bottom_right", "seqused_k": [2]}, [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]),
    ({"seqused_q": [1], "causal": "bottom_right"}, [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]),
])
def test_visibility_by_hand(options, picture):
    assert seen(3, 4, **options) == picture


def test_alibi_by_hand():
    got = attention(np.zeros((1, 1, 2, 1)), np.zeros((1, 1, 3, 1)), np.zeros((1, 1, 3, 1)),
                    alibi_slopes=np.array([2.0]))
    e = np.exp(-2.0)
    np.testing.assert_allclose(got["lse"][0, 0], np.log([e + 1 + e, e * e + e + 1]), rtol=1e-15)


def test_empty_row_and_sink():
    q, k, v = random(1, 1, 2, 3), random(1, 1, 2, 3), random(1, 1, 2, 3)
    hidden = np.zeros((1, 1, 2, 2), bool)
    arguments = dict(dout=random(1, 1, 2, 3), dlse=np.array([[[0.25, 0.5]]]), mask=hidden)
    bare = attention(q, k, v, **arguments)
    assert np.all(bare["lse"] == -np.inf) and not bare["out"].any()
    assert not any(bare[name].any() for name in ("dq", "dk", "dv"))
    sunk = attention(q, k, v, sink=np.array([1.5]), **arguments)
    assert np.all(sunk["lse"] == 1.5) and not sunk["out"].any()
    assert sunk["dsink"].tolist() == [0.75]


CASES = {
    "plain": {},
    "softcap": {"softcap": 1.2},
    "negative_scale": {"scale": -0.6},
    "causal": {"causal": "bottom_right"},
    "window": {"causal": "top_left", "window": (2, -1)},
    "alibi": {"alibi_slopes": np.array([[0.3, 0.1], [0.2, 0.7]])},
    "mask": {"mask": np.random.default_rng(1).random((2, 1, 4, 5)) < 0.6},
    "dropout": {"keep": np.random.default_rng(2).random((2, 2, 4, 5)) < 0.5, "p": 0.5},
    "sink": {"sink": np.array([0.4, -0.3])},
    "seqused": {"seqused_q": [4, 2], "seqused_k": [3, 5], "causal": "bottom_right"},
    "everything": {"sink": np.array([0.4, -0.3]), "softcap": 0.8, "causal": "bottom_right",
                   "keep": np.random.default_rng(3).random((2, 2, 4, 5)) < 0.7, "p": 0.3,
                   "alibi_slopes": np.array([0.3, 0.1])},
}
BIASES = [None, (2, 2, 4, 5), (1, 2, 4, 5), (2, 1, 1, 5), (1, 1, 4, 1), (4, 5)]


def differences(problem, dout, dlse, options):
    """Compares the gradients with central differences in every coordinate."""
    def loss(x):
        got = attention(**x, **options)
        finite = np.where(np.isfinite(got["lse"]), got["lse"], 0)
        return (got["out"] * dout).sum() + (finite * dlse).sum()

    gradients = attention(**problem, dout=dout, dlse=dlse, **options)
    for name, value in problem.items():
        numeric = np.zeros(value.size)
        for index in range(value.size):
            ends = []
            for step in (1e-5, -1e-5):
                moved = value.copy()
                moved.flat[index] += step
                ends.append(loss(problem | {name: moved}))
            numeric[index] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(gradients["d" + name].ravel(), numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_by_differences(case, bias):
    options = dict(CASES[case])
    problem = {"q": random(2, 2, 4, 3), "k": random(2, 1, 5, 3), "v": random(2, 1, 5, 2)}
    if bias:
        problem["bias"] = random(*bias)
    if "sink" in options:
        problem["sink"] = options.pop("sink")
    differences(problem, random(2, 2, 4, 2, seed=5), random(2, 2, 4, seed=6), options)


def test_packed_gradients_by_differences():
    options = {"cu_seqlens_q": [0, 3, 3, 7], "cu_seqlens_k": [0, 2, 4, 9], "max_seqlen_q": 4,
               "max_seqlen_k": 5, "causal": "bottom_right"}
    problem = {"q": random(7, 2, 3), "k": random(9, 1, 3), "v": random(9, 1, 2),
               "bias": random(3, 1, 4, 5)}
    differences(problem, random(7, 2, 2, seed=5), random(2, 7, seed=6), options)
    packed = attention(**problem, **options)
    alone = attention(problem["q"][3:].swapaxes(0, 1)[None], problem["k"][4:].swapaxes(0, 1)[None],
                      problem["v"][4:].swapaxes(0, 1)[None], bias=problem["bias"][2:],
                      causal="bottom_right")
    assert np.array_equal(packed["out"][3:].swapaxes(0, 1), alone["out"][0])
    assert np.array_equal(packed["lse"][:, 3:], alone["lse"][0])


@pytest.mark.parametrize("type, error", [("f64", 1e-12), ("f32", 1e-5), ("f16", 0.03),
                                         ("bf16", 0.25)])
def test_the_rule_of_accuracy_catches(type, error):
    """The oracle's answer rounded to the type keeps the rule; with this relative error it fails."""
    case = cases.make(("grouped", "bias", "bottom_right"), type)
    case.start = {}
    dtype = cases.regard.DTYPES[type]
    for name in ("out", "dq", "dk", "dv", "dbias"):
        cases.compare(case, {name: cases.regard.store(case.truth[name], dtype)})
        with pytest.raises(AssertionError):
            cases.compare(case, {name: cases.regard.store(case.truth[name] * (1 + error), dtype)})
