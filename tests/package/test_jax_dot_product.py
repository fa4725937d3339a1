"""regard.jax.dot_product_attention against JAX's own, whose softmax is float32 in every type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import DEVICES, close, normal, wide_types

import regard
from regard.jax import dot_product_attention

TOLERANCE = 3e-6


@pytest.fixture(params=DEVICES, autouse=True)
def device(request):
    with wide_types(request.param):
        yield request.param


def inputs(len_q=7, len_k=7, heads=4, groups=2):
    return (normal(0, 3, len_q, heads, 8), normal(1, 3, len_k, groups, 8),
            normal(2, 3, len_k, groups, 8))


BIAS = np.random.default_rng(3).standard_normal((3, 4, 7, 7))
CASES = {
    "plain": ({}, {}),
    "shared by all": (dict(groups=1), {}),
    "scale": ({}, dict(scale=0.3)),
    "causal": ({}, dict(is_causal=True)),
    "causal, fewer queries": (dict(len_q=4), dict(is_causal=True)),
    "causal, more queries": (dict(len_q=9, len_k=5), dict(is_causal=True)),
    "window": ({}, dict(local_window_size=(2, 1))),
    "one number": ({}, dict(local_window_size=1)),
    "causal window": (dict(len_q=5), dict(is_causal=True, local_window_size=(2, 3))),
    "window, fewer queries": (dict(len_q=5), dict(local_window_size=(2, 1))),
    "bias": ({}, dict(bias=BIAS)),
    "bias of three dimensions": ({}, dict(bias=BIAS[0])),
    "mask": ({}, dict(mask=np.random.default_rng(4).random((3, 1, 7, 7)) < 0.8)),
    "lengths": ({}, dict(query_seq_lengths=np.int32([7, 3, 5]),
                         key_value_seq_lengths=np.int32([7, 2, 6]))),
    "lengths of keys, causal": ({}, dict(key_value_seq_lengths=np.int32([7, 2, 6]),
                                         is_causal=True)),
    "lengths and window": ({}, dict(key_value_seq_lengths=np.int32([7, 4, 6]),
                                    query_seq_lengths=np.int32([7, 4, 6]),
                                    local_window_size=(3, 2))),
    "window and mask": (dict(len_q=5), dict(local_window_size=(1, 2), mask=np.eye(5, 7) < 1)),
}


# Each of them compiles four functions; of each kind one is in `make test`.
CORE = {"plain", "causal window", "bias", "mask", "lengths and window"}


@pytest.mark.parametrize("sizes, options", [
    pytest.param(*case, id=name, marks=() if name in CORE else pytest.mark.exhaustive)
    for name, case in CASES.items()])
def test_values_and_gradients_are_jaxs(sizes, options):
    q, k, v = inputs(**sizes)
    arrays = {"bias": options["bias"]} if "bias" in options else {}
    fixed = {name: x for name, x in options.items() if name != "bias"}
    if "mask" in fixed and fixed["mask"].ndim == 4:
        fixed["mask"][..., 0] = True  # no empty row: the two differ there

    def run(function):
        return jax.value_and_grad(lambda x: jnp.sin(function(**x, **fixed)).sum())(
            {"query": q, "key": k, "value": v, **arrays})

    close(dot_product_attention(q, k, v, **arrays, **fixed),
          jax.nn.dot_product_attention(q, k, v, **arrays, **fixed), TOLERANCE)
    found, real = run(dot_product_attention), run(jax.nn.dot_product_attention)
    for name, x in found[1].items():
        close(x, real[1][name], 5 * TOLERANCE)


def test_without_a_batch_and_under_vmap():
    q, k, v = inputs()
    one = dot_product_attention(q[0], k[0], v[0], is_causal=True)
    close(one, jax.nn.dot_product_attention(q[0], k[0], v[0], is_causal=True), TOLERANCE)
    all_ = jax.vmap(lambda *x: dot_product_attention(*x, is_causal=True))(q, k, v)
    close(all_, dot_product_attention(q, k, v, is_causal=True))
    close(all_[0], one)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16])
def test_residual(dtype):
    q, k, v = (x.astype(dtype) for x in inputs())
    for at in (np.s_[:], 0):
        out, residual = dot_product_attention(q[at], k[at], v[at], return_residual=True)
        scores = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(k, 2, axis=2)) / np.sqrt(8)
        real = jax.nn.logsumexp(scores.astype(jnp.float64), axis=-1)[at]
        assert residual.dtype == dtype and out.shape == q[at].shape
        close(residual, real, 1e-12 if dtype == jnp.float64 else 2e-2)
    gradient = jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True)[1].sum())(q)
    assert not np.any(gradient)


def test_documented_differences():
    q, k, v = inputs()
    hidden = np.ones((7, 7), bool)
    hidden[2] = False
    out = dot_product_attention(q, k, v, mask=hidden)
    assert not np.any(out[:, 2]) and np.all(np.any(np.asarray(out[:, 3]), axis=-1))
    assert dot_product_attention(q, k, v[..., :3]).shape == (3, 7, 4, 3)


@pytest.mark.parametrize("change, text", [
    (dict(implementation="cudnn"), "implementation = 'cudnn'"),
    (dict(local_window_size=(-1, 0)), "local_window_size = "),
    (dict(local_window_size=1.5), "local_window_size = 1.5"),
    (dict(key=np.zeros((3, 7, 2, 9), np.float32)), "key = f32"),
    (dict(query=np.zeros((2, 3))), "query = an array of shape"),
    (dict(key=[1.0]), "key = a list"),
    (dict(mask=np.zeros((7, 7))), "mask = float64"),
    (dict(query_seq_lengths=np.int64([1, 2, 3])), r"query_seq_lengths = int64 \[3\]")])
def test_bad_arguments(change, text):
    q, k, v = inputs()
    with pytest.raises(regard.InvalidArgument, match="^" + text):
        dot_product_attention(**{"query": q, "key": k, "value": v, **change})


@pytest.mark.parametrize("right", [2**31 - 3, 2**31 - 1])
def test_a_window_may_be_as_large_as_int32(right):
    q, k, v = inputs()
    more = {"local_window_size": (1, right), "key_value_seq_lengths": np.full(3, 7, np.int32)}
    real = jax.nn.dot_product_attention(q, k, v, **{**more, "local_window_size": (1, 7)})
    close(dot_product_attention(q, k, v, **more), real, 1e-6)


def test_no_rank_is_promoted():
    q, k, v = inputs(len_k=4)
    mask = jnp.ones((1, 1, 7, 4), bool)
    with jax.numpy_rank_promotion("raise"):
        dot_product_attention(q, k, v, local_window_size=2, mask=mask)
