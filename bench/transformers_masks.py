#!/usr/bin/env python3
"""What masks of transformers cost: matrices, and Regard's tables of spans.

    build/venv/bin/python bench/transformers_masks.py [--length 8192]

One sequence, one thread. For each mask of a forward pass: the bytes that it keeps, the most bytes of
tensors while it is made, and the time of that, the best of three.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import accumulate

import regard.transformers
import torch
from transformers import masking_utils as hf

MAKERS = {"matrix": hf.sdpa_mask, "spans": regard.transformers.visible_keys}
CASES = ("chunks", "images", "images in a window", "packed images", "a function of the user")


def options_of(case: str, length: int) -> dict[str, object]:
    """What transformers passes to a mask function's interface."""
    ids = torch.full((1, length), -1)
    ids[:, 1024:1280], ids[:, 4096:4352] = 0, 1
    images = hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ids))
    half = torch.arange(length)[None] % (length // 2)
    functions = {
        "chunks": hf.chunked_causal_mask_function(length // 4, torch.zeros(1, dtype=torch.int64)),
        "images": images,
        "images in a window": hf.and_masks(images, hf.sliding_window_overlay(1024)),
        "packed images": hf.packed_sequence_compatibility_function(
            images, half, hf.find_packed_sequence_indices(half)),
        "a function of the user": lambda batch, head, q, k: (k <= q) & ((k < 64) | (k > q - 512)),
    }
    return dict(batch_size=1, q_length=length, kv_length=length, mask_function=functions[case],
                local_size=length // 4, allow_is_causal_skip=case == "chunks",
                use_vmap=case in ("images in a window", "a function of the user"),
                device=torch.device("cpu"))


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes of tensors that were there at one time."""
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = call()
    events = profile.profiler.kineto_results.events()
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    del kept
    return max(accumulate(size for _, size in moves))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8192)
    length = parser.parse_args().length
    torch.set_num_threads(1)
    print("| mask | as | kept, MiB | peak, MiB | ms |\n|---|---|---|---|---|")
    for case in CASES:
        for kind, make in MAKERS.items():
            make(**options_of(case, 1024))  # the first use of operators
            options = options_of(case, length)
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                kept = make(**options).untyped_storage().nbytes()
                times.append(1e3 * (time.perf_counter() - begin))
            peak = peak_bytes(lambda: make(**options))
            print(f"| {case} | {kind} | {kept / 2**20:.2f} | {peak / 2**20:.1f} | {min(times):.0f} |",
                  flush=True)


if __name__ == "__main__":
    main()
