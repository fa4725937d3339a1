"""Inputs that are copied before the kernels of families wgmma and mma load them, on the emulated
machine.

As test_emulated.py, whose environment these tests need.
"""


import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import one_in

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

BACKEND = "emulated:wgmma+sm_90+mixed"

# What is copied first: rows that begin within 16 bytes, strides of 0 or below, f32 dout.
COPIED = [  # type, features, (Sq, Sk), D, Dv
    ("f16", ("packed",), (70, 90), 64, 12),
    ("bf16", ("packed", "gaps", "f32_outputs", "grouped"), (100, 130), 40, 40),
    ("bf16", ("stride_0", "seqused", "bottom_right"), (70, 130), 64, 64),
    ("f16", ("reversed", "dropout", "accumulate"), (65, 90), 72, 33),
    ("bf16", ("f32_outputs", "sink", "dlse"), (70, 90), 64, 64)]


@pytest.mark.parametrize("type, features, sizes, dim, dim_v", one_in(2, COPIED), ids=str)
def test_copied_inputs(type, features, sizes, dim, dim_v):
    case = cases.make(features, type, sizes=sizes, dim=dim, dim_v=dim_v)
    cases.compare(case, cases.run(case, BACKEND))


UNALIGNED = [
    ("f16", ("seqused", "dropout"), (140, 300), 33, 12),
    ("bf16", ("bottom_right", "accumulate"), (130, 260), 36, 64)]


@pytest.mark.parametrize("type, features, sizes, dim, dim_v", UNALIGNED, ids=str)
def test_unaligned_rows_of_mma(type, features, sizes, dim, dim_v):
    case = cases.make(features, type, sizes=sizes, dim=dim, dim_v=dim_v)
    backend = "emulated:mma+sm_86+mixed"
    assert "copied first" in regard.explain(case.attention(), "backward", backend=backend)[0]
    cases.compare(case, cases.run(case, backend))


@pytest.mark.parametrize("scale", [1e-8, 1e5])
def test_a_wide_dout_beyond_its_narrow_type(scale):
    """delta, and with it the gradient of sinks, is of dout as it is given."""
    case = cases.make(("f32_outputs", "sink"), "f16", sizes=(70, 90), dim=64)
    case.dout[...] = (case.dout * scale).astype(np.float32)
    got, want = (regard.load(cases.run(case, name, wanted=["dsink"])["dsink"])
                 for name in (BACKEND, "emulated:simt"))
    assert np.allclose(got, want, rtol=1e-2, atol=1e-2 * np.abs(want).max()), (got, want)
