"""Decoding by stream-K, on the emulated machine: blocks have equal shares of the keys of all heads.

These tests need the environment of test_emulated.py. With few multiprocessors, few and short heads
are shared out: a block has parts of two heads, and whole ones between them, or a part of one.
"""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import mostly_exhaustive, one_in
from solve import normal
from test_emulated import pytestmark as pytestmark

# Sequences without rows, without keys, with fewer keys than a unit; windows; tiles of 16 and 32 rows.
STREAMS = [  # type, features, B, (Hq, Hkv), (Sq, Sk), D, Dv, multiprocessors
    ("bf16", ("seqused", "bottom_right"), 6, (4, 2), (5, 1300), 64, 64, 5),
    ("bf16", (), 7, (2, 1), (1, 3000), 64, 64, 3),
    ("f16", ("seqused", "sink", "dropout"), 7, (4, 1), (4, 1500), 128, 72, 3),
    ("bf16", ("packed", "bottom_right", "f32_outputs"), 4, (4, 2), (5, 1500), 64, 64, 3),
    ("f16", ("packed", "seqused", "window"), 4, (2, 2), (7, 1200), 64, 128, 2),
    ("bf16", ("positions", "window", "alibi", "dropout"), 6, (4, 2), (5, 1500), 64, 64, 3),
    ("f32", ("seqused", "mask", "softcap"), 5, (4, 2), (5, 900), 64, 40, 3),
    ("f16", ("seqused", "bias_head", "scale"), 6, (2, 2), (5, 1000), 128, 128, 5),
    ("bf16", ("seqused", "odd", "gaps"), 6, (4, 2), (5, 1300), 40, 24, 5),
    ("bf16", ("seqused", "mask_keys"), 5, (5, 1), (5, 1000), 64, 64, 2),
    ("bf16", ("seqused",), 3, (2, 1), (5, 9000), 64, 64, 11),
    ("f16", ("packed", "sink", "dlse"), 4, (4, 2), (5, 600), 256, 256, 2)]


def run(case, **how):
    results = cases.Outputs()
    wide = np.dtype(np.float32) if case.spec.get("f32_outputs") else case.dout.dtype
    results.add("out", case.dout.shape, wide, case.spec["layout"])
    results.add("lse", case.truth["lse"].shape, np.dtype(np.float32), case.spec["layout"])
    assert "stream-K" in regard.explain(case.attention(), "forward", **how)[0]
    regard.forward(case.attention(), results["out"], results["lse"], **how)
    return results


@pytest.mark.parametrize("type, features, batch, heads, sizes, dim, dim_v, multiprocessors",
                         one_in(3, STREAMS), ids=str)
@pytest.mark.parametrize("chip", mostly_exhaustive(["sm_90", "sm_80"], "sm_90"))
def test_stream_k(chip, type, features, batch, heads, sizes, dim, dim_v, multiprocessors):
    case = cases.make(features, type, batch=batch, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    results = run(case, backend=f"emulated:mma+{chip}+mixed+{dim}", multiprocessors=multiprocessors)
    cases.compare(case, results)


def attend(q, k, v, used, multiprocessors):
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:-1], np.nan, np.float32)
    attention = regard.Attention(q=q, k=k, v=v, seqused_k=np.array(used, np.int32))
    how = {"backend": "emulated:mma+sm_90+mixed+1", "multiprocessors": multiprocessors}
    assert "stream-K" in regard.explain(attention, "forward", **how)[0]
    regard.forward(attention, out, lse, **how)
    return out, lse


@pytest.mark.parametrize("used", one_in(3, [
    ([2000, 1, 1, 1],), ([1, 1, 1, 2000],), ([0, 0, 0, 0],), ([0, 2000, 0, 1999],),
    ([64, 65, 63, 0],), ([500, 500, 500, 500],)]), ids=str)
@pytest.mark.parametrize("multiprocessors", mostly_exhaustive([1, 2, 3], 3))
def test_any_lengths(used, multiprocessors):
    """However lengths are shared out: the results of each sequence by itself."""
    q, k, v = (normal(4, heads, length, 64, type="f16", seed=seed)
               for seed, (heads, length) in enumerate(((4, 2), (2, 2000), (2, 2000))))
    out, lse = attend(q, k, v, used, multiprocessors)
    again, lse_again = attend(q, k, v, used, multiprocessors)
    assert out.tobytes() == again.tobytes() and lse.tobytes() == lse_again.tobytes()
    scores = np.einsum("bhgid,bhjd->bhgij", q.reshape(4, 2, 2, 2, 64).astype(float), k.astype(float))
    scores = np.where(np.arange(2000) < np.array(used)[:, None, None, None, None], scores / 8, -np.inf)
    largest = np.where(np.array(used) > 0, 1, 0)[:, None, None, None] * scores.max(-1, initial=-1e9)
    weights = np.exp(scores - largest[..., None])
    sums = weights.sum(-1)
    with np.errstate(divide="ignore"):
        want_lse = (largest + np.log(sums)).reshape(lse.shape)
    want = np.einsum("bhgij,bhjd->bhgid", weights / np.maximum(sums, 1e-300)[..., None],
                     v.astype(float)).reshape(out.shape)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out.astype(float), want, atol=2e-3)
