"""Memory that ranks on CPUs share, in place of that of GPUs: files that all of them map."""

from __future__ import annotations

import ctypes
import math
import shutil
import tempfile
import time
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import Case, attend, joined, split_scheme
from distributed_pool import Raised
from torch import Tensor
from torch.distributed import ProcessGroup

from regard.torch.distributed import others, peers


def attend_by_copies(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]
                      ) -> dict[str, Tensor]:
    """`attend` as GPUs do that reach each other's memory: by copies, here in files."""
    memory_of = peers.memory_of
    peers.memory_of = lambda ranks, like: files_of(group)  # type: ignore[assignment, return-value]
    try:
        return attend(group, case, scheme, more)
    finally:
        peers.memory_of = memory_of


def attend_by_rows(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any]
                   ) -> dict[str, Tensor]:
    """`attend_by_copies` as if there were many runs of rows: by their indices."""
    most = others.MOST_PIECES
    others.MOST_PIECES = 0
    try:
        return attend_by_copies(group, case, scheme, more)
    finally:
        others.MOST_PIECES = most


def results_by_copies(pools: Any, case: Case, scheme: str, world: int,
                      task: Any = attend_by_copies) -> dict[str, Tensor]:
    """Whole results of `attend_by_copies`, or of another such task, in so many processes."""
    plain, more = split_scheme(scheme)
    parts = pools.run(world, task, case, plain, more)
    assert not [part for part in parts if isinstance(part, Raised)], parts
    return joined(case, case.plan(world, plain), parts)


WORDS = 256  # bytes of them
SECONDS = 60  # that a rank waits for another one


class Steps:
    """In place of GpuSteps, for memory of the host."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def copy(self, to: Any, from_: Any, width: int, rows: int) -> None:
        assert min(to[2], from_[2]) >= width or rows == 1, "what the driver refuses"
        self.steps.append((to, from_, width, rows))

    place = copy

    def write(self, to: Any) -> None:
        self.steps.append(("write", to))

    def wait(self, at: Any) -> None:
        self.steps.append(("wait", at))

    def run(self, addresses: list[int], value: int) -> None:
        for kind, place, *more in self.steps:
            word = ctypes.c_uint32.from_address(addresses[place[0]] + place[1])
            if kind == "write":
                word.value = value
            elif kind == "wait":
                ends = time.monotonic() + SECONDS
                while word.value < value:
                    assert time.monotonic() < ends, "a rank did not come"
                    time.sleep(1e-5)
            else:
                width, rows = more
                for row in range(rows):
                    ctypes.memmove(*(addresses[number] + begin + row * pitch
                                     for number, begin, pitch in (kind, place)), width)


class Files:
    """In place of SharedMemory: a file for each rank."""

    steps = Steps

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.bytes, self.count = (0, 0), 0
        self.ranks: list[Tensor] = []

    def begin(self, keys: int, sums: int) -> None:
        asked: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(asked, (keys, sums), self.group)
        assert len({*asked}) == 1, asked  # else some rank would wait for memory of the others
        if not self.ranks or keys > self.bytes[0] or sums > self.bytes[1]:
            self.bytes, self.count = (max(keys, self.bytes[0], 256), max(sums, self.bytes[1])), 0
            self.ranks = self.mapped(sum(self.bytes) + WORDS)

    def mapped(self, size: int) -> list[Tensor]:
        folder = [tempfile.mkdtemp(prefix="regard_") if self.rank == 0 else ""]
        dist.broadcast_object_list(folder, 0, self.group)  # of rank 0, which is that of each group
        found = [torch.from_file(f"{folder[0]}/{rank}", True, size, dtype=torch.uint8)
                 for rank in range(dist.get_world_size(self.group))]
        dist.barrier(self.group)
        shutil.rmtree(folder[0], ignore_errors=True)  # what is mapped stays
        return found

    def lanes(self, count: int) -> Any:
        return nullcontext(lambda number: nullcontext())

    def kept(self, owner: Any, key: Any, make: Any) -> Any:
        return make()

    def keys(self, begin: int, shape: Any, dtype: torch.dtype) -> Tensor:
        return self.view(begin, shape, dtype)

    def sums(self, begin: int, shape: Any, dtype: torch.dtype) -> Tensor:
        return self.view(self.bytes[0] + begin, shape, dtype)

    def view(self, begin: int, shape: Any, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self.ranks[self.rank][begin:begin + size].view(dtype).view(*shape)

    def run(self, steps: Steps, *tensors: Tensor) -> None:
        places = (0, self.bytes[0], sum(self.bytes))
        steps.run([x.data_ptr() + place for place in places for x in self.ranks] +
                  [x.data_ptr() for x in tensors], self.count)

    def run_aside(self, steps: Steps, *tensors: Tensor) -> None:
        self.count += 1
        self.run(steps, *tensors)

    def wait_for(self, done: Any) -> None:
        """It is done."""


@lru_cache
def files_of(group: ProcessGroup) -> Files:
    return Files(group)
