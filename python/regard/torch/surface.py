"""`regard.torch.attention`: the options that a user gives, as the operator takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Union, overload

import torch
from torch import Tensor

from ..errors import Unsupported, WrongType, refuse
from ..options import checked
from ..repair import layout_advice
from ..settings import (TYPE_NAMES, Causal, Layout, Precision, Window, causal_name, type_name,
                        window_pair)
from .kernels import Options
from .operators import forward

if TYPE_CHECKING:
    from ..typing import AttentionOptions, Unpack

Result = Union[Tensor, tuple[Tensor, Tensor]]
_OUT_TYPES = {short: getattr(torch, name) for name, short in TYPE_NAMES.items()}


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False,
              out_type: Any = None, threads: int = 0, backend: str = "",
              **options: Unpack[AttentionOptions]) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True],
              out_type: Any = None, threads: int = 0, backend: str = "",
              **options: Unpack[AttentionOptions]) -> tuple[Tensor, Tensor]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, out_type: Any = None,
              threads: int = 0, backend: str = "", **options: Unpack[AttentionOptions]
              ) -> Result: ...


def attention(q: Tensor, k: Tensor, v: Tensor, *, bias: Any = None,
              mask: Any = None, causal: Causal = False, window: Window = None,
              scale: float | None = None, softcap: float = 0.0,
              alibi_slopes: Any = None, sink: Any = None,
              dropout_p: float = 0.0, dropout_seed: int | None = None, dropout_offset: int = 0,
              cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
              max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
              seqused_q: Any = None, seqused_k: Any = None,
              layout: Layout = "bhsd", precision: Precision = "full", deterministic: bool = False,
              return_lse: bool = False, out_type: Any = None, threads: int = 0,
              backend: str = "") -> Result:
    """softmax(scale q k^T + bias) v, exactly, in memory linear in the sequence.

    Differentiable in q, k, v, bias and sink, through out and through lse; gradients of gradients
    are not available. Runs on the CPU and on CUDA, there on the current stream; under
    torch.compile, torch.autocast, torch.utils.checkpoint and in CUDA graphs.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd", or packed (total_q, Hq, D) with
            cu_seqlens; float64, float32, float16 or bfloat16. Any strides are read in place, 0
            included; where the last one is not 1, a dense copy is made.
        k: (B, Hkv, Sk, D) likewise; Hq is a multiple of Hkv, and consecutive query heads share one.
        v: (B, Hkv, Sk, Dv) likewise.
        bias: added to the scores; broadcasts to (B, Hq, Sq, Sk); any float type.
        mask: bool, True = visible; broadcasts to (B, Hq, Sq, Sk).
        causal: "top_left": query i sees keys up to i; "bottom_right": up to i + Sk - Sq; True where
            both are the same.
        window: (left, right) keys beside the diagonal that stay visible; None is unbounded.
        scale: of q k^T; 1/sqrt(D) if None.
        softcap: c > 0 replaces scores s by c tanh(s/c), before the bias.
        alibi_slopes: (Hq) or (B, Hq), read as float32; score -= slope |i + Sk - Sq - j|. They have
            no gradient.
        sink: (Hq), read as float32; a logit that joins each row's denominator and carries no value.
        dropout_p: probability to drop a weight, in steps of 1/65536.
        dropout_seed: from 0 to 2^64 - 1; with dropout_offset it says which weights drop, see
            `regard.dropout_mask`. None draws one from PyTorch's generator of the CPU, which
            torch.manual_seed governs; not while a CUDA graph is captured.
        cu_seqlens_q, cu_seqlens_k: (B + 1) int32; where each packed sequence begins; with
            max_seqlen_q and max_seqlen_k, the longest ones.
        seqused_q, seqused_k: (B) int32; how many rows of each sequence are real.
        precision: how a GPU's tensor cores may round float32 inputs: "full", "tf32" or "bf16".
        deterministic: gradients that repeat to the bit on a GPU (a CPU's always do); also with
            torch.use_deterministic_algorithms.
        return_lse: also return the log of the softmax's denominators, natural, (B, Hq, Sq), packed
            (Hq, total_q); float32 (float64 for float64).
        out_type: "float32" gives a float32 out for float16 and bfloat16 inputs.
        threads: of the CPU; 0 is torch.get_num_threads().
        backend: forces one of `regard.info().backends`; "" chooses.

    Returns:
        out, (B, Hq, Sq, Dv) in q's layout, or (out, lse). A row that sees no key is 0, its lse
        -inf; so is a row past the end of its sequence.

    Raises:
        InvalidArgument (a ValueError), WrongType (a TypeError), Unsupported, Unavailable,
        OutOfMemory, DeviceFailure; each names the argument and its value.
    """
    packed = cu_seqlens_q is not None
    layout = checked("layout", layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require_rows(name, x, packed, layout)
    for name, extra in (("bias", bias), ("mask", mask), ("alibi_slopes", alibi_slopes),
                        ("sink", sink), ("cu_seqlens_q", cu_seqlens_q),
                        ("cu_seqlens_k", cu_seqlens_k), ("seqused_q", seqused_q),
                        ("seqused_k", seqused_k)):
        if extra is not None:
            _require_tensor(name, extra)
    max_seqlen_q = checked("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = checked("max_seqlen_k", max_seqlen_k)
    if packed and (max_seqlen_q is None or max_seqlen_k is None):
        raise refuse("max_seqlen_q" if max_seqlen_q is None else "max_seqlen_k", None,
                     "must be given with cu_seqlens_q: the longest sequence")
    alignment = "none"
    if causal is not False:
        axis = 1 if layout == "bshd" else 2
        length_q = q.shape[axis] if max_seqlen_q is None else max_seqlen_q
        length_k = k.shape[axis] if max_seqlen_k is None else max_seqlen_k
        advice = "" if packed else layout_advice(q.shape, k.shape, v.shape, layout)
        alignment = causal_name(causal, length_q, length_k, advice)
    dropout_p = checked("dropout_p", dropout_p)
    drawn_seed = None
    if dropout_p > 0 and dropout_seed is None:
        drawn_seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu")
    out, lse = forward(q, k, v, bias, _as_float32(sink), *Options(
        mask, _as_float32(alibi_slopes), cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        drawn_seed, checked("scale", scale), checked("softcap", softcap), alignment,
        window_pair(window), dropout_p,
        _signed(checked("dropout_seed", 0 if dropout_seed is None else dropout_seed)),
        _signed(checked("dropout_offset", dropout_offset)), max_seqlen_q or 0, max_seqlen_k or 0,
        layout, checked("precision", precision),
        checked("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled(),
        None if out_type is None else _OUT_TYPES[type_name("out_type", out_type)],
        checked("threads", threads), checked("backend", backend)))
    return (out, lse) if checked("return_lse", return_lse) else out


def _require_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise refuse(name, f"a {type(x).__name__}", "must be a tensor of PyTorch", WrongType)


def _require_rows(name: str, x: Any, packed: bool, layout: str) -> None:
    _require_tensor(name, x)
    if x.dim() != (3 if packed else 4):
        wanted = ("3 dimensions, (total, H, D), as cu_seqlens_q is given" if packed else
                  f"4 dimensions, ({', '.join(layout.upper())}), or 3 with cu_seqlens_q")
        raise refuse(name, f"a tensor of shape {tuple(x.shape)}", f"must have {wanted}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise refuse(name, f"a tensor on {x.device}", "must be on the CPU or a CUDA GPU",
                     Unsupported)
    if x.layout != torch.strided:
        raise refuse(name, f"a tensor of layout {x.layout}", "must be strided", WrongType)
    if x.is_nested:
        raise refuse(name, "a nested tensor", "must be dense: pack it and give cu_seqlens_q",
                     WrongType)


def _as_float32(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.dtype == torch.float32 else x.float()


def _signed(number: int) -> int:
    """64 bits, as the schema's signed integers hold them."""
    return number if number < 2**63 else number - 2**64
