#!/usr/bin/env python3
"""Times PyTorch's fused CPU attention and Regard in one process, on the same threads, in turns.

Every case is checked against float64 before it is timed. FLOPs are 2 (D + Dv) a visible pair
forward and 2.5 times that backward, for both; pairs that a causal mask hides do not count.
Writes one JSON line a case, pass and type to bench/results/cpu_<instruction set>.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("REGARD_LIBRARY", str(ROOT / "build/release/libregard.so"))
sys.path.insert(0, str(ROOT / "tests/python"))

import regard_ctypes as regard  # noqa: E402
import torch  # noqa: E402

SHAPES = [
    (1, 16, 512, 64),
    (1, 16, 2048, 64),
    (1, 8, 2048, 128),
    (1, 1, 8192, 64),
    (8, 12, 128, 64),
]
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TOLERANCE = {"f32": 2e-6, "bf16": 1e-2, "f16": 1.5e-3}  # error's norm over the result's
BLOCK = 512  # query rows at a time in the float64 computation
PAUSE = 0.003  # seconds; lets the other side's threads stop spinning
TURN = 0.03  # seconds of calls a side makes before it is the other's turn
BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    length: int
    dim: int
    type: str
    causal: bool

    @property
    def name(self) -> str:
        return f"{self.batch},{self.heads},{self.length},{self.dim}"

    @property
    def flops(self) -> float:
        n = self.length
        pairs = n * (n + 1) // 2 if self.causal else n * n
        return 2.0 * (self.dim + self.dim) * self.batch * self.heads * pairs


@dataclass
class Sides:
    """The four calls of one case, the results they wrote, and which backend of ours runs."""

    backend: dict[str, str]
    forward: dict[str, Callable[[], None]]
    backward: dict[str, Callable[[], None]]
    results: dict[str, dict[str, torch.Tensor]]


# ------------------------------------------------------------------------------------ the two sides


def view(tensor: torch.Tensor):  # noqa: ANN201 - a NumPy array of the binding's own types
    """The same memory as an array that the binding knows."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("uint16").view(regard.BF16)
    return tensor.numpy()


def prepare(case: Case, threads: int, backend: str) -> tuple[dict[str, torch.Tensor], Sides]:
    torch.manual_seed(1)
    shape = (case.batch, case.heads, case.length, case.dim)
    given = {name: torch.randn(shape).to(TYPES[case.type]) for name in ("q", "k", "v", "dout")}
    q, k, v, dout = given.values()
    ours = {name: torch.empty_like(q) for name in ("out", "dq", "dk", "dv")}
    theirs: dict[str, torch.Tensor] = {}
    lse = torch.empty(shape[:3])
    attention = regard.Attention(
        *map(view, (q, k, v)), causal="top_left" if case.causal else "none"
    )
    gradients = {name: view(ours[name]) for name in ("dq", "dk", "dv")}
    run = {"threads": threads, "backend": backend}

    def our_forward() -> None:
        regard.forward(attention, view(ours["out"]), view(lse), **run)

    def our_backward() -> None:
        regard.backward(
            attention, view(ours["out"]), view(lse), view(dout), gradients=gradients, **run
        )

    def their_forward() -> None:
        theirs["out"], theirs["lse"] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, case.causal
        )

    def their_backward() -> None:
        theirs["dq"], theirs["dk"], theirs["dv"] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, theirs["out"], theirs["lse"], 0.0, case.causal
            )
        )

    chosen = {}
    for which, factor in (("forward", 1.0), ("backward", BACKWARD_FLOPS)):
        numbers = regard.explain(attention, which, **run)[1]
        assert numbers.flops == factor * case.flops, "the library counts other operations"
        chosen[which] = numbers.backend.decode()
    return given, Sides(
        chosen,
        {"torch": their_forward, "ours": our_forward},
        {"torch": their_backward, "ours": our_backward},
        {"torch": theirs, "ours": ours},
    )


# ---------------------------------------------------------------------------------------- checking


def exact(case: Case, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One head in float64: the last of the last batch, a block of queries at a time."""
    q, k, v, dout = (given[name][-1, -1].double() for name in ("q", "k", "v", "dout"))
    result = {name: torch.zeros_like(q) for name in ("out", "dq", "dk", "dv")}
    scale = case.dim**-0.5
    for begin in range(0, case.length, BLOCK):
        rows = slice(begin, min(begin + BLOCK, case.length))
        scores = scale * q[rows] @ k.T
        if case.causal:
            hidden = torch.arange(case.length) > torch.arange(rows.start, rows.stop)[:, None]
            scores.masked_fill_(hidden, -torch.inf)
        weights = scores.softmax(-1)
        out = weights @ v
        slope = weights * (dout[rows] @ v.T - (dout[rows] * out).sum(-1, keepdim=True))
        result["out"][rows] = out
        result["dq"][rows] = scale * slope @ k
        result["dk"] += scale * slope.T @ q[rows]
        result["dv"] += weights.T @ dout[rows]
    return result


def errors(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, float]:
    return {
        name: float((found[name][-1, -1].double() - tensor).norm() / tensor.norm())
        for name, tensor in expected.items()
    }


def check(case: Case, given: dict[str, torch.Tensor], sides: Sides) -> dict[str, dict[str, float]]:
    """Runs every side once; stops the benchmark where ours is wrong."""
    for calls in (sides.forward, sides.backward):
        for call in calls.values():
            call()
    expected = exact(case, given)
    found = {side: errors(expected, results) for side, results in sides.results.items()}
    for name, error in found["ours"].items():
        if not error <= TOLERANCE[case.type]:
            sys.exit(
                f"wrong result: {case}: {name} is off by {error:.2e} (torch "
                f"{found['torch'][name]:.2e}, allowed {TOLERANCE[case.type]:.0e})"
            )
    return found


# ------------------------------------------------------------------------------------------ timing


def timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def turn(call: Callable[[], None]) -> list[float]:
    """A pause, a call that does not count, then calls for about TURN seconds."""
    time.sleep(PAUSE)
    first = timed(call)
    if first > 10 * TURN:
        return [first]
    return [timed(call) for _ in range(max(1, min(20, round(TURN / first))))]


def medians(calls: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Median seconds of a call, the sides taking turns for about `seconds`, 3 turns at least."""
    samples: dict[str, list[float]] = {side: [] for side in calls}
    begin, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - begin < seconds:
        for side, call in calls.items():
            samples[side] += turn(call)
        turns += 1
    return {side: statistics.median(values) for side, values in samples.items()}


# --------------------------------------------------------------------------------- the surroundings


def device_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def has_amx() -> bool:
    return re.search(r"\bamx_tile\b", Path("/proc/cpuinfo").read_text()) is not None


def commit() -> str:
    """The commit's abbreviated name; "+" where tracked files differ from it."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return (git("rev-parse", "--short=10", "HEAD") or "none") + (
        "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    )


def measured_peaks(backend: str, threads: int) -> dict[str, float]:
    """FLOP/s by type, as the library's C++ API measures it; compiles bench/peak.cpp first."""
    library = Path(os.environ["REGARD_LIBRARY"])
    program = ROOT / "build/bench/peak"
    program.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O2",
            f"-I{ROOT / 'include'}",
            ROOT / "bench/peak.cpp",
            library,
            f"-Wl,-rpath,{library.parent}",
            "-o",
            program,
        ],
        check=True,
    )
    text = subprocess.run(
        [program, str(threads), backend], capture_output=True, text=True, check=True
    ).stdout
    return {name: float(value) for name, value in map(str.split, text.splitlines())}


def rows_of(
    case: Case,
    sides: Sides,
    found: dict[str, dict[str, float]],
    seconds: float,
    facts: dict[str, object],
    peaks: dict[str, float],
) -> list[dict[str, object]]:
    rows = []
    for name, calls, factor in (
        ("forward", sides.forward, 1.0),
        ("backward", sides.backward, BACKWARD_FLOPS),
    ):
        time_of = medians(calls, seconds)
        flops = case.flops * factor
        outputs = ["out"] if name == "forward" else ["dq", "dk", "dv"]
        peak = peaks.get(case.type)
        rows.append(
            {
                "case": case.name,
                "pass": name,
                "backend": sides.backend[name],
                "type": case.type,
                "sizes": [case.batch, case.heads, case.length, case.dim],
                "mask": "causal" if case.causal else "full",
                "ms": round(1e3 * time_of["ours"], 4),
                "gflops": round(1e-9 * flops / time_of["ours"], 1),
                "torch_ms": round(1e3 * time_of["torch"], 4),
                "torch_gflops": round(1e-9 * flops / time_of["torch"], 1),
                "share": round(flops / time_of["ours"] / peak, 3) if peak else None,
                "error": max(found["ours"][output] for output in outputs),
                "torch_error": max(found["torch"][output] for output in outputs),
                **{key: facts[key] for key in ("threads", "device", "torch", "commit")},
            }
        )
    return rows


HEADER = (
    f"{'B,H,S,D':<12} {'type':<5} {'mask':<7} {'pass':<9} {'ms':>9} {'GFLOP/s':>8} "
    f"{'of peak':>8} {'torch ms':>9} {'GFLOP/s':>8} {'ours/torch':>11} {'error':>8} "
    f"{'torch':>8}"
)


def line_of(row: dict[str, object]) -> str:
    share = f"{100 * row['share']:.0f} %" if row["share"] is not None else "-"
    ratio = row["gflops"] / row["torch_gflops"]
    return (
        f"{row['case']:<12} {row['type']:<5} {row['mask']:<7} {row['pass']:<9} {row['ms']:>9.3f} "
        f"{row['gflops']:>8.1f} {share:>8} {row['torch_ms']:>9.3f} {row['torch_gflops']:>8.1f} "
        f"{ratio:>10.2f}x {row['error']:>8.1e} {row['torch_error']:>8.1e}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--backend", default="", help="ours: default, the one the library chooses")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--shapes", default="", help='as "1,16,512,64 8,12,128,64"; default: all')
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case and pass")
    parser.add_argument(
        "--out", type=Path, help="the JSON lines; default: bench/results/cpu_*.jsonl"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    best = arguments.backend or regard.backends()[0]
    facts = {
        "threads": arguments.threads,
        "device": device_name(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    peaks = measured_peaks(arguments.backend, arguments.threads)
    shapes = [tuple(map(int, text.split(","))) for text in arguments.shapes.split()] or SHAPES
    version = regard.C.regard_version().decode()
    print(
        f"{facts['device']}, {arguments.threads} threads; regard {version}"
        f" {best}; torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    )
    print(
        "measured peak, GFLOP/s: "
        + ", ".join(f"{name} {1e-9 * peak:.0f}" for name, peak in peaks.items() if name in TYPES)
    )
    if os.getloadavg()[0] > 0.5:
        print(f"note: other programs keep {os.getloadavg()[0]:.1f} cores busy; figures will be low")
    print(f"\n{HEADER}", flush=True)
    rows = []
    for name in arguments.types.split(","):
        for shape in shapes:
            for causal in (False, True):
                case = Case(*shape, type=name, causal=causal)
                given, sides = prepare(case, arguments.threads, arguments.backend)
                found = check(case, given, sides)
                rows += rows_of(case, sides, found, arguments.seconds, facts, peaks)
                print("\n".join(line_of(row) for row in rows[-2:]), flush=True)
    isa = best.split(":")[-1] + ("_amx" if has_amx() else "")
    path = arguments.out or ROOT / f"bench/results/cpu_{isa}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    slower = [row for row in rows if row["gflops"] < row["torch_gflops"]]
    print(
        f"\n{len(rows)} timings, {len(slower)} slower than torch; written to "
        f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}"
    )


if __name__ == "__main__":
    main()
