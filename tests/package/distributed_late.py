"""Two ranks with a GPU each, of which one does not come to the second call. Exits with 0 where the
other one's use of its GPU then ends with an error, and its own does not."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from regard.torch import distributed as rd

TIMEOUT, SECONDS = 6, 60


def work(rank: int, folder: str, wrong: Any) -> None:
    device, ended = torch.device("cuda", rank), Path(folder) / "ended"
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=timedelta(seconds=TIMEOUT), device_id=device)
    plan = rd.plan(512, world_size=2, heads_q=2, head_size=64, causal=True, scheme="gather")
    x = torch.randn(1, 2, 256, 64, device=device, dtype=torch.bfloat16)

    def call() -> None:
        rd.attention(x, x, x, plan)
        torch.cuda.synchronize(device)

    call()
    began = time.monotonic()
    if rank == 0:
        try:
            call()
            wrong.value = 1
        except RuntimeError as error:
            wrong.value += not TIMEOUT <= time.monotonic() - began < SECONDS
            print(f"after {time.monotonic() - began:.1f} s: {str(error).splitlines()[0]}", flush=True)
        ended.touch()
    while not ended.exists():
        time.sleep(0.1)
    if rank == 1:
        torch.zeros(1, device=device).sum().item()
    os._exit(0)  # the group and a broken GPU have nothing left to tidy


if __name__ == "__main__":
    failures = multiprocessing.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as where:
        multiprocessing.spawn(work, (where, failures), 2)
    sys.exit(failures.value)
