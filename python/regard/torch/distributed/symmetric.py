"""Memory of each rank of a group that the others read and write, where GPUs reach each other.

PyTorch's symmetric memory maps it. Copies between GPUs are made by copy engines, which take no
multiprocessor from kernels that compute, and cost the host less than a collective does.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import socket
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _core
from .ranks import Ranks

try:
    from torch.distributed import _symmetric_memory as symmetric
except ImportError:  # an older PyTorch
    symmetric = None  # type: ignore[assignment]

_MOST_RANKS = 16
_UNIT = 1 << 21  # bytes that memory is a multiple of
_SWITCH = "REGARD_COPIES_BETWEEN_GPUS"  # an environment variable; 0 on some rank: collectives only


class SharedMemory:
    """This rank's memory for one group and device, and that of the others, of one size.

    Keys have two places, which calls use in turns: when a rank has passed the barrier of a call, all
    ranks have read what they needed of the call before it, so that the next one may write there.
    Sums have one place: others write there after the barrier of a call, and they are read before
    that of the next. Kernels that wait for another rank end with an error at the group's timeout.

    turn: which of both places.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._group = ref(_group(ranks))  # which would live as long as this otherwise
        self._timeout = _milliseconds(_group(ranks), device)
        self._device, self._current = device, device.index
        self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._main: Any = None  # the stream of the last call
        self._handle: Any = None
        self._bytes = (0, 0)  # of keys, of sums
        self._of_ranks: list[Tensor] = []
        self._addresses: list[list[int]] = []  # by turn: of keys of each rank, then of sums
        self._on_side = False
        self.turn = 0

    def begin(self, keys: int, sums: int) -> None:
        """Begins a call that needs so many bytes of keys and of sums, both equal on all ranks."""
        if self._handle is None or keys > self._bytes[0] or sums > self._bytes[1]:
            self._allocate(max(keys, self._bytes[0]), max(sums, self._bytes[1]))
        stream = torch.cuda.current_stream(self._device)
        if self._main is not None and self._main != stream:
            stream.wait_stream(self._main)
        self._main, self.turn = stream, 1 - self.turn
        self._current = torch.cuda.current_device()

    def keys(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A view of a rank's memory for the keys of this call, from a byte on."""
        return self._view(rank, self.turn * self._bytes[0] + begin, shape, dtype)

    def sums(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Likewise of a rank's memory for sums that others bring it."""
        return self._view(rank, 2 * self._bytes[0] + begin, shape, dtype)

    @staticmethod
    def copies(rows: Sequence[Any]) -> _core.GpuCopies:
        """Copies that `run` makes. The numbers of their addresses: each rank's memory for keys, then
        each rank's for sums, then tensors."""
        return _core.GpuCopies(rows)

    def run(self, copies: _core.GpuCopies, *tensors: Tensor) -> None:
        """Puts them on the current stream, or on the one next to it."""
        addresses = self._addresses[self.turn] + [x.data_ptr() for x in tensors]
        stream = self._side if self._on_side else self._main
        copies.run(addresses, self._device.index, stream.cuda_stream)

    def barrier(self) -> None:
        """What follows on the current stream comes after what is before the barriers of all ranks."""
        self._handle.barrier(0, self._timeout)

    def signal(self, rank: int, channel: int) -> None:
        """Tells a rank that what is before on the current stream is done."""
        self._handle.put_signal(rank, 1 + channel, self._timeout)

    def wait(self, rank: int, channel: int) -> None:
        """What follows on the current stream comes after the rank's signal."""
        self._handle.wait_signal(rank, 1 + channel, self._timeout)

    def begin_aside(self) -> Any:
        """What follows, up to `end_aside`, goes on next to the current stream, after what that has
        so far. Returns its name."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._main.record_event(done)
        self._side.wait_event(done)
        torch.cuda.set_stream(self._side)
        self._on_side = True
        return done

    def end_aside(self, done: Any) -> None:
        self._on_side = False
        self._side.record_event(done)
        torch.cuda.set_stream(self._main)  # and its device
        if self._current != self._device.index:
            torch.cuda.set_device(self._current)

    def wait_aside(self, done: Any) -> None:
        """The current stream waits for it. Memory that it uses has to live until then."""
        self._main.wait_event(done)

    def _allocate(self, keys: int, sums: int) -> None:
        torch.cuda.synchronize(self._device)  # once all ranks are here, nothing uses the old memory
        keys, sums = (-(-max(size, 1) // _UNIT) * _UNIT for size in (keys, sums))
        self._handle, self._of_ranks = _mapped(self._group(), self._device, 2 * keys + sums)
        self._bytes = keys, sums
        begins = [x.data_ptr() for x in self._of_ranks]
        self._addresses = [[begin + place for place in (turn * keys, 2 * keys) for begin in begins]
                           for turn in range(2)]

    def _view(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self._of_ranks[rank][begin:begin + size].view(dtype).view(*shape)


def _mapped(group: Any, device: torch.device, size: int) -> tuple[Any, list[Tensor]]:
    """New memory of so many bytes on each rank: PyTorch's handle of it, and that of all ranks."""
    with torch.inference_mode(False):  # calls outside of it write there as well
        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle: Any = symmetric.rendezvous(own, group)
        return handle, [own if rank == handle.rank else handle.get_buffer(rank, (size,), torch.uint8)
                        for rank in range(handle.world_size)]


_memories: WeakKeyDictionary[Any, dict[torch.device, SharedMemory | None]] = WeakKeyDictionary()


def shared_memory(ranks: Any, like: Tensor) -> SharedMemory | None:
    """Of this group, on the device of `like`; None where its ranks cannot reach each other's memory:
    on CPUs, over another backend than NCCL, on several machines, in a PyTorch without symmetric
    memory; and while a graph is captured, whose replays would not take turns. Ranks tell each other
    at the first call with a group."""
    if not like.is_cuda or not isinstance(ranks, Ranks) or ranks.size == 1:
        return None
    with torch.cuda.device(like.device):
        if torch.cuda.is_current_stream_capturing():
            return None
    kept = _memories.setdefault(_group(ranks), {})
    if like.device not in kept:
        kept[like.device] = SharedMemory(ranks, like.device) if _is_there(ranks, like) else None
    return kept[like.device]


def _group(ranks: Ranks) -> Any:
    return dist.group.WORLD if ranks.group is None else ranks.group


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
    came = _told(ranks, host + _identity(index) + index.to_bytes(2, "little"), like)
    gpus = {_identity(n): n for n in range(torch.cuda.device_count())}
    others = [said[len(host):-2] for rank, said in enumerate(came) if rank != ranks.rank]
    can_be = (os.environ.get(_SWITCH) != "0" and all(said.startswith(host) for said in came)
              and len({said[-2:] for said in came}) == ranks.size and _has_symmetric(like.device)
              and all(gpu in gpus and _reaches(index, gpus[gpu]) for gpu in others))
    if not _all(ranks, can_be, like):
        return False
    own: Any = None
    handle: Any = None
    try:
        own = symmetric.empty(_UNIT, dtype=torch.uint8, device=like.device)
    except RuntimeError:  # a driver or a container that does not share memory
        pass
    if not _all(ranks, own is not None, like):
        return False
    try:
        handle = symmetric.rendezvous(own, _group(ranks))
    except RuntimeError:
        pass
    if not _all(ranks, handle is not None, like):
        return False
    handle.barrier(0, _milliseconds(_group(ranks), like.device))
    torch.cuda.synchronize(like.device)
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
    """Whether the GPU `one` maps memory of the other, with atomics, which signals are."""
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
    return _told(ranks, bytes([said]), like) == ranks.size * [bytes([True])]


def _told(ranks: Ranks, said: bytes, like: Tensor) -> list[bytes]:
    """What each rank says."""
    own = torch.tensor([*said], dtype=torch.uint8, device=like.device)
    return [bytes(row) for row in Ranks.all_gather(ranks, own[None]).tolist()]
