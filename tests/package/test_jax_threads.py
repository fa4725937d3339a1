"""Calls of JAX's arrays on the CPU run on XLA's own threads, however many it has free."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

PROGRAM = """
import os, jax, numpy as np
import regard.jax as rj

q, k, v = (jax.numpy.asarray(np.random.default_rng(seed).normal(size=(2, 4, 100, 16)))
           for seed in range(3))

def threads():
    return len(os.listdir("/proc/self/task"))

@jax.jit
def gradients(q, k, v):  # eight calls that do not depend on each other
    return [jax.grad(lambda x: rj.attention(x, k, v).sum())(q + n) for n in range(8)]

found = gradients(q, k, v)
before = threads()
wanted = [rj.attention_backward(jax.numpy.ones_like(q), x, k, v,
                                *rj.attention(x, k, v, return_lse=True, threads=1), threads=1).dq
          for x in (q + n for n in range(8))]
assert all((a == b).all() for a, b in zip(found, wanted, strict=True))
jax.block_until_ready(rj.attention(q, k, v, threads=4))
print(threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads")
@pytest.mark.parametrize("pool", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_tasks_run_on_xlas_threads(pool):
    """A call with threads=4 makes three threads of the library's, so that none was there before."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                          timeout=120,
                          env=os.environ | {"NPROC": str(pool), "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 3
