"""Problems for the tests of regard.torch.distributed: whole tensors, their shards, one process's
answer, and the tasks that workers run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import regard.torch
from regard import masks
from regard.torch import distributed as rd

SCHEMES = ("gather", "halo", "ring", "ulysses")
TWO_LEVELS = ("ulysses+gather", "ulysses+halo", "ulysses+ring")  # two nodes of two ranks
OVERLAPS = {"in stages": "keys", "by heads": "heads", "by documents": "documents"}
OVERLAPPING = tuple(f"{scheme} {how}" for scheme in ("gather", "halo")
                    for how in ("in stages", "by heads"))
DOCUMENTS = [0, 1, 90, 130, 130, 390, 500]
S = 517
GRADED = ("q", "k", "v", "bias", "sink")
PAIRS = ("bias", "mask", "row_spans")  # a rank has its rows of these


@dataclass(frozen=True)
class Case:
    """One problem. pairs: what the plan is told of the mask. bias: its shape, where S stands for the
    length. features: the names of other tensors to be drawn. options: numbers for every call."""

    name: str
    length: int = 300
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (8, 6)
    dtype: torch.dtype = torch.float64
    pairs: dict[str, Any] = field(default_factory=dict)
    bias: tuple[Any, ...] | None = None
    features: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    lse: bool = True  # whether the lse is asked for, and has a gradient
    dtype_of_bias: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name

    def plan(self, world: int, scheme: str) -> rd.Plan:
        """scheme: the plan's; "halo/by_area" names its rows too."""
        scheme, _, rows = scheme.partition("/")
        levels = {"ranks_per_node": 2} if scheme in TWO_LEVELS else {}
        return rd.plan(self.length, world_size=world, heads_q=self.heads[0], heads_kv=self.heads[1],
                       head_size=self.sizes[0], head_size_v=self.sizes[1], batch=self.batch,
                       element_bytes=self.dtype.itemsize, scheme=scheme, rows=rows or "equal", **levels,
                       **self.pairs)

    def tensors(self) -> dict[str, Tensor]:
        """The whole ones; equal in every process."""
        draw = torch.Generator().manual_seed(sum(map(ord, self.name)))
        B, S, (Hq, Hkv), (D, Dv) = self.batch, self.length, self.heads, self.sizes

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

        sums = torch.promote_types(self.dtype, torch.float32)
        found = {"q": normal(B, Hq, S, D), "k": normal(B, Hkv, S, D), "v": normal(B, Hkv, S, Dv),
                 "dout": normal(B, Hq, S, Dv), "dlse": normal(B, Hq, S, dtype=sums)}
        if self.bias is not None:
            shape = [S if size == "S" else size for size in self.bias]
            found["bias"] = normal(*shape, dtype=self.dtype_of_bias or self.dtype)
        if "sink" in self.features:
            found["sink"] = normal(Hq, dtype=torch.float32) + 2
        if "alibi_slopes" in self.features:
            found["alibi_slopes"] = normal(Hq, dtype=torch.float32).abs() + 0.1
        if "mask" in self.features:
            found["mask"] = normal(B, 1, S, S) > -0.3
        if "row_spans" in self.features:
            ends = torch.randint(0, S + 1, (1, Hq, S, 4), generator=draw)
            found["row_spans"] = ends.sort(dim=-1).values.to(torch.int32)
        return found

    def mask_of_plan(self) -> masks.Mask | None:
        """What `pairs` says, by the mask algebra."""
        parts = []
        if "cu_seqlens" in self.pairs:
            cuts = torch.tensor(self.pairs["cu_seqlens"])
            parts.append(masks.documents(cuts, self.length))
        if "causal" in self.pairs or "window" in self.pairs:
            parts.append(masks.Mask(self.length, self.length, causal=self.pairs.get("causal"),
                                    window=self.pairs.get("window")))
        if "mask" in self.pairs:
            parts.append(self.pairs["mask"])
        if not parts:
            return None
        whole = parts[0]
        for part in parts[1:]:
            whole = whole & part
        return whole.like(torch.empty(0))

    def without(self, feature: str) -> Case:
        """The same case without one feature: of pairs, features, options, or "bias"."""
        if feature == "bias":
            return replace(self, bias=None)
        return replace(
            self, pairs={name: x for name, x in self.pairs.items() if name != feature},
            features=tuple(name for name in self.features if name != feature),
            options={name: x for name, x in self.options.items() if name != feature})

    def all_features(self) -> list[str]:
        return [*self.pairs, *self.features, *self.options, *(["bias"] if self.bias else [])]


def whole_results(case: Case, tensors: dict[str, Tensor], dtype: torch.dtype | None = None
                  ) -> dict[str, Tensor]:
    """By regard.torch.attention over the whole sequence, in another type if one is given."""
    leaves = {name: x.detach().clone() for name, x in tensors.items()}
    if dtype is not None:
        leaves |= {name: x.to(dtype) for name, x in leaves.items()
                   if name in ("q", "k", "v", "bias", "dout", "dlse")}
    inputs = {name: x.requires_grad_() for name, x in leaves.items() if name in GRADED}
    arrays = {name: x for name, x in leaves.items() if name in ("alibi_slopes", "mask", "row_spans")}
    if "mask" not in arrays and case.mask_of_plan() is not None:
        arrays["mask"] = case.mask_of_plan()
    elif case.mask_of_plan() is not None:
        arrays["mask"] = case.mask_of_plan() & masks.from_dense(arrays["mask"])
    if isinstance(arrays.get("mask"), masks.Mask) and "row_spans" in arrays:
        S = case.length
        arrays["mask"] = arrays["mask"] & masks.Mask(S, S, row_spans=arrays.pop("row_spans"))
    out, lse = regard.torch.attention(
        **{name: x for name, x in inputs.items() if name not in ("bias", "sink")},
        **{name: inputs[name] for name in ("bias", "sink") if name in inputs},
        **arrays, **case.options, return_lse=True, threads=1)
    torch.autograd.backward([out, lse] if case.lse else [out],
                            [leaves["dout"], leaves["dlse"]] if case.lse else [leaves["dout"]])
    found = {"out": out.detach()} | ({"lse": lse.detach()} if case.lse else {})
    return found | {f"d{name}": x.grad for name, x in inputs.items()}


def local_tensors(case: Case, plan: rd.Plan, rank: int) -> dict[str, Tensor]:
    """This rank's part of the whole tensors."""
    found = case.tensors()
    for name, x in found.items():
        if name in ("q", "k", "v", "dout", "dlse", *PAIRS) and x.dim() > 1:
            dim = 2 if name in ("q", "k", "v", "dout", "dlse") else -2
            if x.shape[dim] == case.length:
                found[name] = plan.shard(x, rank, dim)
    return found


@lru_cache
def levels() -> tuple[ProcessGroup, ProcessGroup]:
    """(among nodes, within a node) of the four ranks of the default group; each calls it."""
    rank = torch.distributed.get_rank()
    made = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    return made[rank % 2], made[2 + rank // 2]


def attend(group: ProcessGroup, case: Case, scheme: str, more: dict[str, Any] | None = None,
           device: str = "cpu") -> dict[str, Tensor]:
    """A task: this rank's results and gradients."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    plan = case.plan(world, scheme)
    tensors = {name: x.to(device) for name, x in local_tensors(case, plan, rank).items()}
    dout, dlse = tensors.pop("dout"), tensors.pop("dlse")
    for name in GRADED:
        if name in tensors:
            tensors[name].requires_grad_()
    at_levels: Any = levels() if plan.nodes is not None else group
    results: Any = rd.attention(**tensors, plan=plan, group=at_levels, **case.options,
                                return_lse=case.lse, threads=1, **(more or {}))
    out, lse = results if case.lse else (results, None)
    if lse is None:
        out.backward(dout)
    else:
        torch.autograd.backward([out, lse], [dout, dlse])
    found = {"out": out.detach()} | ({"lse": lse.detach()} if lse is not None else {})
    found |= {f"d{name}": x.grad for name, x in tensors.items() if name in GRADED}
    return {name: x.cpu() for name, x in found.items()}


def joined(case: Case, plan: rd.Plan, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole results from those of each rank. The gradient of a bias for all rows is the sum."""
    found = {}
    for name in parts[0]:
        locals_ = [part[name] for part in parts]
        by_rows = name != "dsink" and (name != "dbias" or (
            case.bias is not None and case.bias[-2] == "S"))
        if name == "dsink":
            for other in locals_[1:]:
                torch.testing.assert_close(other, locals_[0], rtol=0, atol=0)
            found[name] = locals_[0]
        elif not by_rows:
            found[name] = sum(locals_)  # type: ignore[assignment]
        else:
            dim = -2 if name == "dbias" else 2
            order = torch.cat([plan.positions(rank) for rank in range(plan.world_size)])
            found[name] = torch.cat(locals_, dim).index_select(dim, order.argsort())
    return found


def error(found: Tensor, truth: Tensor) -> float:
    """In norm, relative to the truth's; infinities must be the same ones."""
    assert found.shape == truth.shape, (found.shape, truth.shape)
    found, truth = found.double(), truth.double()
    infinite = truth.isinf()
    assert torch.equal(found[infinite], truth[infinite])
    difference = torch.where(infinite, 0, found - truth)
    return float(difference.norm() / torch.where(infinite, 0, truth).norm().clamp(min=1e-30))


def split_scheme(scheme: str) -> tuple[str, dict[str, Any]]:
    """A name of SCHEMES or OVERLAPPING as the plan's scheme and options of the call."""
    scheme, _, how = scheme.partition(" ")
    return scheme, {"overlap": OVERLAPS[how]} if how else {}


def takes(case: Case, scheme: str) -> bool:
    """Whether the scheme is there for the case: halo needs near keys; stages no positions."""
    if "in stages" in scheme and ("alibi_slopes" in case.features or "dropout_p" in case.options):
        return False
    if "by heads" in scheme and case.heads[1] <= (2 if scheme.startswith("ulysses") else 1):
        return False
    return "halo" not in scheme or not case.pairs.keys() <= {"causal"}


# ----------------------------------------------------------------------------------------- features

DROPOUT = {"dropout_p": 0.3, "dropout_seed": 2**63 + 11, "dropout_offset": 5}
SPANS = masks.sliding(S, 60, sinks=3)
TWO_SPANS = masks.Mask(S, S, row_spans=torch.tensor([[0, 100, 150, 460]], dtype=torch.int32))
FEATURES = [
    Case("full", S),
    Case("causal", S, pairs={"causal": True}),
    Case("window", S, pairs={"causal": True, "window": (200, None)}),
    Case("both_sides", S, pairs={"window": (30, 150)}),
    Case("documents", S, pairs={"cu_seqlens": DOCUMENTS}),
    Case("causal_documents", S, batch=1, pairs={"cu_seqlens": DOCUMENTS, "causal": True}),
    Case("spans_of_plan", S, pairs={"mask": SPANS}),
    Case("bias", S, pairs={"causal": True}, bias=(2, 4, "S", "S")),
    Case("bias_of_rows", S, bias=(4, "S", 1), features=("sink",), lse=False),
    Case("bias_of_keys", S, pairs={"window": (70, 70)}, bias=(1, 1, 1, "S")),
    Case("bias_of_all", S, batch=1, pairs={"cu_seqlens": DOCUMENTS}, bias=(4, 1, 1),
         features=("sink",)),
    Case("mask", S, pairs={"window": (140, 20)}, features=("mask",)),
    Case("sink", S, pairs={"causal": True}, features=("sink",)),
    Case("softcap", S, pairs={"causal": True}, options={"softcap": 0.5, "scale": -0.7}),
    Case("row_spans", S, features=("row_spans",)),
    Case("alibi", S, pairs={"cu_seqlens": DOCUMENTS, "causal": True}, features=("alibi_slopes",)),
    Case("far_alibi", S, pairs={"causal": True}, features=("alibi_slopes", "sink")),
    Case("dropout", S, options=DROPOUT, bias=(1, 4, "S", "S")),
    Case("near_dropout", S, pairs={"cu_seqlens": DOCUMENTS, "window": (90, 30)}, options=DROPOUT,
         features=("alibi_slopes", "row_spans"), bias=(4, 1, "S")),
    Case("everything", S, heads=(6, 2), bias=(1, 6, "S", "S"), features=("sink", "mask", "row_spans"),
         options={"softcap": 2.0, "scale": 0.5},
         pairs={"cu_seqlens": [0, 300, 480], "causal": True, "window": (170, None),
                "mask": TWO_SPANS}),
]

CUTS = [0, 250, 385, 500, 530, 900, 1000, 1100]  # across the ends of 2, 3 and 4 ranks
WHOLE = [Case("whole_causal", 1152, heads=(4, 2), pairs={"cu_seqlens": CUTS, "causal": True}),
         Case("whole_sinks", 1100, batch=1, heads=(2, 1), pairs={"cu_seqlens": CUTS},
              features=("sink",), options={"softcap": 2.0, "scale": 0.5}, lse=False),
         Case("whole_near", 1130, pairs={"cu_seqlens": CUTS, "window": (100, 30)}),
         Case("whole_dealt", 1920, features=("sink",),
              pairs={"cu_seqlens": [0, 384, 640, 1280, 1408, 1792, 1920], "causal": True})]
