"""Collection: the oracle of tests/python, and the arrays of each framework that is installed.

`framework` runs a test once for each framework of the CPU; REGARD_TEST_CUDA=1 adds the GPU's.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: its matrices are small here
# JAX would take most of a GPU's memory for each process of the tests.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

DTYPES = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass
class Arrays:
    """NumPy arrays into a framework's, without losing strides, and back as float64."""

    name: str
    make: Callable[[np.ndarray], Any]
    to_numpy: Callable[[Any], np.ndarray]
    types: tuple[str, ...] = tuple(DTYPES)


def plain(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # what was never written may be a signaling NaN
        return np.asarray(x).astype(np.float64)


def torch_arrays(device: str) -> Arrays:
    import torch

    def make(x: np.ndarray) -> Any:
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(x).to(device)

    def to_numpy(x: Any) -> np.ndarray:
        x = x.detach().cpu()
        return x.numpy() if x.dtype == torch.bool else x.double().numpy()

    return Arrays(f"torch-{device}", make, to_numpy)


def cupy_arrays() -> Arrays:
    import cupy

    return Arrays("cupy", cupy.asarray, lambda x: cupy.asnumpy(x).astype(np.float64),
                  types=("f64", "f32", "f16"))


def frameworks() -> list[Arrays]:
    found = [Arrays("numpy", lambda x: x, plain)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(torch_arrays("cpu"))
            if os.environ.get("REGARD_TEST_CUDA"):
                found += [torch_arrays("cuda"), cupy_arrays()]
    except ImportError:
        pass
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "framework" in metafunc.fixturenames:
        metafunc.parametrize("framework", frameworks(), ids=lambda arrays: arrays.name)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch on one thread, because several processes share the cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
