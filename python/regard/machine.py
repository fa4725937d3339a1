"""The CPU, the GPUs and the backends of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from . import _core
from .checks import integer


@dataclass(frozen=True)
class Backend:
    name: str  # what `backend` and REGARD_BACKEND take
    available: bool
    note: str  # a description; or why the backend is missing and how to get it


@dataclass(frozen=True)
class Gpu:
    name: str
    chip: str  # "sm_90"
    multiprocessors: int
    memory: int  # bytes


@dataclass(frozen=True)
class Info:
    version: str
    cpu: str
    isa: list[str]
    threads: int  # cores that this process may use
    gpus: list[Gpu]
    driver: str  # the newest CUDA version that it serves; or why there is none
    compiler: str  # version and file of NVRTC; or why there is none
    skipped: list[str]  # compilers that were found but are not trusted; each a sentence
    cache: str  # folder of compiled kernels; "" = none
    cache_fault: str  # why nothing is found or kept in that folder; "" = nothing is wrong with it
    backends: list[Backend]

    def __str__(self) -> str:
        rows = [("regard", self.version), ("CPU", f"{self.cpu}, {self.threads} cores"),
                ("", " ".join(self.isa))]
        rows += [("GPU", f"{gpu.name} ({gpu.chip}), {gpu.multiprocessors} multiprocessors, "
                  f"{gpu.memory / 2**30:.0f} GiB") for gpu in self.gpus]
        cache = f"none: {self.cache_fault}" if self.cache_fault else self.cache or "none"
        rows += [("CUDA driver", self.driver), ("NVRTC", self.compiler)]
        rows += [("not trusted", sentence) for sentence in self.skipped]
        rows += [("kernel cache", cache)]
        rows += [(backend.name, ("yes  " if backend.available else "no   ") + backend.note)
                 for backend in self.backends]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}".rstrip() for name, text in rows)


def trim_memory(device: int = 0) -> None:
    """Gives back the memory of a GPU that the library keeps for the workspaces of later calls.

    Args:
        device: the GPU's index. PyTorch's calls take their workspaces from PyTorch, which keeps its
            own memory.

    Raises:
        InvalidArgument: a negative index. Unavailable: no driver, or no GPU of this index.
    """
    _core.trim_memory(integer("device", device, 0, 2**31 - 1))


def info() -> Info:
    """The machine, its GPUs, and which backends are usable; print it."""
    found = _core.setup()
    found["gpus"] = [Gpu(**gpu) for gpu in found["gpus"]]
    found["backends"] = [Backend(**backend) for backend in found["backends"]]
    return Info(**found)
