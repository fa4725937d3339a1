"""Gradients of f32 by hi and lo parts of f16 (family wgmma) on the emulated machine, against the oracle.

These tests need the environment of test_emulated.py. Up to 64 columns a warpgroup has dk and dv of 64
keys. Above, or if bias and mask leave no room, one warpgroup has dv and another dk.
"""


import itertools

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from solve import normal, problem, solve, with_values
from selection import mostly_exhaustive, one_in

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

BACKEND = "emulated:wgmma+sm_90+mixed"
GRADIENTS = ["dq", "dk", "dv"]

# With tails of rows, keys and columns, and whatever strides.
CASES = [  # features, (Sq, Sk), D, Dv, deterministic
    ((), (70, 90), 64, 64, False),
    (("bottom_right", "grouped"), (130, 200), 64, 64, False),
    (("top_left", "window", "dlse"), (200, 190), 40, 56, True),
    (("packed", "bottom_right"), (140, 150), 64, 48, False),
    (("seqused", "gaps"), (100, 150), 17, 33, True),
    (("accumulate", "sink", "reversed"), (70, 130), 64, 64, False),
    (("softcap", "bottom_right"), (100, 150), 64, 64, False),
    (("softcap", "scale", "alibi_batch", "dropout", "seqused", "window", "bottom_right", "grouped",
      "dlse", "gaps", "odd"), (70, 133), 64, 64, False),
    # One warpgroup for dv and one for dk.
    (("negative_scale", "bshd"), (65, 65), 128, 128, False),
    (("grouped", "top_left"), (150, 70), 96, 128, True),
    (("packed", "window", "stride_0"), (140, 150), 72, 16, False),
    (("alibi", "dropout"), (70, 133), 128, 128, True),
    (("softcap", "seqused", "bottom_right"), (100, 150), 128, 80, False),
    (("mask", "bias", "sink"), (70, 136), 64, 64, False),
    (("negative_scale", "mask"), (70, 133), 64, 64, False),
    (("mask_keys", "bias_keys", "packed"), (100, 133), 128, 96, False),
    (("bias_infinite", "seqused", "dropout"), (70, 136), 40, 64, False)]


@pytest.mark.parametrize("features, sizes, dim, dim_v, deterministic", one_in(6, CASES), ids=str)
def test_gradients_of_f32(features, sizes, dim, dim_v, deterministic):
    case = cases.make(features, "f32", sizes=sizes, dim=dim, dim_v=dim_v)
    case.options["deterministic"] = int(deterministic)
    no_dbias = {"wanted": GRADIENTS} if any("bias" in x for x in features) else {}
    cases.compare(case, cases.run(case, BACKEND, **no_dbias))


@pytest.mark.parametrize("dim", mostly_exhaustive([32, 96], 32))
@pytest.mark.parametrize("wanted", GRADIENTS)
def test_one_gradient_alone(wanted, dim):
    case = cases.make(("top_left", "grouped"), "f32", sizes=(100, 140), dim=dim)
    cases.compare(case, cases.run(case, BACKEND, wanted=[wanted]))


@pytest.mark.parametrize("name, low, high, dim", one_in(12, (
    (name, *range) for name in ["q", "k", "v", "dout"]
    for range in [(-6, 6, 64), (-30, -24, 32), (6, 9, 96)])))
def test_rows_of_any_size(name, low, high, dim):
    """Rows from tiny to huge next to one another: as exact as where nothing is scaled or split."""
    scale = 0.2 * 10.0 ** -((low + high) / 2) if name in "qk" else 1.0
    given = problem(1, 4, 2, 140, 200, dim, seed=7)
    rng = np.random.default_rng([abs(high), len(name)])
    given[name] *= np.float32(10.0) ** rng.uniform(low, high, given[name].shape[:-1] + (1,)).astype(
        np.float32)
    exact = solve(**{n: x.astype(np.float64) for n, x in given.items()}, backend="emulated:simt",
                  scale=scale, causal="top_left")
    errors = []
    for backend in (BACKEND, "emulated:simt"):
        got = solve(**given, backend=backend, scale=scale, causal="top_left")
        for gradient in GRADIENTS:
            assert np.isfinite(got[gradient]).all(), (backend, gradient)
            apart = np.linalg.norm(got[gradient] - exact[gradient], axis=-1)
            size = np.linalg.norm(exact[gradient], axis=-1)
            rows = apart / np.maximum(size, 1e-300)
            errors.append([np.linalg.norm(apart) / np.linalg.norm(size), np.median(rows),
                           np.quantile(rows, 0.9)])
    split, plain = np.array(errors[:3]), np.array(errors[3:])
    assert (split <= 8 * plain + 4e-6).all(), (split, plain)


@pytest.mark.parametrize("name, spoilt, dim", one_in(9, itertools.product(
    ["q", "k", "v", "dout"], [np.nan, np.inf, 3e38], [64, 128])))
def test_what_is_not_finite(name, spoilt, dim):
    """What one row holds is felt as by kernels in which a hidden pair has no share at all."""
    given = {n: normal(1, 2, 150, dim, type="f32", seed=i)
             for i, n in enumerate(["q", "k", "v", "dout"])}
    given[name] = with_values(given[name], np.s_[:, :, 77], spoilt)
    got, want = (solve(**given, backend=backend, causal="top_left")
                 for backend in (BACKEND, "emulated:simt"))
    for gradient in GRADIENTS:
        rows = np.isfinite(want[gradient]).all(axis=-1)
        same = np.isfinite(got[gradient]).all(axis=-1)
        # What overflows on the way may be in range where each row has a factor.
        assert same[rows].all() if spoilt == 3e38 else np.array_equal(rows, same), gradient
        size = np.abs(want[gradient][rows]).max(axis=-1, keepdims=True, initial=0)
        error = np.abs(got[gradient][rows] - want[gradient][rows])
        assert (error <= 2e-5 * np.maximum(size, 0.1)).all(), gradient
