"""Which backends and parameters a test runs with, and which of them `make test` leaves out."""

import pytest

import regard_ctypes as regard


def host_backends():
    """Those that take NumPy's memory, best first; a GPU's are tested by tests/gpu."""
    return [name for name in regard.backends() if not name.startswith("cuda")]


def is_repeated(backend, type):
    """AVX512-BF16 and AMX have kernels for bf16, and AMX for f16: other types run on AVX-512's."""
    own = {"cpu:avx512bf16": ("bf16",), "cpu:amx": ("bf16", "f16")}
    return backend in own and type is not None and type not in own[backend]


def mostly_exhaustive(values, *core):
    """The values as parameters; those that are not in core are for `make test-all`."""
    marks = [() if value in core else pytest.mark.exhaustive for value in values]
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
            for value, mark in zip(values, marks)]


def one_in(count, rows, first=0):
    """Rows of parameters, of which `make test` has the first and each count-th behind it."""
    return [pytest.param(*row, marks=() if index % count == first else pytest.mark.exhaustive)
            for index, row in enumerate(rows)]
