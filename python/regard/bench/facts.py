"""What a timing depends on: machine, clocks, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from .. import _core, info
from .memory import GpuMemory, Memory
from .sides import PEERS

PAUSE = 0.5   # seconds, before the products of a burst
BURST, LASTING = 4, 400  # products


def facts(memory: Memory, threads: int, peers: dict[str, str]) -> dict[str, Any]:
    """The fields that every row of results carries. peers: versions of libraries by peer."""
    known: dict[str, Any] = {"device": device_name(memory), "regard": info().version}
    if not memory.cuda:
        known["threads"] = threads
    kind = "cuda" if memory.cuda else "cpu"
    known |= {PEERS[kind][name]: version for name, version in peers.items()}
    if isinstance(memory, GpuMemory):
        known["torch"] = str(memory.torch.__version__)
        known["cudnn"] = str(memory.torch.backends.cudnn.version())
    return known | {"commit": commit()}


def device_name(memory: Memory) -> str:
    if isinstance(memory, GpuMemory):
        return str(memory.torch.cuda.get_device_name(memory.device))
    return info().cpu or platform.processor() or platform.machine()


def results_name(memory: Memory) -> str:
    """cpu_avx512bf16.jsonl, gpu_h100_80gb_hbm3.jsonl, gpu_h200.jsonl"""
    if memory.cuda:
        name = device_name(memory).lower().replace("nvidia", "")
        return "gpu_" + re.sub(r"\W+", "_", name).strip("_") + ".jsonl"
    best = next(backend.name for backend in info().backends
                if backend.available and backend.name.startswith("cpu:"))
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    amx = "_amx" if re.search(r"\bamx_tile\b", flags) else ""
    return f"cpu_{best.split(':')[-1]}{amx}.jsonl"


def peak(type: str, threads: int, backend: str) -> float | None:
    """FLOP/s of the CPU kernel's instruction in a loop without memory accesses; None for the
    reference backend, which has no such kernel."""
    return None if backend == "reference" else _core.measured_peak(type, threads, backend)


def commit() -> str:
    """The short hash of the commit, with "+" if tracked files differ; REGARD_COMMIT without git."""
    folder = Path(__file__).resolve().parent
    root = next((one for one in folder.parents if (one / "python/regard/bench").is_dir()), None)
    known = os.environ.get("REGARD_COMMIT", "none")
    if root is None:
        return known

    def git(*command: str) -> str:
        try:
            done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    name = git("rev-parse", "--short=10", "HEAD")
    return name + ("+" if git("status", "--porcelain", "--untracked-files=no") else "") if name \
        else known


def load(memory: Memory) -> tuple[str, dict[str, Any]]:
    """The load of the CPU, or the clocks of a GPU under load, as text; and fields for a row.

    For a GPU the field "product_tflops" has the rates of PyTorch's matrix product of 8192^3 bf16,
    after a pause ("burst") and under lasting load ("steady").
    """
    if not isinstance(memory, GpuMemory):
        return f"{os.getloadavg()[0]:.1f} other processes ran in the last minute", {}
    torch = memory.torch
    size = 8192
    x = torch.randn((size, size), dtype=torch.bfloat16, device=memory.device)
    torch.mm(x, x)
    memory.wait()
    time.sleep(PAUSE)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    for count, last in zip((BURST, LASTING, LASTING), marks[1:], strict=True):
        if count == BURST:
            marks[0].record()
        for _ in range(count):
            torch.mm(x, x)
        last.record()
    text = clocks(torch.device(memory.device).index or 0)  # while the GPU works
    memory.wait()
    rates = {name: round(count * 2e-9 * size ** 3 / marks[n].elapsed_time(marks[n + 1]), 1)
             for name, n, count in (("burst", 0, BURST), ("steady", 2, LASTING))}
    return (f"a product of {size}^3 {rates['burst']:.0f} TFLOP/s at once, {rates['steady']:.0f} "
            f"under load: {text}"), {"product_tflops": rates}


def clocks(index: int) -> str:
    command = ["nvidia-smi", f"--id={index}", "--format=csv,noheader",
               "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout.strip().splitlines()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return "unknown clock"
