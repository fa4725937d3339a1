#!/usr/bin/env python3
"""The first thing to run on a GPU: some twenty problems on its kernel families against float64.

    python tests/gpu/smoke.py [--only REGEX] [--families mma,simt] [--types bf16,f16] [--workers 8]

Each line says how far every result is from float64 (norm of the difference over the norm), or which
error came, and what took how long. A result that is wrong is drawn: which rows and columns are off.
Cases run in processes of their own, so that a fault or a hang in one costs that one only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

LIMITS = {"f64": 1e-11, "f32": 5e-6, "bf16": 1.2e-2, "f16": 2e-3}
HANG_SECONDS = 90
MAX_FAILURES = 12  # drawn at the end
OUTPUTS = ["out", "lse", "dq", "dk", "dv", "dbias", "dsink"]

# name: B, Hq, Hkv, Sq, Sk, D, Dv, options. Types: all that the family has, or those named.
CASES = {
    "one tile": (1, 1, 1, 16, 16, 16, 16, {}),
    "one tile d64": (1, 1, 1, 64, 64, 64, 64, {}),
    "tiles d64": (2, 3, 3, 256, 256, 64, 64, {}),
    "tiles d128": (1, 2, 2, 384, 512, 128, 128, {}),
    "odd lengths d128": (2, 2, 2, 197, 331, 128, 128, {}),
    "causal d64": (2, 2, 2, 300, 300, 64, 64, {"causal": "top_left"}),
    "causal d128": (1, 4, 4, 512, 512, 128, 128, {"causal": "top_left"}),
    "bottom right": (1, 2, 2, 150, 400, 64, 64, {"causal": "bottom_right"}),
    "window": (1, 2, 2, 300, 300, 64, 64, {"causal": "top_left", "window": (70, -1)}),
    "d256": (1, 2, 2, 200, 300, 256, 256, {"causal": "bottom_right"}),
    "d256 pairs": (2, 2, 1, 600, 700, 256, 256, {"causal": "bottom_right"}),
    "d256 dv96 pairs": (1, 2, 2, 577, 321, 256, 96, {"dlse": True, "sink": True}),
    "d192": (1, 2, 2, 200, 300, 192, 192, {}),
    "d192 dv128 pairs": (1, 4, 2, 300, 300, 192, 128, {"causal": "top_left"}),
    "d136 dv200": (2, 2, 1, 130, 190, 136, 200, {"window": (70, 40)}),
    "d256 terms": (1, 2, 2, 150, 200, 256, 256, {
        "causal": "bottom_right", "softcap": 3.0, "alibi": True, "sink": True, "dlse": True,
        "bias": (1, 2, 150, 200), "scale": 0.2}),
    "d256 dropout": (1, 2, 2, 150, 200, 256, 256, {"dropout": (0.2, 1, 2), "alibi": True}),
    "d256 deterministic": (1, 4, 2, 300, 300, 256, 256, {
        "causal": "top_left", "mask": (1, 1, 300, 300), "deterministic": 1}),
    "d256 pairs deterministic": (2, 2, 1, 600, 700, 256, 256, {
        "causal": "bottom_right", "deterministic": 1}),
    "turns": (2, 4, 2, 500, 900, 128, 128, {"window": (300, 100), "deterministic": 1}),
    "d96 dv48": (1, 2, 2, 200, 300, 96, 48, {}),
    "d40": (1, 2, 2, 130, 190, 40, 40, {}),
    "d17 unaligned": (1, 2, 2, 70, 90, 17, 13, {}),
    "grouped": (2, 8, 2, 130, 257, 64, 64, {"causal": "bottom_right"}),
    "decode": (2, 8, 2, 1, 5000, 128, 128, {}),
    "decode 5": (1, 4, 4, 5, 3000, 64, 64, {"causal": "bottom_right"}),
    "decode 16 grouped": (2, 8, 4, 16, 4000, 128, 128, {
        "causal": "bottom_right", "window": (900, -1)}),
    "decode d256": (1, 12, 2, 2, 3000, 256, 192, {"sink": True}),
    "decode with terms": (3, 6, 2, 3, 2500, 96, 128, {
        "softcap": 3.0, "alibi": True, "mask": (3, 1, 3, 2500), "dropout": (0.2, 1, 2)}),
    "decode without splits": (40, 8, 2, 1, 600, 128, 128, {}),
    "bias": (2, 2, 2, 150, 200, 64, 64, {"bias": (2, 2, 150, 200)}),
    "bias of heads": (2, 2, 2, 150, 200, 64, 64, {"bias": (1, 2, 150, 200)}),
    "bias of heads causal": (4, 2, 2, 300, 456, 128, 128, {"bias": (1, 2, 300, 456), "causal":
                                                           "top_left"}),
    "bias of three": (3, 4, 2, 197, 200, 64, 64, {"bias": (1, 4, 197, 200)}),
    "bias of eight": (8, 2, 2, 130, 264, 128, 128, {
        "bias": (1, 2, 130, 264), "dropout": (0.3, 7, 9), "deterministic": 1}),
    "bias of all": (16, 2, 2, 130, 200, 64, 64, {"bias": (1, 1, 130, 200)}),
    "bias of keys": (2, 2, 2, 150, 200, 64, 64, {"bias": (2, 1, 1, 200)}),
    "mask": (2, 2, 2, 150, 200, 64, 64, {"mask": (2, 1, 150, 200)}),
    "softcap alibi": (2, 2, 2, 150, 200, 64, 64, {"softcap": 2.0, "alibi": True}),
    "sink dlse": (2, 2, 2, 150, 200, 64, 64, {"sink": True, "dlse": True}),
    "dropout": (2, 2, 2, 150, 200, 64, 64, {"dropout": (0.3, 7, 9)}),
    "deterministic": (2, 4, 2, 300, 300, 64, 64, {"causal": "top_left", "deterministic": 1}),
    "everything": (2, 4, 2, 150, 200, 72, 40, {
        "causal": "bottom_right", "window": (90, 30), "softcap": 3.0, "alibi": True, "sink": True,
        "dlse": True, "bias": (1, 4, 150, 200), "mask": (2, 1, 150, 200), "dropout": (0.2, 1, 2),
        "scale": 0.2, "deterministic": 1}),
}
TYPES = {"mma": ["bf16", "f16", "f32"], "simt": ["f32", "f64", "bf16"], "mma75": ["f16"],
         "mma80": ["bf16"], "wgmma": ["bf16", "f16", "f32"]}


def work(arguments: argparse.Namespace) -> list[tuple[str, str, str]]:
    """The list of (case, family, type): every case in one type a family, some in all."""
    found = []
    families = arguments.families.split(",")
    for index, name in enumerate(CASES):
        for family in families:
            types = TYPES.get(family, ["bf16"])
            if arguments.types:
                types = [type for type in types if type in arguments.types.split(",")]
            elif name not in ("one tile", "tiles d128", "causal d64", "d256", "everything"):
                types = types[index % len(types):][:1] if family != "mma" else types[:1]
            found += [(name, family, type) for type in types
                      if re.search(arguments.only, f"{name} {family} {type}")]
    return found


# ------------------------------------------------------------------------------------- one problem


def prepare(name: str, type: str, device: str) -> dict:
    import torch
    import torch_calls as calls

    batch, heads, heads_kv, rows, columns, dim, dim_v, options = CASES[name]
    torch.manual_seed(1)
    dtype = calls.TYPES[type]
    real = torch.float64 if type == "f64" else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)

    def heads_inside(b, h, s, d):  # (B, S, H, D) in memory
        return normal(b, s, h, d).transpose(1, 2)

    given = {"q": heads_inside(batch, heads, rows, dim),
             "k": heads_inside(batch, heads_kv, columns, dim),
             "v": heads_inside(batch, heads_kv, columns, dim_v)}
    options = dict(options)
    dlse = normal(batch, heads, rows, dtype=real) if options.pop("dlse", False) else None
    if "bias" in options:
        options["bias"] = normal(*options["bias"])
    if "mask" in options:
        mask = torch.rand(options["mask"], device=device) < 0.8
        mask[..., :, -1] = mask[..., :, 0] = True
        i = torch.arange(rows, device=device)
        mask[..., i, i] = True
        mask[..., i, (i + columns - rows).clamp(0, columns - 1)] = True  # no row is empty
        options["mask"] = mask
    if options.pop("alibi", False):
        options["alibi_slopes"] = 2.0 ** -torch.arange(1, heads + 1, device=device).float()
    if options.pop("sink", False):
        options["sink"] = normal(heads, dtype=torch.float32)
    dout = heads_inside(batch, heads, rows, dim_v)
    more = {}
    if "dropout" in options:
        more = {"keep": calls.dropout_mask(options, batch, heads, rows, columns, device),
                "p": calls.regard.dropout_probability(options["dropout"][0])}
    truth = calls.exact_gradients(**given, dout=dout, dlse=dlse, **options, **more)
    return {"given": given, "options": options, "dout": dout, "dlse": dlse, "truth": truth}


def pattern(got, want, limit: float) -> str:
    """Where a result is off: the share of bad elements, the first, a map of rows and columns."""
    import torch

    got, want = got.double(), want.double()
    size = want.abs().mean().clamp_min(1e-30)
    bad = ~((got - want).abs() <= 20 * limit * (size + want.abs()))
    if not bad.any():
        return "no single element is far off"
    first = tuple(int(x) for x in bad.nonzero()[0])
    text = (f"{100 * bad.double().mean():.1f} % bad, {int(torch.isnan(got).sum())} NaN, first at "
            f"{list(first)}: {float(got[first]):.5g}, should be {float(want[first]):.5g}")
    names = {4: ["b", "h", "row", "col"], 3: ["b", "h", "row"]}.get(bad.dim(), [])
    for axis, what in enumerate(names):
        other = [x for x in range(bad.dim()) if x != axis]
        shares = bad.double().mean(dim=other)
        step = max(1, -(-len(shares) // 64))
        parts = [float(shares[x : x + step].mean()) for x in range(0, len(shares), step)]
        picture = "".join("." if x == 0 else "#" if x == 1 else "+" for x in parts)
        text += f"\n        {what:>4} (each sign {step}): {picture}"
    return text


def solve(name: str, family: str, type: str, device: str) -> dict:
    import torch
    import torch_calls as calls

    def sync():
        if device == "cuda":
            torch.cuda.synchronize()

    result: dict = {"errors": {}, "notes": []}
    began = time.perf_counter()
    problem = prepare(name, type, device)
    sync()
    result["prepare"] = time.perf_counter() - began
    truth, dout = problem["truth"], problem["dout"]
    backend = f"cuda:{family}" if device == "cuda" else ""
    a = calls.attention(**problem["given"], **problem["options"])
    like = problem["given"] | problem["options"]
    got = {n: torch.full_like(like[n[1:]], torch.nan) for n in truth if n not in ("out", "lse")}
    got["out"] = torch.full_like(dout, torch.nan)
    got["lse"] = torch.full_like(truth["lse"], torch.nan, dtype=torch.float64 if type == "f64"
                                 else torch.float32)
    gradients = {n: x for n, x in got.items() if n not in ("out", "lse")}
    steps = {
        "forward": lambda: calls.forward(a, got["out"], got["lse"], backend=backend),
        "backward": lambda: calls.backward(a, got["out"], got["lse"], dout, gradients,
                                           dlse=problem["dlse"], backend=backend),
    }
    for step, call in steps.items():
        names = ["out", "lse"] if step == "forward" else list(gradients)
        began = time.perf_counter()
        try:
            call()
            sync()
            result[step + " first"] = time.perf_counter() - began
            began = time.perf_counter()
            call()
            sync()
            result[step] = time.perf_counter() - began
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the news
            result["notes"].append(f"{step}: {error.__class__.__name__}: {error}")
            result["failed"] = True
            if device == "cuda":
                torch.cuda.synchronize()  # raises again where the process is spoilt
            if step == "forward":  # the backward pass can still be tried, from the truth
                got["out"].copy_(truth["out"])
                got["lse"].copy_(truth["lse"])
            continue
        for n in names:
            difference = (got[n].double() - truth[n]).norm() / truth[n].norm().clamp_min(1e-30)
            limit = LIMITS["f32" if got[n].dtype == torch.float32 and n == "lse" else type]
            limit = max(6 * limit, 1e-6) if n == "dsink" else limit
            result["errors"][n] = float(difference)
            if not float(difference) <= limit:
                result["failed"] = True
                result["notes"].append(f"{n}: {pattern(got[n], truth[n], limit)}")
        try:
            result[step + " kernel"] = calls.explained(
                a, step, got["out"], backend).kernel.decode()
        except Exception as error:  # noqa: BLE001
            result["notes"].append(f"explain {step}: {error}")
    return result


# -------------------------------------------------------------------------------------- processes


def worker(items: list[int], arguments: argparse.Namespace) -> None:
    """Solves the items; a JSON line each, before and after."""
    everything = work(arguments)
    for index in items:
        print(json.dumps({"begin": index}), flush=True)
        timer = threading.Timer(HANG_SECONDS, os._exit, (9,))
        timer.daemon = True
        timer.start()
        try:
            result = solve(*everything[index], arguments.device)
        except Exception as error:  # noqa: BLE001
            result = {"failed": True, "errors": {},
                      "notes": [f"{error.__class__.__name__}: {str(error)[:600]}"]}
        timer.cancel()
        print(json.dumps({"end": index, **result}), flush=True)
        if "CUDA error" in " ".join(result["notes"]) or "cuda" in " ".join(
                result["notes"]).lower() and broken():
            os._exit(8)


def broken() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001
        return True
    return False


def line_of(item: tuple[str, str, str], result: dict) -> str:
    errors = " ".join(f"{result['errors'][n]:8.1e}" if n in result["errors"] else f"{'-':>8}"
                      for n in OUTPUTS)
    times = " ".join(f"{result[n]:7.2f}" if n in result else f"{'-':>7}"
                     for n in ("forward first", "backward first"))
    name, family, type = item
    word = "FAIL" if result.get("failed") else "ok"
    return f"{name:<17} {family:<6} {type:<5} {word:<5}{errors} {times}"


def families_of(device: str) -> str:
    import driver

    hopper = device == "cuda" and driver.Driver().capability() == 90
    return "wgmma,mma,simt" if hopper else "mma,simt"


def attend_to(items: list[int], arguments: argparse.Namespace, results: dict, lock) -> None:
    """Runs a worker over the items, and another over the rest wherever one ends early."""
    everything = work(arguments)
    while items:
        command = [sys.executable, __file__, "--worker", ",".join(map(str, items)), "--only",
                   arguments.only, "--families", arguments.families, "--types", arguments.types,
                   "--device", arguments.device]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(process.stderr.read()))
        reader.start()
        begun = None
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                said.append(line)
                continue
            begun = message.get("begin", begun)
            if "end" in message:
                items = [item for item in items if item != message["end"]]
                with lock:
                    results[message["end"]] = message
                    print(line_of(everything[message["end"]], message), flush=True)
        status = process.wait()
        reader.join()
        if not items:
            break
        lost = begun if begun in items else items[0] if begun is None else None
        if lost is not None:
            reason = "hung" if status == 9 else f"the process ended with {status}"
            tail = " | ".join("".join(said).strip().splitlines()[-4:])
            with lock:
                results[lost] = {"failed": True, "errors": {}, "notes": [f"{reason}: {tail}"]}
                print(line_of(everything[lost], results[lost]), flush=True)
            items = [item for item in items if item != lost]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help='of "case family type"')
    parser.add_argument("--families", default="",
                        help="default: those of the GPU; also mma75, mma80, mma/99, ...")
    parser.add_argument("--types", default="", help="default: one a case, some cases all")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"],
                        help="cpu: a dry run of this script")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker([int(x) for x in arguments.worker.split(",")], arguments)
        return 0
    arguments.families = arguments.families or families_of(arguments.device)
    items = work(arguments)
    began = time.perf_counter()
    print(f"{'case':<17} {'family':<6} {'type':<5} {'':<5}"
          + " ".join(f"{n:>8}" for n in OUTPUTS) + f" {'fwd s':>7} {'bwd s':>7}", flush=True)
    results: dict = {}
    lock = threading.Lock()
    shares = [list(range(len(items)))[n :: arguments.workers] for n in range(arguments.workers)]
    threads = [threading.Thread(target=attend_to, args=(share, arguments, results, lock))
               for share in shares if share]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [n for n in sorted(results) if results[n].get("failed")]
    for n in failed[:MAX_FAILURES]:
        name, family, type = items[n]
        print(f"\nFAIL {name}, {family}, {type}")
        for key in ("forward kernel", "backward kernel"):
            if key in results[n]:
                print(f"    {key}: {results[n][key]}")
        for note in results[n]["notes"]:
            print(f"    {note[:900]}")
    print(f"\n{len(results) - len(failed)} passed, {len(failed)} failed"
          f" in {time.perf_counter() - began:.0f} s")
    return 1 if failed or len(results) != len(items) else 0


if __name__ == "__main__":
    sys.exit(main())
