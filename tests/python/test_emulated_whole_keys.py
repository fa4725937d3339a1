"""Backward blocks of the mma family that see all keys of a sequence, and make delta and dq themselves,
on the emulated machine.

These tests need the environment of test_emulated.py.
"""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import mostly_exhaustive, one_in
from solve import normal, problem, solve, with_values

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

PROBLEMS = [  # type, features, (Hq, Hkv), (Sq, Sk), D, Dv
    ("bf16", ("dlse",), (2, 2), (50, 49), 64, 64),
    ("f16", ("packed", "accumulate", "odd"), (4, 2), (70, 60), 33, 61),
    ("bf16", ("seqused", "f32_outputs"), (2, 1), (100, 128), 128, 72),
    ("f16", ("dropout", "gaps"), (4, 2), (33, 30), 40, 64),
    ("bf16", ("softcap", "accumulate", "f32_outputs"), (2, 2), (40, 100), 64, 64),
    ("f16", ("delta", "negative_scale"), (2, 1), (130, 64), 200, 136),
    ("bf16", ("alibi", "reversed", "accumulate"), (2, 2), (65, 20), 128, 128),
    ("bf16", ("bshd",), (8, 1), (300, 77), 64, 64)]  # rows are split over blocks
HIDING = [
    ("bf16", ("bottom_right", "dlse"), (2, 2), (64, 50), 64, 64),  # rows that see no key
    ("f16", ("top_left", "packed", "odd"), (4, 2), (70, 60), 33, 61),
    ("bf16", ("window", "seqused", "f32_outputs"), (2, 1), (100, 128), 128, 72),
    ("f16", ("bottom_right", "dropout", "gaps", "accumulate"), (6, 2), (33, 60), 40, 64),
    ("bf16", ("mask", "softcap", "accumulate"), (2, 2), (40, 100), 64, 64),
    ("f16", ("row_spans", "delta"), (2, 1), (90, 64), 96, 128),
    ("bf16", ("top_left", "positions", "alibi"), (2, 2), (65, 20), 128, 128),
    ("bf16", ("key_spans", "top_left", "bshd", "f32_outputs", "accumulate"), (8, 1), (64, 77), 64, 64)]


def of_one_kernel(case, backend):
    text, _ = regard.explain(case.attention(), "backward", backend=backend)
    return "delta and dq in the same kernel" in text and "finish" not in text


@pytest.mark.parametrize("type, features, heads, sizes, dim, dim_v", one_in(3, PROBLEMS + HIDING),
                         ids=str)
@pytest.mark.parametrize("chip", mostly_exhaustive(["sm_90", "sm_86"], "sm_90"))
def test_whole_keys(chip, type, features, heads, sizes, dim, dim_v):
    case = cases.make(features, type, heads=heads, sizes=sizes, dim=dim, dim_v=dim_v)
    backend = f"emulated:mma+{chip}+mixed+{dim}"
    assert of_one_kernel(case, backend)
    cases.compare(case, cases.run(case, backend))


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("options", one_in(3, [
    ({"causal": "top_left"},), ({"causal": "bottom_right"},), ({"window": (5, 9), "dropout": (0.2, 7, 9)},),
    ({"mask": np.arange(70 * 90).reshape(1, 1, 70, 90) % 7 < 3, "softcap": 2.0},)]))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("spoilt", mostly_exhaustive([np.nan, np.inf], np.nan))
def test_what_hidden_pairs_hold(options, accumulate, spoilt):
    """Rows and keys that do not see what is not finite do not feel it, and results are added once."""
    given = problem(2, 4, 2, 70, 90, 64, type="bf16")
    for name, row in {"q": 40, "k": 55, "v": 20, "dout": 66}.items():
        given[name] = with_values(given[name], np.s_[0, -1, row], spoilt)
    got, want = (
        solve(**given, backend=backend, accumulate=accumulate, **options,
              into={"d" + x: with_values(given[x], np.s_[:], 1) for x in "qkv"})
        for backend in ("emulated:mma+sm_90+mixed", "emulated:simt"))
    for name in ("dq", "dk", "dv"):
        of = [regard.load(results[name]) for results in (got, want)]
        assert np.array_equal(*map(np.isfinite, of)) and not np.isfinite(of[0]).all(), name
        finite = np.isfinite(of[0])
        assert np.abs(of[0][finite] - of[1][finite]).max() < 0.02 * np.abs(of[1][finite]).max(), name


@pytest.mark.parametrize("wanted", mostly_exhaustive(["dq", "dk", "dv"], "dq"))
def test_one_gradient_alone(wanted):
    case = cases.make(("grouped",), "bf16", sizes=(90, 60), dim=64)
    cases.compare(case, cases.run(case, "emulated:mma+sm_90+mixed", wanted=[wanted]))


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("rows, more", one_in(2, [
    (64, {}), (64, {"softcap": 2.0}), (50, {"dropout": (0.2, 7, 9)})]))
def test_the_last_row_of_eight_heads(rows, more):
    """As many rows as a block has flags for. The last one, which sees all keys, holds NaN."""
    given = problem(1, 8, 1, rows, 60, 64, type="f16")
    given["q"] = with_values(given["q"], np.s_[0, -1, -1], np.nan)
    given["dout"] = with_values(given["dout"], np.s_[0, -1, -1], np.nan)
    # Packed: a sequence without rows, and one without keys.
    begins = [np.array(x, np.int32) for x in ([0, 4, 4, rows], [0, 0, 5, 60])]
    packed = {"cu_seqlens_q": begins[0], "max_seqlen_q": rows - 4,
              "cu_seqlens_k": begins[1], "max_seqlen_k": 55}
    for tables in ({}, packed):
        arrays = {x: y[0].swapaxes(0, 1) for x, y in given.items()} if tables else given
        got, want = (solve(**arrays, backend=backend, causal="bottom_right", accumulate=True,
                           into={"d" + x: with_values(arrays[x], np.s_[:], 1) for x in "qkv"},
                           **more, **tables)
                     for backend in ("emulated:mma+sm_90+mixed", "emulated:simt"))
        for name in ("dq", "dk", "dv"):
            of = [regard.load(results[name]) for results in (got, want)]
            finite = np.isfinite(of[1])
            assert np.array_equal(np.isfinite(of[0]), finite) and not finite.all(), name
            size = np.abs(of[1][finite]).max(initial=1)
            assert np.abs(of[0] - of[1])[finite].max(initial=0) < 0.02 * size, name


@pytest.mark.parametrize("feature", mostly_exhaustive(
    ["bias", "bias_infinite", "bias_keys", "bias_queries"], "bias_infinite"))
def test_a_bias_without_its_gradient(feature):
    case = cases.make((feature, "accumulate"), "bf16", sizes=(50, 60), dim=64)
    cases.compare(case, cases.run(case, "emulated:mma+sm_90+mixed", wanted=["dq", "dk", "dv"]))


@pytest.mark.parametrize("features, sizes", [(("sink",), (50, 50)), (("bias",), (50, 50)),
                                             (("top_left",), (600, 50))], ids=str)
def test_others_have_more_kernels(features, sizes):
    case = cases.make(features, "bf16", sizes=sizes, dim=64)
    assert not of_one_kernel(case, "emulated:mma+sm_90")


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("accumulate", mostly_exhaustive([False, True], False))
def test_a_sequence_without_keys(accumulate):
    """Its rows get a dq of 0, whatever dout holds there."""
    q, dout = (normal(40, 2, 32, type="bf16", seed=seed) for seed in (1, 2))
    k, v = (normal(30, 1, 32, type="bf16", seed=seed) for seed in (3, 4))
    dout[10:25] = regard.store(np.full((15, 2, 32), np.nan), dout.dtype)
    begins = {"cu_seqlens_q": np.array([0, 10, 25, 40], np.int32), "max_seqlen_q": 15,
              "cu_seqlens_k": np.array([0, 20, 20, 30], np.int32), "max_seqlen_k": 20}
    ones = {"d" + name: regard.store(np.ones(x.shape), x.dtype)
            for name, x in {"q": q, "k": k, "v": v}.items()}
    got = solve(q, k, v, dout, backend="emulated:mma+sm_90", accumulate=accumulate,
                into=ones if accumulate else None, **begins)
    dq = regard.load(got["dq"])
    assert (dq[10:25] == accumulate).all() and np.isfinite(dq).all()
    assert all(np.isfinite(regard.load(got[name])).all() for name in ("dk", "dv"))
