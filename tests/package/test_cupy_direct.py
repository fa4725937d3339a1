"""As test_numpy_direct.py for CuPy's arrays: those of the tests' own CuPy, on an emulated GPU."""

from __future__ import annotations

import pytest
from fake_process import BUILD, run


@pytest.mark.parametrize("chip", ["sm_86", "sm_90"])
def test_both_ways_give_the_same_bits(chip):
    run("direct_cupy_cases.py", folders=["emulated_gpu"], REGARD_EMULATED_CHIP=chip,
        REGARD_CACHE_DIR=str(BUILD / "emulated_kernels/of_cupy"))
