"""Worker processes for the tests of regard.torch.distributed: a group of gloo on the loopback
device, or of NCCL with a GPU for each.

They live as long as the pool, so that each is started once. A task is a function of a module that
workers can import, called with the group of the first `world` workers and its arguments.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

COLLECTIVE_SECONDS = 30  # after which a collective that not all ranks call fails
START_SECONDS = 180  # in which a busy machine starts all workers


@dataclass(frozen=True)
class Raised:
    """What a task has raised: the class's name, its text, and the argument of a regard.Error."""

    kind: str
    text: str
    argument: str


class Pool:
    """`size` workers. backend: "gloo" or "nccl". Errors: TimeoutError where one does not answer; the
    pool is dead then."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")  # which imports PyTorch once for all
        context.set_forkserver_preload(["regard.torch.distributed"])
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, daemon=True,
                                      args=(there, rank, size, self._folder.name, backend))
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self.alive, self.backend = True, backend
        self._answers(self._connections, "start", START_SECONDS)

    def __len__(self) -> int:
        return len(self._connections)

    def run(self, world: int, task: Callable[..., Any], *arguments: Any, seconds: float = 60
            ) -> list[Any]:
        """The results of the first `world` workers, Raised where one raised."""
        for connection in self._connections[:world]:
            _send(connection, (world, task, arguments))
        return self._answers(self._connections[:world], task.__name__, seconds)

    def _answers(self, connections: list[Connection], task: str, seconds: float) -> list[Any]:
        end = monotonic() + seconds
        waiting = set(connections)
        while waiting:
            ready = wait(list(waiting), max(0, end - monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"{task}: no answer within {seconds} s")
            waiting -= set(ready)  # type: ignore[arg-type]
        return [_received(connection) for connection in connections]

    def close(self) -> None:
        self.alive = False
        for connection in self._connections:
            connection.close()  # a worker ends where it can read no more
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _send(connection: Connection, x: Any) -> None:
    """By value: a Connection's own `send` would share the memory of tensors."""
    connection.send_bytes(pickle.dumps(x))


def _received(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _serve(connection: Connection, rank: int, size: int, folder: str, backend: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank,
                            world_size=size, timeout=timedelta(seconds=START_SECONDS))
    groups = {world: dist.new_group(range(world), timeout=timedelta(seconds=COLLECTIVE_SECONDS))
              for world in range(1, size + 1)}
    _send(connection, "ready")
    while True:
        try:
            world, task, arguments = _received(connection)
        except (EOFError, OSError):
            break
        try:
            result = task(groups[world], *arguments)
        except Exception as error:
            result = Raised(type(error).__name__, str(error), getattr(error, "argument", ""))
        _send(connection, result)
    os._exit(0)  # the other workers may be gone already
