"""What the tests of regard.jax share: devices, float64 for a while, random arrays, the truth."""

import contextlib
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others use the GPU as well

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import regard


def devices():
    try:
        gpus = jax.devices("gpu")[:1]
    except RuntimeError:
        gpus = []
    return [jax.devices("cpu")[0], *gpus]


DEVICES = [pytest.param(device, id=device.platform) for device in devices()]


@contextlib.contextmanager
def wide_types(device):
    """float64 exists, and arrays are made on the device, only in here: other tests share JAX."""
    switch = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with switch(True), jax.default_device(device):
        yield


def normal(seed, *shape, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def close(found, truth, tolerance=1e-12):
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    assert found.shape == truth.shape
    finite = np.isfinite(truth)
    assert np.array_equal(found[~finite], truth[~finite], equal_nan=True)
    error = np.abs(found[finite] - truth[finite]).max(initial=0)
    assert error <= tolerance * max(1, np.abs(truth[finite]).max(initial=0)), error


def truth(q, k, v, dout=None, dlse=None, *, layout="bhsd", dropout_p=0.0, dropout_seed=0,
          window=None, causal=False, **options):
    """The oracle's dict for `regard.attention`'s arguments."""
    def rows(x):
        x = np.asarray(x)
        return x.swapaxes(1, 2) if layout == "bshd" and x.ndim == 4 else x

    keep = None
    if dropout_p:
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        assert layout == "bhsd"
        keep = regard.dropout_mask(*sizes, dropout_p, seed=dropout_seed)
    arrays = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in options.items()}
    found = oracle.attention(
        rows(q), rows(k), rows(v), None if dout is None else rows(dout), dlse, keep=keep,
        p=regard.dropout_probability(dropout_p), causal=causal or "none",
        window=window or (-1, -1), **arrays)
    return {name: rows(x) if name in ("out", "dq", "dk", "dv") else x for name, x in found.items()}
