"""The functions of flash-attn 2, by their signatures: (B, S, H, D), causal bottom right."""

from __future__ import annotations

from typing import Any, Union

import torch
from torch import Tensor

from ..checks import flag, length, shown
from ..docstrings import documented
from ..errors import Error, Unsupported, WrongType, refuse
from .surface import attention, check_when_run

FlashResult = Union[Tensor, tuple[Tensor, Tensor, None]]


@documented
def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, deterministic: bool = False,
        return_attn_probs: bool = False) -> FlashResult:
    """Attention of (B, Sq, Hq, D) over (B, Sk, Hkv, D); Hq a multiple of Hkv.

    Args:
        q, k, v: float64, float32, float16 or bfloat16; v may have another head size.
        dropout_p: the probability to drop a weight; PyTorch's generator gives the seed.
        softmax_scale: the factor of the scores; None is 1 / sqrt(D).
        causal: query i sees keys up to i + Sk - Sq.
        window_size: (left, right): how many keys on each side of that diagonal are visible, next to
            the diagonal's own; negative is unbounded.
        {softcap}
        {alibi_slopes}
        {deterministic}
        return_attn_probs: return (out, softmax_lse, None).

    Returns:
        out (B, Sq, Hq, Dv); or with softmax_lse (B, Hq, Sq), which is -inf for a row that sees no
        key, and with None in the place of flash-attn's dropout mask (see `regard.dropout_mask`).

    Raises:
        as `attention`.
    """
    return _flash(q, k, v, softmax_scale, window_size, return_attn_probs, dropout_p=dropout_p,
                  causal=causal, softcap=softcap, alibi_slopes=alibi_slopes,
                  deterministic=deterministic, layout="bshd")


def flash_attn_qkvpacked_func(
        qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, deterministic: bool = False,
        return_attn_probs: bool = False) -> FlashResult:
    """`flash_attn_func` of qkv (B, S, 3, H, D), which is read in place."""
    _require_stacked("qkv", qkv, 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
                           alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(
        q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, deterministic: bool = False,
        return_attn_probs: bool = False) -> FlashResult:
    """`flash_attn_func` of q and kv (B, Sk, 2, Hkv, D), which is read in place."""
    _require_stacked("kv", kv, 2)
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
                           alibi_slopes, deterministic, return_attn_probs)


@documented
def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, deterministic: bool = False,
        return_attn_probs: bool = False, block_table: Tensor | None = None) -> FlashResult:
    """`flash_attn_func` of packed sequences: q (total_q, Hq, D), k and v (total_k, Hkv, D).

    Args:
        {cu_seqlens_q}
        {cu_seqlens_k}
        max_seqlen_q, max_seqlen_k: the longest ones, or any larger numbers.
        block_table: must be None; paged keys are not supported.

    Returns:
        out (total_q, Hq, Dv); with return_attn_probs (out, softmax_lse (Hq, total_q), None).

    Raises:
        as `attention`; Unsupported for a block_table.
    """
    if block_table is not None:
        raise refuse("block_table", "a tensor", "paged keys are not supported", Unsupported)
    return _flash(q, k, v, softmax_scale, window_size, return_attn_probs, dropout_p=dropout_p,
                  causal=causal, softcap=softcap, alibi_slopes=alibi_slopes,
                  deterministic=deterministic, cu_seqlens_q=cu_seqlens_q,
                  cu_seqlens_k=cu_seqlens_k, max_seqlen_q=_at_most("max_seqlen_q", max_seqlen_q, q),
                  max_seqlen_k=_at_most("max_seqlen_k", max_seqlen_k, k))


def _at_most(argument: str, longest: Any, x: Tensor) -> Any:
    """No sequence is longer than all rows together; callers round the bound up."""
    if longest is None or not isinstance(x, Tensor):
        return longest
    if isinstance(longest, Tensor):
        longest = int(longest)
    if not torch.compiler.is_dynamo_compiling():
        return min(length(argument, longest), x.shape[0])
    check_when_run(longest)
    return _smaller(length(argument, longest), x.shape[0])


_smaller: Any = torch.sym_min


def _flash(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None,
           window_size: tuple[int, int], return_attn_probs: bool, *, causal: bool,
           **options: Any) -> FlashResult:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise refuse("window_size", shown(window_size), "must be (left, right)", WrongType)
    left, right = (-1 if isinstance(side, int) and side < 0 else side for side in window_size)
    is_causal = flag("causal", causal)
    # The diagonal of the window is the bottom-right one, with and without causal.
    try:
        result = attention(q, k, v, scale=softmax_scale, window=(left, right),
                           causal="bottom_right" if is_causal else False,
                           return_lse=return_attn_probs, **options)
    except Error as error:
        raise error.named({"scale": "softmax_scale", "window": "window_size",
                           "return_lse": "return_attn_probs"}) from None
    if isinstance(result, tuple):
        return (*result, None)
    return result


def _require_stacked(name: str, x: Tensor, count: int) -> None:
    if not isinstance(x, Tensor):
        raise refuse(name, shown(x), "must be a tensor of PyTorch", WrongType)
    if x.dim() != 5 or x.shape[2] != count:
        raise refuse(name, f"a tensor of shape {tuple(x.shape)}", f"must be (B, S, {count}, H, D)")
