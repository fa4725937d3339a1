"""What a workspace held before, on the emulated machine: the forward pass clears nothing of it.

As test_emulated.py, whose environment these tests need. Tiles are counted, and marks announced, in
words that begin as anything, and hold the number of a call: here that of the seed in the backend's
name. A graph that is replayed finds its own number again.
"""

import ctypes

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from cases import sentinel
from solve import problem, same_bits, solve, with_values
from selection import mostly_exhaustive, one_in

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

ALIGNMENT = 256  # of a GPU's workspace, in bytes
CALLS = ["3", "3", "7", "3"]  # seeds of calls that share a workspace


@pytest.fixture(autouse=True)
def run_every_kernel(monkeypatch):
    """Also those of flagged rows where the call flagged none: they must see no old flags."""
    monkeypatch.setenv("REGARD_EMULATOR_FIXUPS", "always")


def room(size, byte):
    """So many bytes that hold the byte, as arguments of a call; and the array that keeps them."""
    memory = np.full(size + ALIGNMENT, byte, np.uint8)
    begin = memory.ctypes.data + -memory.ctypes.data % ALIGNMENT
    return {"workspace": ctypes.c_void_p(begin), "workspace_size": size}, memory


def forward(case, backend, **how):
    results = cases.Outputs()
    results.add("out", case.dout.shape, case.dout.dtype, case.spec["layout"])
    results.add("lse", case.truth["lse"].shape, np.dtype(np.float32), case.spec["layout"])
    regard.forward(case.attention(), results["out"], results["lse"], backend=backend, **how)
    return results


# Tiles that come from a counter: 200 and more for 132 multiprocessors, some of them without rows.
@pytest.mark.parametrize("byte, order", mostly_exhaustive(
    [(0x00, "forward"), (0x5A, "mixed"), (0xFF, "backward")], (0x5A, "mixed")))
@pytest.mark.parametrize("type, features, sizes", one_in(4, [
    ("f16", ("packed",), (150, 90)), ("bf16", ("top_left",), (80, 90)),
    ("bf16", ("seqused", "window", "bottom_right"), (70, 140)),
    ("f32", ("packed", "top_left"), (140, 70))]), ids=str)
def test_tiles_are_counted_from_anything(type, features, sizes, byte, order):
    backend = f"emulated:wgmma+sm_90+{order}+"
    case = cases.make(features, type, sizes=sizes, dim=16, batch=10, heads=(20, 20))
    size = regard.workspace(case.attention(), "forward", backend=backend + "3")
    given, memory = room(size, byte)
    want = None
    for seed in CALLS:
        got = forward(case, backend + seed, **given)
        if want is None:
            cases.compare(case, got)
            want = got
        same_bits(got, want)
    assert (memory[:size] != byte).any(), "the workspace was not used"


@pytest.mark.parametrize("byte", mostly_exhaustive([0x00, 0x5A, 0xFF], 0x5A))
@pytest.mark.parametrize("family, type, sizes", [
    ("wgmma", "bf16", (100, 200)), ("wgmma", "f32", (100, 200)), ("mma", "bf16", (100, 200)),
    ("mma@rows=32,warps=4,slices=2", "f16", (70, 140)), ("mma", "bf16", (2, 3000))], ids=str)
def test_marks_are_seen_whatever_there_was(family, type, sizes, byte):
    """A NaN in a value that some rows do not see, in every second call."""
    tensors = problem(1, 2, 2, *sizes, 32, type=type)
    del tensors["dout"]
    spoilt = tensors | {"v": with_values(tensors["v"], (0, 0, sizes[1] - 1, 3), np.nan)}
    options = {"causal": "bottom_right"}
    name = f"emulated:{family}+sm_90+"
    attention = regard.Attention(tensors["q"], tensors["k"], tensors["v"], **options)
    given, _memory = room(regard.workspace(attention, "forward", backend=name + "1"), byte)
    for seed in CALLS:
        for arrays in (spoilt, tensors):
            out = sentinel(arrays["q"].shape, arrays["q"].dtype)
            attention = regard.Attention(arrays["q"], arrays["k"], arrays["v"], **options)
            regard.forward(attention, out, None, backend=name + seed, **given)
            want = solve(**arrays, backend="emulated:simt", **options)["out"]
            unit = {"f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}[type]
            np.testing.assert_allclose(regard.load(out), regard.load(want), atol=unit, rtol=unit)
