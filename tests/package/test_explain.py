"""explain, prepare and info: what is said about calls and machines that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import regard


def shaped(*shape, dtype="bfloat16"):
    return SimpleNamespace(shape=shape, dtype=dtype)


def test_explain_of_arrays():
    q = np.ones((2, 3, 10, 16), np.float32)
    explanation = regard.explain(q, q, q, causal=True, pass_="backward")
    assert explanation.supported and explanation.backend.startswith("cpu:")
    assert explanation.pairs == 2 * 3 * 55 and explanation.flops == 55 * 6 * 2 * 5 * 16
    assert str(explanation).splitlines()[0].startswith("problem")


def test_explain_of_shapes_for_a_chip_that_is_not_here():
    q, k = shaped(1, 8, 4096, 128), shaped(1, 2, 4096, 128)
    explanation = regard.explain(q, k, k, causal=True, device="sm_80")
    assert explanation.backend == "cuda:mma" and "sm_80" in str(explanation)
    with pytest.raises(regard.Unavailable, match="device = tpu"):
        regard.explain(q, k, k, device="tpu")
    with pytest.raises(regard.InvalidArgument, match="pass"):
        regard.explain(q, k, k, pass_="sideways")
    with pytest.raises(regard.WrongType, match="q"):
        regard.explain(shaped(1, 8, 4, 16, dtype="int8"), k, k)


def test_explain_says_what_is_not_supported():
    q = shaped(1, 1, 8, 600)
    explanation = regard.explain(q, q, q, device="sm_90")
    assert not explanation.supported and "512" in str(explanation)


def test_prepare_has_nothing_to_do_on_the_cpu():
    q = np.ones((1, 1, 4, 8), np.float32)
    regard.prepare(q, q, q)


@pytest.mark.parametrize("device, error", [
    (-1, regard.InvalidArgument), (True, regard.WrongType), (2**20, regard.Unavailable)])
def test_trim_memory_refuses_what_is_no_gpu(device, error):
    with pytest.raises(error, match="device"):
        regard.trim_memory(device)


def test_info():
    info = regard.info()
    names = [backend.name for backend in info.backends]
    assert {"reference", "cpu:scalar", "cuda:mma", "cuda:simt"} <= set(names)
    assert info.version == regard.__version__ == regard.version()
    assert all(name in str(info) for name in names) and info.threads >= 1


def test_info_says_why_kernels_are_not_kept(tmp_path):
    tmp_path.chmod(0o777)  # anybody could put a kernel there
    code = "import regard; info = regard.info(); print(info.cache_fault, info, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env=os.environ | {"REGARD_CACHE_DIR": str(tmp_path)})
    fault, *table = done.stdout.splitlines()
    assert str(tmp_path) in fault
    assert [line for line in table if line.endswith(f"none: {fault}")] != []
    shown = regard.info()
    shown.skipped.append("/lib/libnvrtc.so is another user's")
    assert re.search("not trusted +/lib/libnvrtc.so is another user's", str(shown))


def test_forced_backends_agree():
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((1, 2, 40, 32)) for _ in range(3))
    want = regard.attention(q, k, v, backend="reference")
    for backend in regard.info().backends:
        if backend.available and backend.name.startswith("cpu"):
            got = regard.attention(q, k, v, backend=backend.name)
            np.testing.assert_allclose(got, want, atol=1e-13)
