"""Which groups have shared memory (shared_memory.py): those whose GPUs reach each other's memory, which
PyTorch's symmetric memory maps.

Copies between GPUs are made by copy engines, which take no multiprocessor from kernels that compute,
and cost the host less than a collective does.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _core
from .ranks import Ranks
from .shared_memory import SharedMemory

try:
    from torch.distributed import _symmetric_memory as symmetric
except ImportError:  # an older PyTorch
    symmetric = None  # type: ignore[assignment]

T = TypeVar("T")

_MOST_RANKS = 16
_TRIAL = 1 << 21  # bytes
_SWITCH = "REGARD_COPIES_BETWEEN_GPUS"  # an environment variable; 0 on some rank: collectives only


_memories: WeakKeyDictionary[Any, dict[torch.device, SharedMemory | None]] = WeakKeyDictionary()


def memory_of(ranks: Any, like: Tensor) -> SharedMemory | None:
    """Of this group, on the device of `like`; None where its ranks cannot reach each other's memory:
    on CPUs, over another backend than NCCL, on several machines, in a PyTorch without symmetric
    memory; and while a graph is captured, whose replays would wait for the words of its capture.
    Ranks tell each other at the first call with a group."""
    if not like.is_cuda or not isinstance(ranks, Ranks) or ranks.size == 1:
        return None
    if torch.cuda.current_device() == like.device.index:
        is_capturing = torch.cuda.is_current_stream_capturing()
    else:
        with torch.cuda.device(like.device):
            is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        return None
    kept = _memories.setdefault(ranks.process_group, {})
    if like.device not in kept:
        kept[like.device] = _made(ranks, like.device) if _is_there(ranks, like) else None
    return kept[like.device]


def _made(ranks: Ranks, device: torch.device) -> SharedMemory:
    mapped = _Mapped(ranks.process_group, device)
    return SharedMemory(ranks.rank, device, mapped.make, mapped.fail, mapped.milliseconds / 1000)


class _Mapped:
    """Symmetric memory of a group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = ref(group)  # which would live as long as this otherwise
        self._device, self.milliseconds = device, _milliseconds(group, device)
        self._handle: Any = None

    def make(self, size: int) -> list[Tensor]:
        """New memory, of each rank, filled with zeros."""
        with torch.inference_mode(False):  # calls outside of it write there as well
            own = symmetric.empty(size, dtype=torch.uint8, device=self._device)
            group: Any = self._group()
            self._handle = handle = symmetric.rendezvous(own, group)
            own.zero_()
            next_, last = (  # what `fail` calls is loaded now: it could not be while a stream waits
                (handle.rank + step) % handle.world_size for step in (1, -1))
            handle.put_signal(next_, 0, self.milliseconds)
            handle.wait_signal(last, 0, self.milliseconds)
            handle.barrier(0, self.milliseconds)
            torch.cuda.synchronize(self._device)
            return [own if rank == handle.rank else handle.get_buffer(rank, (size,), torch.uint8)
                    for rank in range(handle.world_size)]

    def fail(self) -> None:
        """By PyTorch's kernel, which waits for another rank for a millisecond."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._handle.wait_signal((self._handle.rank + 1) % self._handle.world_size, 0, 1)


def _milliseconds(group: Any, device: torch.device) -> int:
    """The group's timeout."""
    try:
        return int(1000 * group._get_backend(device).options._timeout.total_seconds())
    except Exception:  # another PyTorch has another name for it
        return 600_000


def _is_there(ranks: Ranks, like: Tensor) -> bool:
    """Whether each rank has a GPU of its own on one machine, and a first use of shared memory works on
    all of them."""
    if ranks.size > _MOST_RANKS or "cuda:nccl" not in str(dist.get_backend_config(ranks.group)):
        return False
    index = like.device.index
    host = hashlib.sha256(socket.gethostname().encode()).digest()
    came = ranks.told(host + _identity(index) + index.to_bytes(2, "little"), like.device)
    gpus = {_identity(n): n for n in range(torch.cuda.device_count())}
    others = [said[len(host):-2] for rank, said in enumerate(came) if rank != ranks.rank]
    can_be = (os.environ.get(_SWITCH) != "0" and all(said.startswith(host) for said in came)
              and len({said[-2:] for said in came}) == ranks.size and _has_symmetric(like.device)
              and all(gpu in gpus and _reaches(index, gpus[gpu]) for gpu in others))
    return _all(ranks, can_be, like) and _is_tried(ranks, like)


def _is_tried(ranks: Ranks, like: Tensor) -> bool:
    """Whether memory can be mapped, and ranks hear each other's words in it."""
    mapped, device = _Mapped(ranks.process_group, like.device), like.device
    own = _unless_refused(lambda: symmetric.empty(_TRIAL, dtype=torch.uint8, device=device))
    if not _all(ranks, own is not None, like):  # a driver or a container that shares no memory
        return False
    memory = _unless_refused(lambda: mapped.make(_TRIAL))
    if not _all(ranks, memory is not None, like):
        return False
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    told = _unless_refused(lambda: _run(memory, [("write", (rank, 4 * ranks.rank)) for rank in others]))
    if not _all(ranks, told is not None, like):  # a driver that refuses words
        return False
    heard = _unless_refused(lambda: _run(memory, [("wait", (ranks.rank, 4 * rank)) for rank in others]))
    return _all(ranks, heard is not None, like)


def _unless_refused(work: Callable[[], T]) -> T | None:
    try:
        return work()
    except RuntimeError:
        return None


def _run(memory: Any, words: Sequence[tuple[str, tuple[int, int]]]) -> bool:
    steps, device = _core.GpuSteps(), memory[0].device
    for kind, place in words:
        getattr(steps, kind)(place)
    stream = torch.cuda.current_stream(device)
    steps.run([x.data_ptr() for x in memory], 1, device.index, stream.cuda_stream)
    stream.synchronize()
    return True


def _has_symmetric(device: torch.device) -> bool:
    """Whether PyTorch has symmetric memory, by its own kernels: other backends lack signals."""
    if symmetric is None:
        return False
    memory: Any = getattr(symmetric, "_SymmetricMemory", None)
    try:
        return memory.get_backend(device) in (None, "CUDA")
    except (AttributeError, RuntimeError):  # PyTorch has no other, or none is chosen yet
        return True


def _reaches(one: int, other: int) -> bool:
    """Whether the GPU `one` maps memory of the other, with the atomics that PyTorch's signals are, which
    `_Mapped` uses."""
    if one == other or not torch.cuda.can_device_access_peer(one, other):
        return False
    found, native_atomics = ctypes.c_int(), 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    try:
        attribute = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    except (OSError, AttributeError):
        return False
    return attribute(ctypes.byref(found), native_atomics, one, other) == 0 and found.value == 1


def _identity(gpu: int) -> bytes:
    return hashlib.sha256(str(torch.cuda.get_device_properties(gpu).uuid).encode()).digest()


def _all(ranks: Ranks, said: bool, like: Tensor) -> bool:
    return ranks.told(bytes([said]), like.device) == ranks.size * [bytes([True])]
