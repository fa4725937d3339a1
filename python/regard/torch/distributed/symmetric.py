"""Memory of each rank of a group that the others read and write, where GPUs reach each other.

PyTorch's symmetric memory maps it. Copies between GPUs are made by copy engines, which take no
multiprocessor from kernels that compute, and cost the host less than a collective does.
"""

from __future__ import annotations

import hashlib
import socket
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks

try:
    from torch.distributed import _symmetric_memory as symmetric
except ImportError:  # an older PyTorch
    symmetric = None  # type: ignore[assignment]

_MOST_RANKS = 16
_TIMEOUT = 600_000  # ms, as NCCL's: kernels that wait for a rank end with an error then


class SharedMemory:
    """This rank's memory for one group and device, and that of the others, of one size.

    Keys have two places, which calls use in turns: when a rank has passed the barrier of a call, all
    ranks have read what they needed of the call before it, so that the next one may write there.
    Sums have one place: others write there after the barrier of a call, and they are read before
    that of the next.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._group = ref(_group(ranks))  # which would live as long as this otherwise
        self._size, self._device = ranks.size, device
        self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._main: Any = None  # the stream of the last call
        self._handle: Any = None
        self._bytes = (0, 0)  # of keys, of sums
        self._of_ranks: list[Tensor] = []
        self.turn, self.generation = 0, 0  # which of both places; how often memory was allocated

    def begin(self, keys: int, sums: int) -> None:
        """Begins a call that needs so many bytes of keys and of sums, both equal on all ranks."""
        if keys > self._bytes[0] or sums > self._bytes[1]:
            self._allocate(max(keys, self._bytes[0]), max(sums, self._bytes[1]))
        stream = torch.cuda.current_stream(self._device)
        if self._main is not None and self._main != stream:
            stream.wait_stream(self._main)
        self._main, self.turn = stream, 1 - self.turn

    def keys(self, rank: int, begin: int, size: int) -> Tensor:
        """(size) bytes of a rank's memory for the keys of this call."""
        begin += self.turn * self._bytes[0]
        return self._of_ranks[rank][begin:begin + size]

    def sums(self, rank: int, begin: int, size: int) -> Tensor:
        """(size) bytes of a rank's memory for sums that others bring it."""
        begin += 2 * self._bytes[0]
        return self._of_ranks[rank][begin:begin + size]

    def barrier(self) -> None:
        """What follows on the current stream comes after what is before the barriers of all ranks."""
        self._handle.barrier(0, _TIMEOUT)

    def signal(self, rank: int, channel: int) -> None:
        """Tells a rank that what is before on the current stream is done."""
        self._handle.put_signal(rank, 1 + channel, _TIMEOUT)

    def wait(self, rank: int, channel: int) -> None:
        """What follows on the current stream comes after the rank's signal."""
        self._handle.wait_signal(rank, 1 + channel, _TIMEOUT)

    def begin_aside(self) -> Any:
        """What follows, up to `end_aside`, goes on next to the current stream, after what that has so
        far. Returns its name."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._main.record_event(done)
        self._side.wait_event(done)
        torch.cuda.set_stream(self._side)
        return done

    def end_aside(self, done: Any) -> None:
        self._side.record_event(done)
        torch.cuda.set_stream(self._main)

    def wait_aside(self, done: Any) -> None:
        """The current stream waits for it."""
        self._main.wait_event(done)

    def _allocate(self, keys: int, sums: int) -> None:
        torch.cuda.synchronize(self._device)  # once all ranks are here, nothing uses the old memory
        size, group = 2 * keys + sums, self._group()
        assert group is not None
        with torch.inference_mode(False):  # other calls write to them as well
            own = symmetric.empty(size, dtype=torch.uint8, device=self._device)
            self._handle = symmetric.rendezvous(own, group)
            self._of_ranks = [own if rank == self._handle.rank else
                              self._handle.get_buffer(rank, (size,), torch.uint8)
                              for rank in range(self._size)]
        self._bytes, self.generation = (keys, sums), self.generation + 1


_memories: WeakKeyDictionary[Any, dict[torch.device, SharedMemory | None]] = WeakKeyDictionary()


def shared_memory(ranks: Any, like: Tensor) -> SharedMemory | None:
    """Of this group, on the device of `like`; None where its ranks cannot reach each other's memory:
    on CPUs, over another backend than NCCL, on several machines, in a PyTorch without symmetric
    memory; and while a graph is captured, whose replays would not take turns. Ranks tell each other
    at the first call with a group."""
    if not like.is_cuda or not isinstance(ranks, Ranks) or ranks.size == 1:
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    kept = _memories.setdefault(_group(ranks), {})
    if like.device not in kept:
        kept[like.device] = SharedMemory(ranks, like.device) if _is_there(ranks, like) else None
    return kept[like.device]


def _group(ranks: Ranks) -> Any:
    return dist.group.WORLD if ranks.group is None else ranks.group


def _is_there(ranks: Ranks, like: Tensor) -> bool:
    if ranks.size > _MOST_RANKS or "cuda:nccl" not in str(dist.get_backend_config(ranks.group)):
        return False
    host = hashlib.sha256(socket.gethostname().encode()).digest()
    gpus = {_identity(n): n for n in range(torch.cuda.device_count())}
    own = _identity(like.device.index)
    came = _told(ranks, host + own, like)
    others = [gpu[len(host):] for rank, gpu in enumerate(came) if rank != ranks.rank]
    is_reached = symmetric is not None and all(gpu.startswith(host) for gpu in came) and all(
        gpu in gpus and gpu != own and torch.cuda.can_device_access_peer(like.device.index, gpus[gpu])
        for gpu in others)
    return _told(ranks, bytes([is_reached]), like) == ranks.size * [bytes([True])]


def _identity(gpu: int) -> bytes:
    return hashlib.sha256(str(torch.cuda.get_device_properties(gpu).uuid).encode()).digest()


def _told(ranks: Ranks, said: bytes, like: Tensor) -> list[bytes]:
    """What each rank says."""
    own = torch.tensor([*said], dtype=torch.uint8, device=like.device)
    return [bytes(row) for row in Ranks.all_gather(ranks, own[None]).tolist()]
