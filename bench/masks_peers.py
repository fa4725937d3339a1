#!/usr/bin/env python3
"""Times of masks next to PyTorch's attention, for forward and backward passes.

    python3 bench/masks_peers.py                       on a GPU
    python3 bench/masks_peers.py --device cpu --divide 32 --heads 2     a trial of the script

FlexAttention takes every mask. On a GPU PyTorch's FlashAttention-2 takes causal documents, as a
packed batch, causal masks, and none, and its cuDNN the last two. bf16 (on the CPU f32, where
FlexAttention has no backward pass), head size 128. All sides run in one process, on the same
values, in turns; a figure is the median over the rounds. On a GPU a turn is queued behind work, so
that it is device time, and is short and follows a pause, so that the power limit does not slow the
clock. Rates count visible pairs only: 4 D operations for each pair and head forward, 10 D backward.
Results are compared first. The density is the share of visible pairs. --kernels prints what each
kernel of ours takes instead. --out appends JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import regard.torch
import torch
from regard import masks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

DIM, ROUNDS = 128, 9
TURN_SECONDS, PAUSE_SECONDS = 0.01, 0.04
LIMIT = 2e-2  # of the distance from our results, over their norm


def document_cuts(length: int) -> np.ndarray:
    """Documents of random lengths, from a 32nd to a quarter of the sequence."""
    random = np.random.default_rng(0)
    cuts = [0]
    while cuts[-1] < length:
        cuts.append(min(length, cuts[-1] + int(random.integers(length // 32, length // 4 + 1))))
    return np.array(cuts)


def tree_parents(length: int, branches: int) -> np.ndarray:
    """A quarter of the tokens are a prefix that branches of equal lengths share."""
    root, each = length // 4, (length - length // 4) // branches
    parents = np.arange(-1, length - 1)
    parents[root + each * np.arange(branches)] = root - 1
    return parents


def cases(divide: int) -> dict[str, Any]:
    """The masks, by their names."""
    long, middle, short = 32768 // divide, 16384 // divide, 8192 // divide
    side = int((4096 // divide) ** 0.5)
    random = np.random.default_rng(1).random((short // 128 or 1, short // 128 or 1)) < 0.5
    np.fill_diagonal(random, True)
    return {
        "causal documents": masks.causal_documents(document_cuts(long)),
        "block-causal": masks.blocks(np.tri(32, dtype=bool), long // 32),
        "prefix tree, 32 branches": masks.tree_from_parents(tree_parents(middle, 32)),
        "neighbourhood 13 x 13": masks.neighbourhood_2d(side, side, min(13, side)),
        "half of the tiles": masks.from_dense(
            np.repeat(np.repeat(random, 128, 0), 128, 1)[:short, :short]),
        "no mask": masks.Mask(short, short),
        "a mask of ones": masks.from_dense(np.ones((short, short), dtype=bool)),
        "causal": masks.Mask(middle, middle, causal="top_left"),
        "causal as spans": masks.prefix_lm(0, middle),
    }


# ------------------------------------------------------------------------------------------- sides


def spans_show(spans: Any, row: Any, x: Any) -> Any:
    """Whether one of the spans of `row`, a tensor (S, 2 n), holds x."""
    shown = False
    for n in range(spans.shape[1] // 2):
        shown = shown | ((spans[row, 2 * n] <= x) & (x < spans[row, 2 * n + 1]))
    return shown


def mask_mod(mask: Any) -> Callable[..., Any]:
    """What FlexAttention asks of each pair."""
    def shown(b: Any, h: Any, q: Any, k: Any) -> Any:
        visible = q >= k if mask.causal != "none" else q >= 0
        if mask.row_spans is not None:
            visible = visible & spans_show(mask.row_spans, q, k)
        if mask.key_spans is not None:
            visible = visible & spans_show(mask.key_spans, k, q)
        return visible if mask.dense is None else visible & mask.dense[q, k]
    return shown


class Side(NamedTuple):
    attend: Callable[..., Any]
    leaves: list[Any]  # q, k and v
    dout: Any
    restore: Callable[[Any], Any] = lambda x: x  # a result, to (1, H, S, D)


def sides(name: str, mask: Any, given: list[Any], dout: Any) -> dict[str, Side]:
    torch.compiler.reset()  # a mask is part of what is compiled
    grouped, cuda = given[0].shape[1] != given[1].shape[1], given[0].is_cuda
    block_mask = create_block_mask(mask_mod(mask), None, None, mask.len_q, mask.len_k,
                                   device=given[0].device.type)
    flex = torch.compile(flex_attention, dynamic=False)
    found = {"regard": Side(lambda *qkv: regard.torch.attention(*qkv, mask=mask), given, dout),
             "flex": Side(lambda *qkv: flex(*qkv, block_mask=block_mask, enable_gqa=grouped), given,
                          dout)}
    if cuda and name == "causal documents":
        found["fa2"] = packed_side(document_cuts(mask.len_q), given, dout)
    if cuda and name in ("no mask", "causal"):
        found |= {side: Side(dense_call(kernel, name == "causal", grouped), given, dout)
                  for side, kernel in (("fa2", SDPBackend.FLASH_ATTENTION),
                                       ("cudnn", SDPBackend.CUDNN_ATTENTION))}
    return found


def dense_call(kernel: SDPBackend, causal: bool, grouped: bool) -> Callable[..., Any]:
    def call(*qkv: Any) -> Any:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=grouped)
    return call


def packed_side(cuts: np.ndarray, given: list[Any], dout: Any) -> Side:
    """Documents as sequences of a packed batch, whose tensors (S, H, D) are contiguous."""
    begins = torch.tensor(cuts, dtype=torch.int32, device=dout.device)
    longest = int(np.diff(cuts).max())

    def packed(x: Any) -> Any:
        return x.detach()[0].transpose(0, 1).contiguous()

    def call(q: Any, k: Any, v: Any) -> Any:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, begins, begins, longest, longest, 0.0, True, False)[0]

    leaves = [packed(x).requires_grad_() for x in given]
    return Side(call, leaves, packed(dout), lambda x: x.transpose(0, 1)[None])


# --------------------------------------------------------------------------------------- measuring


def seconds(call: Callable[[], Any], repeats: int, device: str) -> float:
    """Of one of `repeats` calls; on a GPU behind other work."""
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def in_turns(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, int(TURN_SECONDS / max(seconds(call, 1, device), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            time.sleep(PAUSE_SECONDS)
            times[name].append(seconds(call, repeats[name], device))
    return {name: statistics.median(found) for name, found in times.items()}


def print_kernels(name: str, calls: dict[str, Callable[[], Any]]) -> None:
    """Microseconds of each kernel of a call of ours, in order; launches overlap, so that a kernel's
    time may include its wait for the one before."""
    from torch.profiler import ProfilerActivity, profile
    for label, call in calls.items():
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(ROUNDS):
                call()
            torch.cuda.synchronize()
        kernels = sorted((event for event in found.events() if event.device_time > 0
                          and event.device_type == torch.autograd.DeviceType.CUDA),
                         key=lambda event: event.time_range.start)
        count = len(kernels) // ROUNDS
        times = [statistics.median(kernels[n + count * turn].device_time for turn in range(ROUNDS))
                 for n in range(count)]
        print(f"{name:26} {label:9}" + "".join(f"{time:10.1f}" for time in times), flush=True)


def record(path: str, name: str, mask: Any, heads: tuple[int, int], density: float,
           passes: list[dict[str, float]], tflops: dict[str, list[float]]) -> None:
    """A line of JSON: milliseconds and TFLOP/s of each side, forward and backward."""
    line = {"mask": name, "heads": heads, "sizes": [mask.len_q, mask.len_k, DIM],
            "visible": round(density, 4), "device": torch.cuda.get_device_name()
            if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
            "ms": {side: [round(1e3 * found[side], 4) for found in passes if side in found]
                   for side in tflops},
            "tflops": {side: [round(x, 1) for x in found] for side, found in tflops.items()}}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def prepare(label: str, side: Side, forward: dict[str, Any], backward: dict[str, Any],
            results: dict[str, list[Any]]) -> None:
    """Calls a side, and keeps its calls and its results."""
    detached = [x.detach() for x in side.leaves]
    found = [side.attend(*detached)]
    if label != "flex" or side.dout.is_cuda:
        out = side.attend(*side.leaves)
        backward[label] = lambda: torch.autograd.grad(out, side.leaves, side.dout,
                                                      retain_graph=True)
        found += backward[label]()
    forward[label] = lambda: side.attend(*detached)
    results[label] = [side.restore(x) for x in found]


def measure(name: str, mask: Any, heads: tuple[int, int], a: argparse.Namespace) -> None:
    device = a.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def drawn(count: int) -> Any:
        return torch.randn(1, count, mask.len_q, DIM, device=device, dtype=dtype)

    given = [drawn(count).requires_grad_() for count in (heads[0], heads[1], heads[1])]
    dout = drawn(heads[0])
    mask = mask.like(given[0])
    forward, backward, results = {}, {}, {}
    for label, side in sides(name, mask, given, dout).items():
        try:
            prepare(label, side, forward, backward, results)
        except RuntimeError as error:
            if label == "regard":
                raise
            print(f"{name:26} {label} fails: {str(error).splitlines()[0]}", flush=True)
    if a.kernels:
        return print_kernels(name, {"forward": forward["regard"], "backward": backward["regard"]})
    away = {label: max(float((x - y).norm() / y.norm()) for x, y in zip(found, results["regard"]))
            for label, found in results.items()}
    density = mask.density()
    operations = 4 * DIM * heads[0] * density * mask.len_q * mask.len_k
    times = [in_turns(calls, device) for calls in (forward, backward)]
    tflops = {side: [work * operations / found[side] / 1e12
                     for found, work in zip(times, (1, 2.5)) if side in found] for side in results}
    for side, rates in tflops.items():
        cells = "".join(f"{1e3 * found[side]:12.3f} {rate:7.1f}"
                        for found, rate in zip(times, rates))
        print(f"{name:26} {heads[0]:>3}/{heads[1]:<3} {density:7.3f}  {side:7}{cells}"
              + (f"   FAR: {away[side]:.1e}" if away[side] > LIMIT else ""), flush=True)
    if a.out:
        record(a.out, name, mask, heads, density, times, tflops)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--divide", type=int, default=1, help="lengths by this (default: 1)")
    parser.add_argument("--heads", default="16/16,32/8", help="of q and k (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAMES",
                        help="cases whose names begin with one of these, by commas")
    parser.add_argument("--out", metavar="FILE", help="to which JSON lines are appended")
    parser.add_argument("--kernels", action="store_true", help="on a GPU: times of our kernels")
    a = parser.parse_args()
    if not a.kernels:
        print(f"{'mask':26} {'heads':7} density  side     forward, ms TFLOP/s  "
              "backward, ms TFLOP/s")
    for name, mask in cases(a.divide).items():
        for pair in a.heads.split(",") if name.startswith(tuple(a.only.split(","))) else []:
            query, _, key = pair.partition("/")
            measure(name, mask, (int(query), int(key or query)), a)


if __name__ == "__main__":
    main()
