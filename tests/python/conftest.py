"""Collection: the argument `backend` runs a test once for each backend that this machine has.

`kernel` leaves out the float64 reference, which has no tiles and is slow on large problems.
"""

import os
import sys

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: its matrices are small here
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(__file__))
pytest.register_assert_rewrite("cases", "solve")

import regard_ctypes as regard  # noqa: E402
from selection import host_backends, is_repeated  # noqa: E402


@pytest.hookimpl(trylast=True)  # so that backend varies fastest, and a cached case serves them all
def pytest_generate_tests(metafunc):
    own = {name.strip() for mark in metafunc.definition.iter_markers("parametrize")
           for name in mark.args[0].split(",")}
    if "backend" in metafunc.fixturenames and "backend" not in own:
        metafunc.parametrize("backend", host_backends())
    if "kernel" in metafunc.fixturenames and "kernel" not in own:
        kernels = [name for name in host_backends() if name != "reference"]
        metafunc.parametrize("kernel", kernels)


def pytest_collection_modifyitems(config, items):
    repeated = []
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if is_repeated(given.get("backend", given.get("kernel")), given.get("type")):
            repeated.append(item)
    config.hook.pytest_deselected(items=repeated)
    items[:] = [item for item in items if item not in set(repeated)]


def pytest_report_header():
    return f"regard {regard.C.regard_version().decode()}: " + ", ".join(regard.backends())


@pytest.fixture(autouse=True)
def no_error_left():
    """Every test begins on a thread whose last call succeeded."""
    regard.dropout_probability(0.0)
