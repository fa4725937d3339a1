"""Adversarial inputs on the emulated GPU, of each family: a few of test_adversarial.py's.

As test_emulated.py, whose environment these tests need.
"""

import numpy as np
import pytest

import regard_ctypes as regard
import test_adversarial as adversarial
import test_edges as edges
from selection import mostly_exhaustive, one_in
from solve import close, problem, solve, with_values

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

FAMILIES = [("mma", "bf16"), ("mma", "f32"), ("wgmma", "bf16"), ("wgmma", "f32"), ("simt", "f64")]


def each_family(first):
    """All families; in `make test` each second one, in turn with that of another kind of input."""
    return pytest.mark.parametrize("family, type", one_in(2, FAMILIES, first))


def backend(family):
    return f"emulated:{family}+sm_90+mixed"


@each_family(0)
@pytest.mark.parametrize("depth", mostly_exhaustive([100, 2000], 2000))
def test_rows_far_below_zero(depth, family, type):
    adversarial.test_rows_far_below_zero(depth, ("sink",), type, backend(family))


@each_family(1)
@pytest.mark.parametrize("sizes", one_in(2, [((64, 192),), ((192, 64),)]), ids=str)
def test_half_a_tile_behind_whole_ones(sizes, family, type):
    adversarial.test_half_a_tile_behind_whole_ones(sizes, ("bottom_right",), type, backend(family))


@each_family(0)
def test_a_tenth_of_the_sequences_is_empty(family, type):
    adversarial.test_a_tenth_of_the_sequences_is_empty("both", type, backend(family))


@each_family(1)
@pytest.mark.parametrize("stride", [0, 99990001])
def test_strides_of_axes_of_one(stride, family, type):
    base = adversarial.ONES[0]
    if family == "wgmma":  # TMA takes strides of whole multiples of 16 bytes
        stride = stride // 8 * 8
    adversarial.test_strides_of_axes_of_one(base, stride, type, backend(family))


@each_family(0)
def test_an_infinite_delta_makes_dsink_infinite(family, type):
    """And not NaN, which a compensated sum makes of it."""
    given = problem(1, 1, 1, 300, 64, 64, type=type)
    given["dout"] = with_values(given["dout"], (0, 0, 5, 0), np.inf)
    results = solve(**given, backend=backend(family), sink=np.zeros(1, np.float32))
    factor = regard.load(results["out"])[0, 0, 5, 0]
    assert results["dsink"][0] == (-np.inf if factor > 0 else np.inf)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_lse_beyond_the_terms_of_f16(sign):
    """lse / scale of one row is 2.3e9: the first term of three in f16 would be infinite, and the
    row's gradients 0, or all of dk and dv NaN."""
    given = problem(1, 1, 1, 128, 128, 64, type="f16")
    given["q"] = with_values(given["q"], (0, 0, 5, slice(None)), sign * 6000)
    near = 0.01 * regard.load(given["k"]) + 6000
    given["k"] = regard.store(near, given["k"].dtype)
    got, want = (solve(**given, scale=2.0**-12, backend=name)
                 for name in (backend("wgmma"), "reference"))
    for name in ("dq", "dk", "dv"):
        other_rows = np.s_[:, :, np.arange(128) != 5] if name == "dq" else np.s_[:]
        close(got[name][other_rows], want[name][other_rows], name)
        assert np.isfinite(regard.load(got[name])).all()
    assert regard.load(got["dq"])[0, 0, 5].any()


# Warps that share keys; splits that the last block merges; that combine merges; of wgmma; one block.
SCORES_OF_MINUS_INFINITY = [
    ("mma+sm_90", "bf16", 1, 4, 700), ("mma+sm_90", "f16", 1, 1, 6000),
    ("mma+sm_80", "bf16", 2, 1, 3000), ("wgmma+sm_90", "bf16", 1, 200, 1500),
    ("mma+sm_90", "f32", 1, 100, 700), ("simt+sm_90", "f32", 1, 3, 700)]


@pytest.mark.parametrize("kernel, type, heads, rows, columns", SCORES_OF_MINUS_INFINITY, ids=str)
def test_a_weight_of_zero_times_infinity(kernel, type, heads, rows, columns):
    """Scores of -inf have weights of 0, which are factors: also in a part of the keys that holds no
    other score."""
    given = problem(1, heads, 1, rows, columns, 64, type=type)
    del given["dout"]
    given["q"] = regard.store(np.abs(regard.load(given["q"])), given["q"].dtype)
    k = given["k"]
    middle = np.s_[:, :, columns // 6 : columns - columns // 6]
    given["k"] = with_values(k, (*middle, 3), -np.inf)
    given["v"] = with_values(given["v"], (0, 0, columns // 2, 1), np.inf)
    out = regard.load(solve(**given, backend=f"emulated:{kernel}+mixed")["out"])
    assert np.isnan(out[..., 1]).all()
    assert np.isfinite(np.delete(out, 1, -1)).all()


# Every number of columns that a lane has when a warp computes rows again; batches of four rows.
@pytest.mark.parametrize("more", [{}, {"softcap": 3.0, "dropout": (0.3, 5, 0)}], ids=str)
@pytest.mark.parametrize("dim_v", mostly_exhaustive([32, 64, 96, 128, 160, 192, 224, 256], 96))
@pytest.mark.parametrize("family, type", [("mma", "bf16"), ("mma", "f32"), ("wgmma", "f16")])
def test_rows_that_do_not_see_a_nan_are_computed_again(family, type, dim_v, more):
    tensors = problem(1, 2, 1, 150, 150, 64, dim_v, type=type)
    del tensors["dout"]
    v = with_values(tensors["v"], (0, 0, 149, slice(None)), np.nan)
    spoilt = tensors | {"v": with_values(v, (0, 0, 141, 1), np.inf)}
    results = [solve(**given, backend=backend(family), causal="bottom_right", **more)
               for given in (tensors, spoilt)]
    for name in ("out", "lse"):
        want, got = (result[name][:, :, :141] for result in results)
        close(got, want, name)
    out = regard.load(results[1]["out"])
    assert not np.isfinite(out[:, :, 149]).any()
    assert np.isfinite(np.delete(out[:, :, 141:149], 1, -1)).all()
    assert more or not np.isfinite(out[:, :, 141:149, 1]).any()


HIDING = ["mask", "row_spans", "bias", "key_spans", "mask_keys", "top_left"]
MORE = [{}, {"softcap": 3.0}, {"dropout": (0.3, 5, 0)}]
KERNELS = [("mma", "bf16", 64), ("wgmma", "bf16", 64), ("mma", "f32", 64), ("wgmma", "f16", 192),
           ("wgmma", "f32", 64), ("simt", "f64", 24), ("mma", "f16", 128)]


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("family, type, dim, how, more", one_in(11, (
    (*kernel, how, more) for kernel in KERNELS for how in HIDING for more in MORE)), ids=str)
def test_a_row_of_nan_reaches_dbias_of_its_visible_pairs(family, type, dim, how, more):
    edges.test_a_row_of_nan_reaches_dbias_of_its_visible_pairs(
        how, type, backend(family), dim, **more)
