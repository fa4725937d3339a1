"""The cases: sizes, types and options by name, and the cases of each preset."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..options import ARRAYS, DEFAULTS

SIZE_OF = {"f32": 4, "f16": 2, "bf16": 2}
PASSES = {"fwd": "forward", "bwd": "backward"}
FUSED = ("torch", "flash", "efficient", "cudnn", "jax-cudnn", "openvino", "onnx-rt")
UNFUSED = ("math", "jax", "numpy")
DROPOUT = {"dropout_p": 0.1, "dropout_seed": 1, "dropout_offset": 2}

# On a GPU.
TOKENS, WIDTH = 16384, 2048  # batch * length and heads * head size of the grid
LENGTHS = (512, 2048, 4096, 8192, 16384)
# On a CPU: batch, heads, length, head size.
CPU_SHAPES = ((1, 16, 512, 64), (1, 16, 2048, 64), (1, 8, 2048, 128), (1, 1, 8192, 64),
              (8, 12, 128, 64))

PRESETS = {
    "cpu": {"quick": r"^f32-b1-h16-s512-d64-",
            "small": r"^(f32|bf16)-b1-h16-s512-|^f32-b1-h16-s2048-|^decode-b1-.*-bf16",
            "full": ""},
    "cuda": {"quick": r"^d128-causal-4096$|^decode-b1-.*8192",
             "small": r"^d128-(full|causal)-(2048|16384)$|^d64-causal-4096$|^f32-d128-causal|"
                      r"^bias-d128|^decode-b1-.*8192",
             "full": ""},
}

# Lengths of 32 sequences: in equal ratios; one long among short ones.
RAGGED = {"ragged": tuple(round(128 * 256 ** (n / 31)) for n in range(32)),
          "one-long": (*(512,) * 31, 32768)}


@dataclass(frozen=True)
class Case:
    """options: of `regard.attention`, with arrays as letters of their shapes (see problem.py).
    plain: the same problem without features; what a feature costs is relative to its time."""

    name: str
    group: str
    batch: int
    heads: int
    heads_kv: int
    rows: int
    columns: int
    dim: int
    type: str = "bf16"
    causal: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    passes: tuple[str, ...] = ("fwd", "bwd")
    dim_v: int = 0  # 0: as dim
    plain: Case | None = None

    @property
    def columns_out(self) -> int:
        return self.dim_v or self.dim

    @property
    def keys(self) -> int:
        """Of all sequences together."""
        used = self.options.get("seqused")
        return sum(used) if isinstance(used, tuple) else self.batch * self.columns

    def flops(self, which: str) -> float:
        """2 B H Sq Sk (D + Dv) forward, (3 D + 2 Dv) backward; half of it with a causal mask."""
        d, dv = self.dim, self.columns_out
        dims = d + dv if which == "fwd" else 3 * d + 2 * dv
        whole = 2.0 * self.heads * self.rows * self.keys * dims
        return whole * (0.5 if self.causal else 1.0)

    def bytes(self) -> float:
        """Bytes of k and v, which decoding must read."""
        return (float(self.dim + self.columns_out) * self.heads_kv * self.keys
                * SIZE_OF[self.type])

    def weights(self) -> float:
        """Bytes of the float32 matrix of weights that an unfused computation holds."""
        return 4.0 * self.batch * self.heads * self.rows * self.columns

    @property
    def sizes(self) -> list[int]:
        sizes = [self.batch, self.heads, self.heads_kv, self.rows, self.columns, self.dim]
        return [*sizes, self.dim_v] if self.dim_v else sizes

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"


def cases_of(device: str, preset: str) -> list[Case]:
    """The cases for "cpu" or "cuda"; preset: a key of PRESETS[device]."""
    every = cpu_cases() if device == "cpu" else gpu_cases()
    return [case for case in every if re.search(PRESETS[device][preset], case.name)]


# ----------------------------------------------------------------------------------------- on a CPU


def cpu_cases() -> list[Case]:
    cases = []
    for batch, heads, length, dim in CPU_SHAPES:
        for type in SIZE_OF:
            for causal in (False, True):
                name = f"{type}-b{batch}-h{heads}-s{length}-d{dim}-{'causal' if causal else 'full'}"
                cases.append(Case(name, "grid", batch, heads, heads, length, length, dim, type,
                                  causal, peers=FUSED + UNFUSED))
    for batch in (1, 8):
        for type in ("f32", "bf16"):
            cases.append(Case(f"decode-b{batch}-h32-8-4096-{type}", "decode", batch, 32, 8, 1, 4096,
                              128, type, peers=("torch", "jax"), passes=("fwd",)))
    plain = {"batch": 1, "heads": 8, "heads_kv": 8, "rows": 1024, "columns": 1024, "dim": 64,
             "type": "f32"}
    return cases + feature_cases(plain, window=256, without=("f32-outputs",))


# ----------------------------------------------------------------------------------------- on a GPU


def grid_case(name: str, group: str, dim: int, length: int, peers: tuple[str, ...] = (),
              **more: Any) -> Case:
    heads = max(1, WIDTH // dim)
    heads_kv = more.pop("heads_kv", heads)
    return Case(name, group, max(1, TOKENS // length), heads, heads_kv, length, length, dim,
                peers=peers, **more)


def gpu_cases() -> list[Case]:
    cases = []
    every = FUSED + UNFUSED
    for dim in (64, 128, 256):
        for mask in ("full", "causal"):
            for length in LENGTHS:
                cases.append(grid_case(f"d{dim}-{mask}-{length}", "grid", dim, length, every,
                                       causal=mask == "causal"))
    for dim in (64, 128):
        for mask in ("full", "causal"):
            cases.append(grid_case(f"f32-d{dim}-{mask}-4096", "f32", dim, 4096,
                                   ("efficient", "math", "jax"), type="f32",
                                   causal=mask == "causal"))
    for dim in (64, 128):
        cases.append(grid_case(f"bias-d{dim}-4096", "bias", dim, 4096,
                               ("efficient", "eff.+dbias", "cudnn", "jax-cudnn"),
                               options={"bias": ("1", "h", "q", "k")}))
    for dim in (64, 128):
        cases.append(grid_case(f"dropout-d{dim}-causal-4096", "dropout", dim, 4096,
                               ("flash", "efficient", "cudnn"), causal=True,
                               options=DROPOUT))
    for dim in (40, 80, 96, 192):
        cases.append(grid_case(f"odd-d{dim}-causal-4096", "odd", dim, 4096,
                               ("flash", "efficient", "cudnn", "jax-cudnn"), causal=True))
    cases.append(grid_case("odd-grouped-16-4-d128-causal-4096", "odd", 128, 4096,
                           ("flash", "cudnn", "jax-cudnn"), causal=True, heads_kv=4))
    for mask in ("full", "causal"):
        for dim in (320, 512):
            cases.append(grid_case(f"wide-d{dim}-{mask}-4096", "wide", dim, 4096, ("efficient",),
                                   causal=mask == "causal"))
        cases.append(Case(f"mla-d192-128-{mask}-4096", "wide", 4, 16, 16, 4096, 4096, 192,
                          causal=mask == "causal", peers=("efficient", "cudnn"), dim_v=128))
    plain = {"batch": 4, "heads": 16, "heads_kv": 16, "rows": 4096, "columns": 4096, "dim": 128,
             "type": "bf16"}
    cases += feature_cases(plain, window=1024)
    for batch, heads, heads_kv, length, rows in (
            (32, 32, 8, 4096, 1), (1, 32, 8, 8192, 1), (1, 32, 8, 131072, 1), (16, 32, 32, 8192, 1),
            (1, 32, 8, 1024, 1), (8, 32, 8, 4096, 1), (1, 32, 8, 8192, 4), (8, 32, 8, 4096, 16)):
        name = f"decode-b{batch}-h{heads}-{heads_kv}-{length}" + (f"-q{rows}" if rows > 1 else "")
        cases.append(Case(name, "decode", batch, heads, heads_kv, rows, length, 128,
                          passes=("fwd",), peers=("flash", "cudnn", "jax", "jax-cudnn")))
    for name, lengths in RAGGED.items():
        cases.append(Case(f"decode-b32-h32-8-{name}", "decode", 32, 32, 8, 1, max(lengths), 128,
                          passes=("fwd",), options={"seqused": lengths}))
    return cases


# ------------------------------------------------------------------------------- what features cost


def feature_cases(plain: dict[str, Any], window: int, without: tuple[str, ...] = ()) -> list[Case]:
    """The plain problem, and the same problem with one feature at a time."""
    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        f"window-{window}": {"window": (window, 0)},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi": True},
        "sink": {"sink": True},
        "bias": {"bias": ("1", "h", "q", "k")},
        "bias-without-dbias": {"bias": ("1", "h", "q", "k"), "no_dbias": True},
        "bias-not-broadcast": {"bias": ("b", "h", "q", "k")},
        "bias-of-keys": {"bias": ("b", "1", "1", "k")},
        "mask": {"mask": ("b", "1", "q", "k")},
        "dropout": DROPOUT,
        f"grouped-{plain['heads']}-{plain['heads'] // 4}": {"heads_kv": plain["heads"] // 4},
        "packed": {"packed": True},
        "seqused": {"seqused": True},
        "deterministic": {"deterministic": True},
        "causal-deterministic": {"causal": True, "deterministic": True},
        "dlse": {"dlse": True},
        "f32-outputs": {"f32_outputs": True},
        "unaligned": {"unaligned": True},
        "f16": {"type": "f16"},
    }
    first = Case("feature-plain", "features", **plain)
    cases = []
    for name, options in features.items():
        if name not in without:
            rest = dict(options)
            fields = {key: rest.pop(key) for key in ("causal", "type", "heads_kv") if key in rest}
            cases.append(Case(f"feature-{name}", "features", options=rest,
                              plain=None if name == "plain" else first, **(plain | fields)))
    return cases


# ----------------------------------------------------------------------- one problem from arguments


def _letters(text: str) -> tuple[str, ...]:
    if not re.fullmatch("[1bhqk]{4}", text):
        raise ValueError("four letters of b, h, q, k, and 1 where it is broadcast")
    return tuple(text)


def _pair(text: str) -> tuple[int, int]:
    left, right = text.split(",")
    return int(left), int(right)


_READERS: dict[type, Callable[[str], Any]] = {float: float, type(None): float, int: int, str: str,
                                              tuple: _pair}
_BY_CASE = (*ARRAYS, "causal", "layout", "max_seqlen_q", "max_seqlen_k")
_PLAIN = {name: type(value) for name, value in DEFAULTS.items() if name not in _BY_CASE}
FLAGS = ("causal", "alibi", "sink", "packed", "seqused", "dlse", "no_dbias", "f32_outputs",
         "unaligned", *(name for name, kind in _PLAIN.items() if kind is bool))
# What reads a value, and what to write in the help for it.
VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "bias": ("1hqk", _letters), "mask": ("b1qk", _letters),
    **{name: ("LEFT,RIGHT" if kind is tuple else "WORD" if kind is str else "NUMBER",
              _READERS[kind]) for name, kind in _PLAIN.items() if kind is not bool}}


def given_cases(q: str, types: str, heads_kv: int, columns: int, dim_v: int,
                options: Sequence[str]) -> list[Case]:
    """A case of each type. q: "1x16x2048x64"; 0: as q; options: "causal", "softcap=30".

    Errors: ValueError that names the argument.
    """
    if not re.fullmatch(r"\d+(x\d+){3}", q):
        raise ValueError(f"--q = {q}: must be BATCHxHEADSxLENGTHxSIZE, such as 1x16x2048x64")
    batch, heads, rows, dim = map(int, q.split("x"))
    if min(batch, heads, rows, dim) < 1:
        raise ValueError(f"--q = {q}: every size must be 1 or more")
    found: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name in FLAGS and not equals:
            found[name] = True
            continue
        try:
            found[name] = VALUES[name][1](value)
        except (KeyError, ValueError) as error:
            known = *FLAGS, *(f"{name}={example}" for name, (example, _) in VALUES.items())
            raise ValueError(f"--with {option}: must be one of {', '.join(known)}") from error
    causal = found.pop("causal", False)
    peers = () if found or (causal and columns not in (0, rows)) else FUSED + UNFUSED
    cases = []
    for type in types.split(","):
        if type not in SIZE_OF:
            raise ValueError(f"--type = {type}: must be one of {', '.join(SIZE_OF)}")
        name = "-".join([type, q, *(option.replace("=", "") for option in options)])
        plain = Case(f"{type}-{q}", "given", batch, heads, heads_kv or heads, rows, columns or rows,
                     dim, type, peers=peers, dim_v=dim_v)
        cases.append(plain if not options else replace(
            plain, name=name, causal=causal, options=found, plain=plain))
    return cases
