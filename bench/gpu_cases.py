"""What bench/gpu.py times: cases, their tensors, and their results in float64 on a few heads."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch_calls as calls

TYPES = calls.TYPES
TOKENS, WIDTH = 16384, 2048  # batch * length and heads * head size of the grid
LENGTHS = [512, 2048, 4096, 8192, 16384]
BLOCK = 512  # query rows at a time in the float64 computation
CHECKED_BIAS_ROWS = 256


@dataclass(frozen=True)
class Case:
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
    options: dict = field(default_factory=dict)  # of Attention, tensors by their shapes; see build
    peers: tuple[str, ...] = ()
    passes: tuple[str, ...] = ("fwd", "bwd")

    def flops(self, which: str) -> float:
        """4 B H Sq Sk D forward, half of it with a causal mask, 2.5 times that backward."""
        whole = 4.0 * self.batch * self.heads * self.rows * self.columns * self.dim
        return whole * (0.5 if self.causal else 1.0) * (1.0 if which == "fwd" else 2.5)

    def bytes(self) -> float:
        """Of k and v: what decoding must read."""
        size = TYPES[self.type].itemsize
        return 2.0 * self.batch * self.heads_kv * self.columns * self.dim * size


def grid_case(name: str, group: str, dim: int, length: int, peers: tuple[str, ...] = (),
              **more) -> Case:
    batch, heads = max(1, TOKENS // length), max(1, WIDTH // dim)
    heads_kv = more.pop("heads_kv", heads)
    return Case(name, group, batch, heads, heads_kv, length, length, dim, peers=peers, **more)


def all_cases() -> list[Case]:
    cases = []
    for dim in (64, 128, 256):
        for causal in (False, True):
            for length in LENGTHS:
                cases.append(grid_case(
                    f"d{dim}-{'causal' if causal else 'full'}-{length}", "grid", dim, length,
                    ("flash", "efficient", "cudnn"), causal=causal))
    for dim in (64, 128):
        for causal in (False, True):
            cases.append(grid_case(f"f32-d{dim}-{'causal' if causal else 'full'}-4096", "f32", dim,
                                   4096, ("efficient",), type="f32", causal=causal))
        cases.append(grid_case(f"bias-d{dim}-4096", "bias", dim, 4096,
                               ("efficient", "eff.+dbias", "cudnn"),
                               options={"bias": ("1", "h", "q", "k")}))
    for dim in (64, 128):
        cases.append(grid_case(f"dropout-d{dim}-causal-4096", "dropout", dim, 4096,
                               ("flash", "efficient", "cudnn"), causal=True,
                               options={"dropout": (0.1, 1, 2)}))
    for dim in (40, 80, 96, 192):
        cases.append(grid_case(f"odd-d{dim}-causal-4096", "odd", dim, 4096,
                               ("flash", "efficient", "cudnn"), causal=True))
    cases.append(grid_case("odd-grouped-16-4-d128-causal-4096", "odd", 128, 4096,
                           ("flash", "cudnn"), causal=True, heads_kv=4))
    for name, options in FEATURES.items():
        more = dict(options)
        fields = {key: more.pop(key) for key in ("causal", "type", "heads_kv") if key in more}
        cases.append(grid_case(f"feature-{name}", "features", 128, 4096, options=more, **fields))
    for batch, heads, heads_kv, length in ((32, 32, 8, 4096), (1, 32, 8, 8192), (1, 32, 8, 131072),
                                           (16, 32, 32, 8192)):
        cases.append(Case(f"decode-b{batch}-h{heads}-{heads_kv}-{length}", "decode", batch, heads,
                          heads_kv, 1, length, 128, peers=("flash", "cudnn"), passes=("fwd",)))
    return cases


# One feature at a time, at D 128 and S 4096, beside the plain problem.
FEATURES: dict[str, dict] = {
    "plain": {},
    "causal": {"causal": True},
    "window-1024": {"window": (1024, 0)},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": True},
    "sink": {"sink": True},
    "bias": {"bias": ("1", "h", "q", "k")},
    "bias-without-dbias": {"bias": ("1", "h", "q", "k"), "no_dbias": True},
    "bias-not-broadcast": {"bias": ("b", "h", "q", "k")},
    "bias-of-keys": {"bias": ("b", "1", "1", "k")},
    "mask": {"mask": ("b", "1", "q", "k")},
    "dropout": {"dropout": (0.1, 1, 2)},
    "grouped-16-4": {"heads_kv": 4},
    "packed": {"packed": True},
    "seqused": {"seqused": True},
    "deterministic": {"deterministic": 1},
    "causal-deterministic": {"causal": True, "deterministic": 1},
    "dlse": {"dlse": True},
    "f32-outputs": {"f32_outputs": True},
    "unaligned": {"unaligned": True},
    "f16": {"type": "f16"},
}


class Problem:
    """The tensors of a case: inputs, room for results, and the results in float64."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(1)
        self.case, self.device = case, device
        self.dtype = TYPES[case.type]
        options = dict(case.options)
        self.packed = options.pop("packed", False)
        self.unaligned = options.pop("unaligned", False)
        wide = torch.float32 if options.pop("f32_outputs", False) else self.dtype
        self.no_dbias = options.pop("no_dbias", False)
        shape_q = case.batch, case.heads, case.rows, case.dim
        shape_k = case.batch, case.heads_kv, case.columns, case.dim
        self.given = {"q": self.heads(shape_q), "k": self.heads(shape_k), "v": self.heads(shape_k)}
        self.dout = self.heads(shape_q).to(wide)
        self.dlse = self.normal((case.batch, case.heads, case.rows), torch.float32) if (
            options.pop("dlse", False)) else None
        self.options = self.build(options)
        if case.causal:
            self.options["causal"] = "bottom_right"
        self.out = torch.empty_like(self.given["q"], dtype=wide)
        lse_shape = (case.heads, self.out.shape[0]) if self.packed else shape_q[:3]
        self.lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
        self.gradients = {"d" + name: torch.empty_like(x, dtype=wide)
                          for name, x in self.given.items()}
        if "bias" in self.options and not self.no_dbias:
            self.gradients["dbias"] = torch.empty_like(self.options["bias"])
        if "sink" in self.options:
            self.gradients["dsink"] = torch.empty_like(self.options["sink"])
        self.attention = calls.attention(**self.given, **self.options)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device)

    def heads(self, shape: tuple[int, ...]) -> torch.Tensor:
        """(B, H, S, D) as a view of (B, S, H, D); packed: (B * S, H, D)."""
        b, h, s, d = shape
        memory = self.normal((b, s, h, d))
        if self.unaligned:
            room = torch.empty(memory.numel() + 1, dtype=self.dtype, device=self.device)
            memory = room[1:].view(memory.shape).copy_(memory)
        return memory.flatten(0, 1) if self.packed else memory.transpose(1, 2)

    def build(self, options: dict) -> dict:
        """Tensors where the case has shapes and flags."""
        case = self.case
        sizes = {"b": case.batch, "h": case.heads, "q": case.rows, "k": case.columns, "1": 1}
        if "bias" in options:
            options["bias"] = self.normal(tuple(sizes[letter] for letter in options["bias"]))
        if "mask" in options:
            shape = tuple(sizes[letter] for letter in options["mask"])
            options["mask"] = torch.rand(shape, device=self.device) < 0.9
        if options.pop("alibi", False):
            power = torch.arange(1, case.heads + 1, device=self.device).float()
            options["alibi_slopes"] = 2.0 ** (-8.0 * power / case.heads)
        if options.pop("sink", False):
            options["sink"] = self.normal((case.heads,), torch.float32)
        if self.packed:
            for side, length in (("q", case.rows), ("k", case.columns)):
                options["cu_seqlens_" + side] = length * torch.arange(
                    case.batch + 1, dtype=torch.int32, device=self.device)
                options["max_seqlen_" + side] = length
        if options.pop("seqused", False):
            options["seqused_k"] = torch.full((case.batch,), case.columns - 37, dtype=torch.int32,
                                              device=self.device)
        return options

    def results(self) -> dict[str, torch.Tensor]:
        return {"out": self.out, "lse": self.lse, **self.gradients}

    # ------------------------------------------------------------------------ in float64

    def one(self, x: torch.Tensor, b: int, h: int) -> torch.Tensor:
        """(S, ...) of one head; of a packed tensor, of one sequence of equal ones."""
        if not self.packed:
            return x[b, h]
        length = len(x) // self.case.batch
        return x[b * length : (b + 1) * length, h]

    def one_lse(self, x: torch.Tensor, b: int, h: int) -> torch.Tensor:
        rows = self.case.rows
        return x[h, b * rows : (b + 1) * rows] if self.packed else x[b, h]

    def columns(self) -> int:
        used = self.options.get("seqused_k")
        return self.case.columns if used is None else int(used[-1])

    def block(self, b: int, h: int, rows: slice, keep: torch.Tensor | None):
        """Scores' weights, what a row's softmax becomes, and ds of some rows of one head."""
        o, case = self.options, self.case
        group = case.heads // case.heads_kv
        n = self.columns()
        q = self.one(self.given["q"], b, h)[rows].double()
        k, v = (self.one(self.given[x], b, h // group)[:n].double() for x in ("k", "v"))
        dout = self.one(self.dout, b, h)[rows].double()
        score = case.dim**-0.5 * q @ k.T
        slope = 1.0
        if o.get("softcap"):
            score = o["softcap"] * torch.tanh(score / o["softcap"])
            slope = 1 - (score / o["softcap"]) ** 2

        def part(x: torch.Tensor) -> torch.Tensor:
            x = x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]
            return (x[rows] if x.shape[0] > 1 else x)[:, :n]

        if "bias" in o:
            score = score + part(o["bias"]).double()
        i = torch.arange(case.rows, device=q.device)[rows][:, None] + n - case.rows
        j = torch.arange(n, device=q.device)[None, :]
        if "alibi_slopes" in o:
            score = score - o["alibi_slopes"][h].double() * (i - j).abs()
        hidden = j > i if case.causal else torch.zeros_like(j > i)
        left, right = o.get("window", (-1, -1))
        hidden = hidden | (j < i - left) if left >= 0 else hidden
        hidden = hidden | (j > i + right) if right >= 0 else hidden
        if "mask" in o:
            hidden = hidden | ~part(o["mask"])
        score = score.masked_fill(hidden, -torch.inf)
        lse = score.logsumexp(1)
        if "sink" in o:
            lse = torch.logaddexp(lse, o["sink"][h].double())
        weights = torch.exp(score - lse[:, None])
        factor = 1.0
        if keep is not None:
            factor = keep[rows].double() / (1 - calls.regard.dropout_probability(o["dropout"][0]))
        out = (weights * factor) @ v
        delta = (dout * out).sum(1)
        if self.dlse is not None:
            delta = delta - self.one_lse(self.dlse, b, h)[rows].double()
        ds = weights * (factor * (dout @ v.T) - delta[:, None])
        dr = case.dim**-0.5 * ds * slope
        return {"out": out, "lse": lse, "dq": dr @ k, "dk": dr.T @ q,
                "dv": (weights * factor).T @ dout, "ds": ds}

    @functools.cached_property
    def exact(self) -> list[tuple[str, object, torch.Tensor]]:
        """(name, which part of a result, that part): the last kv head, the first with dropout."""
        case = self.case
        group = case.heads // case.heads_kv
        keep = None
        b, g = case.batch - 1, case.heads_kv - 1
        if "dropout" in self.options:
            b = g = 0
            sizes = 1, 1, case.rows, case.columns
            keep = calls.dropout_mask(self.options, *sizes, self.device)[0, 0]
        found: list = []
        dk = dv = 0.0
        for h in range(g * group, (g + 1) * group if keep is None else 1):
            blocks = []
            for begin in range(0, case.rows, BLOCK):
                rows = slice(begin, min(begin + BLOCK, case.rows))
                block = self.block(b, h, rows, keep)
                block.pop("ds")
                dk, dv = dk + block.pop("dk"), dv + block.pop("dv")
                blocks.append(block)
            for name in ("out", "dq", "lse"):
                whole = torch.cat([block[name] for block in blocks])
                one = self.one_lse if name == "lse" else self.one
                found.append((name, lambda x, one=one, h=h: one(x, b, h), whole))
        if keep is None or group == 1:
            n = self.columns()
            for name, whole in (("dk", dk), ("dv", dv)):
                found.append((name, lambda x: self.one(x, b, g)[:n], whole))
        if "dbias" in self.gradients:
            found.append(self.exact_dbias(keep))
        return found

    def exact_dbias(self, keep: torch.Tensor | None) -> tuple[str, object, torch.Tensor]:
        """Some rows of the last head, or all of a bias without rows; summed as it is broadcast."""
        case = self.case
        shape = self.options["bias"].shape
        b_last, h_last = shape[0] - 1, shape[1] - 1
        total = 0.0
        for b in range(case.batch) if shape[0] == 1 else [b_last]:
            for h in range(case.heads) if shape[1] == 1 else [h_last]:
                end = CHECKED_BIAS_ROWS if shape[2] > 1 else case.rows
                for begin in range(0, min(end, case.rows), BLOCK):
                    rows = slice(begin, min(begin + BLOCK, end, case.rows))
                    ds = self.block(b, h, rows, keep)["ds"]
                    total = total + (ds if shape[2] > 1 else ds.sum(0, keepdim=True))
        rows_checked = min(CHECKED_BIAS_ROWS, shape[2])
        return "dbias", lambda x: x[b_last, h_last, :rows_checked], total


def errors(exact: list[tuple[str, object, torch.Tensor]],
           results: dict[str, torch.Tensor]) -> dict[str, float]:
    """The norm of the difference over the norm, by result; the worst part of each."""
    found: dict[str, float] = {}
    for name, part, want in exact:
        if name in results:
            got = part(results[name]).double()
            error = float((got - want).norm() / want.norm())
            found[name] = max(found.get(name, 0.0), error) if error == error else float("nan")
    return found
