"""Calls over parts of the keys that make one result, by out, lse and delta."""

from __future__ import annotations

import numpy as np
import pytest
import regard

torch = pytest.importorskip("torch")


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def parts(q, k, v, dout, like, **options):
    """out, lse and gradients in float32, from three parts of the keys; rows first."""
    out, lse = like(q.shape[:-1] + v.shape[-1:]), like((q.shape[0], q.shape[2], q.shape[1]))
    sums = regard.Gradients(*(like(x.shape) for x in (q, k, v)))
    edges = [0, 64, 96, k.shape[1]]
    pieces = [slice(*pair) for pair in zip(edges, edges[1:])]
    options |= {"layout": "bshd", "causal": "top_left",
                "q_positions": like((1,)).astype(np.int32) if isinstance(q, np.ndarray) else
                like((1,)).int()}
    for at in pieces:
        regard.attention(q, k[:, at], v[:, at], out=out, lse=lse, k_position=at.start,
                         continue_from=at.start > 0, **options)
    products = (dout * out).sum(-1)
    delta = products.swapaxes(1, 2) if isinstance(q, np.ndarray) else products.transpose(1, 2)
    for at in pieces:
        into = regard.Gradients(sums.dq, sums.dk[:, at], sums.dv[:, at])
        regard.attention_backward(dout, q, k[:, at], v[:, at], None, lse, delta=delta, into=into,
                                  accumulate=True, k_position=at.start, **options)
    return out, lse, *(getattr(sums, name) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("type", ["numpy", "torch"])
def test_parts_are_the_whole(type):
    q, k, v, dout = rows(2, 100, 4, 16), rows(2, 150, 2, 16), rows(2, 150, 2, 24), rows(2, 100, 4, 24)
    options = {"layout": "bshd", "causal": "top_left"}
    out, lse = regard.attention(q, k, v, return_lse=True, **options)
    whole = regard.attention_backward(dout, q, k, v, out, lse, **options)
    if type == "numpy":
        found = parts(q, k, v, dout, lambda shape: np.zeros(shape, np.float32))
    else:
        found = [x.numpy() for x in parts(*map(torch.from_numpy, (q, k, v, dout)), torch.zeros)]
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), found):
        want = {"out": out, "lse": lse}.get(name, getattr(whole, name, None))
        np.testing.assert_allclose(x, want, rtol=0, atol=5e-6, err_msg=name)


def test_what_is_refused():
    q = rows(1, 2, 8, 16)
    out, lse = regard.attention(q, q, q, return_lse=True)
    for given in ({}, {"out": out}, {"lse": lse}):
        with pytest.raises(regard.InvalidArgument, match="continue_from = True: needs out and lse"):
            regard.attention(q, q, q, continue_from=True, **given)
    with pytest.raises(regard.WrongType, match="continue_from = 1"):
        regard.attention(q, q, q, out=out, lse=lse, continue_from=1)
    with pytest.raises(regard.InvalidArgument, match="multiprocessors = 3: needs out"):
        regard.attention(q, q, q, multiprocessors=3)
    with pytest.raises(regard.InvalidArgument, match="multiprocessors = -1"):
        regard.attention_backward(q, q, q, q, out, lse, multiprocessors=-1)
    with pytest.raises(regard.InvalidArgument, match="out = .*must not be given with delta"):
        regard.attention_backward(q, q, q, q, out, lse, delta=lse)
    with pytest.raises(regard.InvalidArgument, match="out = .*must be given"):
        regard.attention_backward(q, q, q, q, None, lse)
    half = q.astype(np.float16)
    with pytest.raises(regard.InvalidArgument, match="must be f32 with continue_from"):
        regard.attention(half, half, half, out=half.copy(), lse=lse, continue_from=True)
