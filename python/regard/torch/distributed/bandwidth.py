"""How fast a group's ranks communicate, measured once for plans."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...checks import integer
from ...errors import refuse
from .costs import Bandwidth
from .ranks import Ranks

_REPEATS = 5


def measure_bandwidth(group: ProcessGroup | None = None, megabytes: int = 8, *,
                      device: torch.device | str | None = None) -> Bandwidth:
    """What a rank of the group receives in a second: by an all-gather, and by an all-to-all.

    A collective of a few milliseconds, to be called once, with equal arguments on all ranks. Each
    rank receives `megabytes` from each other rank, five times after a first one; the median of the
    slowest rank counts, so that all ranks have equal numbers, and plans made of them are equal.
    device: of the memory that is sent; None is the current GPU if the group moves tensors of GPUs,
    else the CPU.

    Raises:
        InvalidArgument: torch.distributed is not initialised, megabytes is not from 1 on, or the
            group does not move tensors on the device.
    """
    megabytes = integer("megabytes", megabytes, 1, 10**4)
    ranks = Ranks(group, dist.get_world_size(group) if dist.is_initialized() else 2)
    kinds = ranks.devices()
    if device is None:
        on_gpu = "cuda" in kinds and torch.cuda.is_available()
        device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    if torch.device(device).type not in kinds:
        raise refuse("device", str(device), f"the group moves tensors on {' or '.join(kinds)}")
    own = torch.zeros((megabytes, 10**6), dtype=torch.uint8, device=device)
    whole = own.repeat(ranks.size, 1)
    counts = [megabytes] * ranks.size
    received = megabytes * 10**6 * max(1, ranks.size - 1)
    times = torch.tensor([_median_time(lambda: ranks.all_gather(own), own),
                          _median_time(lambda: ranks.all_to_all(whole, counts, counts), own)],
                         dtype=torch.float64, device=device)
    slowest = ranks.all_gather(times[None]).amax(0).tolist()
    return Bandwidth(*(received / seconds for seconds in slowest))


def _median_time(collective: Callable[[], Tensor], like: Tensor) -> float:
    """Seconds, with the device's work."""
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        collective()
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[_REPEATS // 2]
