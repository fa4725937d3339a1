#!/usr/bin/env python3
"""Shows Regard at work on a trained model's queries, keys and values. Run it by `make demo`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import picture
import tensorfile
import unfused

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build/demo"
TOOL = ROOT / "build/library/cli/regard"
DATA = ROOT / "examples/data/minilm.safetensors"
GRADIENTS = ("dq", "dk", "dv")
COPIES = (2, 4, 8)  # of the long text, for time and memory
MANY_COPIES = 32  # of it, for Regard alone
PICTURED = 1  # which sentence
Arrays = dict[str, np.ndarray]


# --------------------------------------------------------------------------------------- the paper


def ink(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() else text


def heading(number: int, text: str) -> None:
    print(f"\n{ink('1', f'{number}  {text}')}", flush=True)


def say(text: str = "") -> None:
    for line in text.rstrip("\n").split("\n"):
        print(f"   {line}".rstrip(), flush=True)


# ------------------------------------------------------------------------------------ the programs


def relative(part: object) -> str:
    """A path as one types it in the project's folder."""
    inside = isinstance(part, Path) and part.is_relative_to(ROOT)
    return str(part.relative_to(ROOT) if inside else part)


@dataclass
class Finished:
    text: str
    peak: int  # bytes


def finish(command: list[object]) -> Finished:
    """Runs a program to its end; its output and the most memory that it held."""
    measured = [sys.executable, "-S", ROOT / "examples/peak_memory.py", *command]
    done = subprocess.run(
        [relative(part) for part in measured],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    text, peak = done.stdout.rstrip("\n").rpartition("\n")[::2]
    if done.returncode:
        sys.exit(f"{text}\ndemo: failed: {' '.join(map(str, command))}")
    return Finished(text, int(peak))


def regard(*arguments: object) -> Finished:
    return finish([TOOL, *arguments])


def show_regard(*arguments: object) -> None:
    """Prints the command as a person would type it, then what it says."""
    say(ink("36", f"$ regard {' '.join(map(relative, arguments))}"))
    say(regard(*arguments).text)


# ---------------------------------------------------------------------------------------- the data


@dataclass
class Texts:
    """Seven texts of the model's layer: q, k, v (tokens, H, D) and where each text begins."""

    tensors: Arrays
    tokens: list[list[str]]

    @property
    def ends(self) -> np.ndarray:
        return self.tensors["cu_seqlens_q"]

    def piece(self, name: str, text: int) -> np.ndarray:
        """(H, S, D) of one text, in float64."""
        rows = slice(self.ends[text], self.ends[text + 1])
        return self.tensors[name][rows].astype(np.float64).swapaxes(0, 1)


def read_texts() -> Texts:
    """The file's tensors and a random gradient that arrives at the output."""
    tensors, metadata = tensorfile.load(DATA)
    random = np.random.default_rng(1)
    tensors["dout"] = random.standard_normal(tensors["q"].shape).astype(np.float16)
    return Texts(tensors, json.loads(metadata["tokens"]))


def padded(texts: Texts) -> Arrays:
    """The same texts as one float32 batch; what lies past a text's end is NaN."""
    lengths = np.diff(texts.ends).astype(np.int32)
    arrays = {}
    for name in ("q", "k", "v", "dout"):
        batch = np.full((len(lengths), 12, lengths.max(), 32), np.nan, np.float32)
        for text, length in enumerate(lengths):
            batch[text, :, :length] = texts.piece(name, text)
        arrays[name] = batch
    return {**arrays, "seqused_q": lengths, "seqused_k": lengths}


def repeated(texts: Texts, copies: int) -> Arrays:
    """The long text, `copies` times one after the other: (1, H, S, D) in float32."""
    last = len(texts.tokens) - 1
    return {
        name: np.tile(texts.piece(name, last), (1, copies, 1))[None].astype(np.float32)
        for name in ("q", "k", "v", "dout")
    }


# ------------------------------------------------------------------------------------------ errors


def exact(texts: Texts, causal: bool) -> list[Arrays]:
    """Each text's results in float64, by NumPy alone."""
    results = []
    for text in range(len(texts.tokens)):
        q, k, v, dout = (texts.piece(name, text) for name in ("q", "k", "v", "dout"))
        result = unfused.forward(q, k, v, causal)
        results.append({**result, **unfused.backward(q, k, v, dout, result)})
    return results


def in_float32(texts: Texts) -> list[Arrays]:
    """The same in float32: what plain NumPy loses."""
    results = []
    for text in range(len(texts.tokens)):
        q, k, v, dout = (
            texts.piece(name, text).astype(np.float32) for name in ("q", "k", "v", "dout")
        )
        result = unfused.forward(q, k, v)
        results.append({**result, **unfused.backward(q, k, v, dout, result)})
    return results


def unpack(texts: Texts, found: Arrays) -> list[Arrays]:
    """Packed results (tokens, H, D), lse (H, tokens), text by text as (H, S, D) and (H, S)."""
    return [
        {
            name: array[:, begin:end] if name == "lse" else array[begin:end].swapaxes(0, 1)
            for name, array in found.items()
        }
        for begin, end in zip(texts.ends[:-1], texts.ends[1:], strict=True)
    ]


def unpad(texts: Texts, found: Arrays) -> list[Arrays]:
    lengths = np.diff(texts.ends)
    return [
        {name: array[text, :, :length] for name, array in found.items()}
        for text, length in enumerate(lengths)
    ]


def error(expected: list[Arrays], found: list[Arrays], name: str) -> float:
    """The norm of all differences over the norm of all results."""
    pairs = [(e[name], f[name].astype(np.float64)) for e, f in zip(expected, found, strict=True)]
    difference = sum(float(((f - e) ** 2).sum()) for e, f in pairs)
    return (difference / sum(float((e**2).sum()) for e, _ in pairs)) ** 0.5


def error_row(title: str, expected: list[Arrays], found: list[Arrays]) -> None:
    names = ("out", "lse", *GRADIENTS)
    cells = "".join(f"{error(expected, found, name):>11.1e}" for name in names)
    say(f"{title:<34}{cells}")


def rounded(expected: list[Arrays], dtype: type) -> list[Arrays]:
    return [{name: array.astype(dtype) for name, array in one.items()} for one in expected]


# --------------------------------------------------------------------------------- the story itself


def show_data(texts: Texts) -> None:
    lengths = np.diff(texts.ends)
    say("all-MiniLM-L6-v2, the fourth of its six layers: 12 heads of size 32, float16.")
    say(
        f"{len(lengths)} texts of {lengths.min()} to {lengths.max()} word pieces, packed one after "
        f"the other: {lengths.sum()} rows."
    )
    for tokens in texts.tokens:
        words = " ".join(tokens[1:-1])
        shown = words if len(words) < 88 else words[:84].rsplit(" ", 1)[0] + " ..."
        say(f"{len(tokens):>5}  {ink('2', shown)}")


def attend(name: str, tensors: Arrays, *options: str) -> Arrays:
    """Forward and backward through the command line, quietly; the arrays it wrote."""
    source, target = OUT / f"{name}.safetensors", OUT / f"{name}.out.safetensors"
    tensorfile.save(source, tensors)
    regard("attend", source, "--backward", "--out", target, *options)
    return tensorfile.load(target)[0]


def show_errors(texts: Texts) -> Arrays:
    """Three ways through the library, each against NumPy's float64; returns the packed results."""
    full, causal = exact(texts, causal=False), exact(texts, causal=True)
    packed = tensorfile.load(OUT / "packed.out.safetensors")[0]
    batch = padded(texts)
    say("Norm of the difference from NumPy in float64, over the norm of the result:")
    say(f"{'':<34}" + "".join(f"{name:>11}" for name in ("out", "lse", *GRADIENTS)))
    error_row("packed, float16", full, unpack(texts, packed))
    error_row("  rounding to float16 alone", full, rounded(full, np.float16))
    error_row("padded with NaN, float32", full, unpad(texts, attend("padded", batch)))
    error_row(
        "padded with NaN, float32, causal",
        causal,
        unpad(texts, attend("causal", batch, "--causal")),
    )
    error_row("  plain NumPy in float32", full, in_float32(texts))
    return packed


@dataclass
class Cost:
    """Seconds of the two passes, and the most memory that the process held."""

    forward: float
    backward: float
    peak: int


UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def our_cost(source: Path) -> Cost:
    done = regard("attend", source, "--backward", "--out", source.with_suffix(".out.safetensors"))
    found = dict(
        (name, float(number) * UNITS[unit])
        for name, number, unit in re.findall(
            r"^(forward|backward) +([\d.]+) (us|ms|s)\b", done.text, re.MULTILINE
        )
    )
    return Cost(found["forward"], found["backward"], done.peak)


def numpy_cost(source: Path) -> Cost:
    done = finish([sys.executable, ROOT / "examples/unfused.py", source])
    return Cost(*map(float, done.text.split()), done.peak)


def cost_cells(cost: Cost) -> str:
    return f"{cost.forward:>9.3f}{cost.backward:>10.3f}{cost.peak / 1e6:>8.0f}"


def show_speed(texts: Texts) -> None:
    """The long text repeated; each run a process of its own, so that its memory can be read."""
    say("The long text repeated, float32, 12 heads. Seconds, and megabytes of the whole process:")
    say(f"{'':>8}  {'NumPy, unfused':^27}  {'Regard':^27}")
    names = f"{'forward':>9}{'backward':>10}{'MB':>8}"
    say(f"{'tokens':>8}  {names}  {names}   speed-up")
    for copies in (*COPIES, MANY_COPIES):
        arrays = repeated(texts, copies)
        length = arrays["q"].shape[2]
        source = OUT / "long.safetensors"
        tensorfile.save(source, arrays)
        ours = our_cost(source)
        if copies == MANY_COPIES:
            table = arrays["q"].shape[1] * length**2 * 4 / 1e9
            left, ratio = f"{f'two tables of {table:.1f} GB':^27}", ""
        else:
            theirs = numpy_cost(source)
            left = cost_cells(theirs)
            ratio = (theirs.forward + theirs.backward) / (ours.forward + ours.backward)
            ratio = f"{ratio:>9.1f}x"
        say(f"{length:>8}  {left}  {cost_cells(ours)}  {ratio}")
    for path in OUT.glob("*.safetensors"):
        path.unlink()


def show_picture(texts: Texts, packed: Arrays) -> None:
    """P = exp(s - lse), with the lse that came back from the forward pass."""
    q, k = (texts.piece(name, PICTURED) for name in ("q", "k"))
    lse = unpack(texts, {"lse": packed["lse"]})[PICTURED]["lse"]
    weights = np.exp(q @ k.swapaxes(-1, -2) * 32**-0.5 - lse[:, :, None])
    path = OUT / "attention.png"
    picture.draw(
        path,
        "Who looks at whom",
        "Two heads of all-MiniLM-L6-v2, layer 4 of 6.  P = exp(s − lse), with the lse that the "
        "forward pass returned.",
        texts.tokens[PICTURED],
        picture.Head(
            "Head 2",
            "finds the noun:\nthem → keys,\nneed → them,\nare → keys",
            weights[1],
            "#f2c28b",
            "#c4512d",
        ),
        picture.Head(
            "Head 9",
            "looks back at what\njust happened: them → need",
            weights[8],
            "#a9d3cf",
            "#1f6f78",
        ),
    )
    say(f"{path.relative_to(ROOT)}: the weights of two heads, computed as exp(s - lse).")
    worst = float(np.abs(weights.sum(-1) - 1).max())
    say(f"Each row of weights adds up to 1 within {worst:.0e}.")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    texts = read_texts()
    print(ink("1", "Regard: exact attention, forward and backward, on a trained model's numbers"))
    heading(1, "This machine")
    show_regard("info")
    heading(2, "Real queries, keys and values")
    show_data(texts)
    heading(3, "Forward and backward: the plan, and why")
    source = OUT / "packed.safetensors"
    tensorfile.save(source, texts.tensors)
    show_regard(
        "attend",
        source,
        "--backward",
        "--explain",
        "--compare",
        "--out",
        OUT / "packed.out.safetensors",
    )
    heading(4, "Error, computed a second time by NumPy")
    packed = show_errors(texts)
    heading(5, "Time and memory, beside the unfused computation")
    show_speed(texts)
    heading(6, "The picture")
    show_picture(texts, packed)


if __name__ == "__main__":
    main()
