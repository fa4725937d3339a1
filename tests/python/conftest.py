"""Collection: the argument `backend` runs a test once for each backend that this machine has.

`kernel` leaves out the float64 reference, which has no tiles and is slow on large problems.
"""

import os
import sys

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: its matrices are small here
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(__file__))

import regard_ctypes as regard  # noqa: E402


def host_backends():
    """Those that take NumPy's memory; a GPU's are tested by tests/gpu."""
    return [name for name in regard.backends() if not name.startswith("cuda")]


@pytest.hookimpl(trylast=True)  # so that backend varies fastest, and a cached case serves them all
def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", host_backends())
    if "kernel" in metafunc.fixturenames:
        kernels = [name for name in host_backends() if name != "reference"]
        metafunc.parametrize("kernel", kernels)


def pytest_report_header():
    return f"regard {regard.C.regard_version().decode()}: " + ", ".join(regard.backends())


@pytest.fixture(autouse=True)
def no_error_left():
    """Every test begins on a thread whose last call succeeded."""
    regard.dropout_probability(0.0)
