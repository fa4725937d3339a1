"""Sets the threads and the device of the libraries that are measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare_environment(device: str, threads: int) -> None:
    """Must be called before NumPy, PyTorch or JAX is loaded. device: "cpu" or "cuda"."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        cores = sorted(os.sched_getaffinity(0))
        if threads < len(cores):  # JAX knows no other limit
            os.sched_setaffinity(0, one_of_each_core(cores)[:threads])


def one_of_each_core(cpus: list[int]) -> list[int]:
    """The CPUs in an order that takes every core once before the second half of any."""
    seen: dict[str, int] = {}
    rank = {}
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = path.read_text().strip() if path.exists() else str(cpu)
        rank[cpu] = seen[core] = seen.get(core, 0) + 1
    return sorted(cpus, key=lambda cpu: (rank[cpu], cpu))


def prepare_torch(device: str, threads: int) -> None:
    """Sets PyTorch's threads or its device. Errors: exits where a GPU cannot be used."""
    try:
        import torch
    except ImportError:
        sys.exit(f"--device = {device}: needs PyTorch, for its stream and its events")
    if device == "cpu":
        torch.set_num_threads(threads)
        return
    if not torch.cuda.is_available():
        sys.exit(f"--device = {device}: no GPU that PyTorch {torch.__version__} can use")
    torch.cuda.set_device(device)
