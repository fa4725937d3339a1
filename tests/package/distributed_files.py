"""Memory that ranks on CPUs share, in place of that of GPUs: files that all of them map."""

from __future__ import annotations

import ctypes
import math
import shutil
import tempfile
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import Case, attend, joined, split_scheme
from distributed_pool import Raised
from torch import Tensor
from torch.distributed import ProcessGroup

from regard.torch.distributed import peers


def attend_by_copies(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]
                      ) -> dict[str, Tensor]:
    """`attend` as GPUs do that reach each other's memory: by copies, here in files."""
    shared_memory = peers.shared_memory
    peers.shared_memory = lambda ranks, like: files_of(group)  # type: ignore[assignment]
    try:
        return attend(group, case, scheme, more)
    finally:
        peers.shared_memory = shared_memory


def results_by_copies(pools: Any, case: Case, scheme: str, world: int) -> dict[str, Tensor]:
    """Whole results of `attend_by_copies` in so many processes."""
    plain, more = split_scheme(scheme)
    parts = pools.run(world, attend_by_copies, case, plain, more)
    assert not [part for part in parts if isinstance(part, Raised)], parts
    return joined(case, case.plan(world, plain), parts)


class Files:
    """In place of SharedMemory: a file for each rank."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.world = group, dist.get_world_size(group)
        self.bytes, self.turn = (0, 0), 0
        self.of_ranks: list[Tensor] = []
        self.signals: list[Any] = []

    def begin(self, keys: int, sums: int) -> None:
        asked: list[Any] = [None] * self.world
        dist.all_gather_object(asked, (keys, sums), self.group)
        assert len({*asked}) == 1, asked  # else some rank would wait for memory of the others
        if not self.of_ranks or keys > self.bytes[0] or sums > self.bytes[1]:
            self.bytes = max(keys, self.bytes[0], 256), max(sums, self.bytes[1])
            self.of_ranks = self.mapped(2 * self.bytes[0] + self.bytes[1])
        self.turn = 1 - self.turn

    def mapped(self, size: int) -> list[Tensor]:
        folder = [tempfile.mkdtemp(prefix="regard_") if dist.get_rank(self.group) == 0 else ""]
        dist.broadcast_object_list(folder, 0, self.group)  # of rank 0, which is that of each group
        found = [torch.from_file(f"{folder[0]}/{rank}", True, size, dtype=torch.uint8)
                 for rank in range(self.world)]
        self.barrier()
        shutil.rmtree(folder[0], ignore_errors=True)  # what is mapped stays
        return found

    def keys(self, rank: int, begin: int, shape: Any, dtype: torch.dtype) -> Tensor:
        return self.view(rank, self.turn * self.bytes[0] + begin, shape, dtype)

    def sums(self, rank: int, begin: int, shape: Any, dtype: torch.dtype) -> Tensor:
        return self.view(rank, 2 * self.bytes[0] + begin, shape, dtype)

    def view(self, rank: int, begin: int, shape: Any, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self.of_ranks[rank][begin:begin + size].view(dtype).view(*shape)

    copies = staticmethod(list)

    def run(self, copies: Any, *tensors: Tensor) -> None:
        begins = [x.data_ptr() for x in self.of_ranks]
        addresses = [begin + self.turn * self.bytes[0] for begin in begins]
        addresses += [begin + 2 * self.bytes[0] for begin in begins]
        addresses += [x.data_ptr() for x in tensors]
        for (to, to_begin, to_pitch), (of, of_begin, of_pitch), width, rows in copies:
            for row in range(rows):
                ctypes.memmove(addresses[to] + to_begin + row * to_pitch,
                               addresses[of] + of_begin + row * of_pitch, width)

    def barrier(self) -> None:
        dist.barrier(self.group)

    def signal(self, rank: int, channel: int) -> None:
        self.signals.append(dist.isend(torch.ones(1), rank, self.group, tag=channel))

    def wait(self, rank: int, channel: int) -> None:
        dist.recv(torch.empty(1), rank, self.group, tag=channel)

    def begin_aside(self) -> Any:
        return None

    def end_aside(self, done: Any) -> None:
        """There is one stream."""

    def wait_aside(self, done: Any) -> None:
        """It is done."""


@lru_cache
def files_of(group: ProcessGroup) -> Files:
    return Files(group)
