"""`scaled_dot_product_attention` with PyTorch's signature and meaning, and Regard's extensions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call import unknown_option
from ..checks import flag, shown
from ..docstrings import documented
from ..errors import Error, WrongType, refuse
from ..mask_value import Mask
from ..options import SDPA_OPTIONS
from . import direct
from .limits import is_causal_bias
from .surface import Result, attention, require_tensor

if TYPE_CHECKING:
    from ..typing import Causal, SdpaExtensions, Unpack


@overload
def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | Mask | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False, *, return_lse: Literal[False] = False,
        **extensions: Unpack[SdpaExtensions]) -> Tensor: ...


@overload
def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | Mask | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False, *, return_lse: Literal[True],
        **extensions: Unpack[SdpaExtensions]) -> tuple[Tensor, Tensor]: ...


@documented
def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | Mask | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False, *, bias: Any = None, causal: Causal = False,
        dropout_seed: int | None = None, return_lse: bool = False, out_type: Any = None,
        threads: int = 0, backend: str = "", **extensions: Any) -> Result:
    """As torch.nn.functional.scaled_dot_product_attention; more by keywords.

    Args:
        query: (..., Hq, L, E), from two dimensions on. Leading dimensions broadcast.
        key: (..., H, S, E).
        value: (..., H, S, Ev).
        attn_mask: broadcasts to (..., Hq, L, S); bool, True = attend; or of any float type, added
            to the scores, with a gradient; or a `regard.masks.Mask`.
        dropout_p: applied whenever it is above 0.
        is_causal: query i sees keys up to i (top left), whatever L and S are; may be combined with
            attn_mask, which some of PyTorch's kernels refuse.
        scale: the factor of the scores; None is 1 / sqrt(E).
        enable_gqa: lets Hq be a multiple of H. Without it heads must broadcast.
        bias: of a float type, next to a bool attn_mask.
        causal: as `attention` takes it, instead of is_causal: "bottom_right".
        dropout_seed: None draws a seed from PyTorch's generator of the CPU.
        {sdpa_options}
        return_lse: also return lse, (..., Hq, L).
        {out_type}
        threads: of the CPU; 0 is torch.get_num_threads().
        {backend}

    Returns:
        (..., Hq, L, Ev), or (out, lse). A row that sees no key is 0.

    Raises:
        as `attention`.
    """
    if causal is False and bias is dropout_seed is out_type is None and not (
            return_lse or threads or backend or extensions):
        found = direct.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p,
                                                    is_causal, scale, enable_gqa)
        if found is not None:
            return found  # type: ignore[no-any-return]
    for name, extension in extensions.items():
        if name not in SDPA_OPTIONS:
            raise unknown_option(name, extension, SDPA_OPTIONS)
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        require_tensor(name, x)
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    if is_causal_bias(attn_mask):
        causal, attn_mask = _alignment(attn_mask, query, key, is_causal or causal), None
    mask: Tensor | Mask | None = None
    is_bias = False  # attn_mask
    if attn_mask is not None:
        if isinstance(attn_mask, Mask):
            mask = attn_mask
        elif not isinstance(attn_mask, Tensor):
            raise refuse("attn_mask", shown(attn_mask), "must be a tensor of PyTorch, or a Mask",
                         WrongType)
        elif attn_mask.dtype == torch.bool:
            mask = attn_mask
        elif not attn_mask.is_floating_point():
            raise refuse("attn_mask", f"a tensor of {attn_mask.dtype}",
                         "must be bool or of a float type", WrongType)
        elif bias is not None:
            raise refuse("bias", "a tensor", "must be None where attn_mask is one already")
        else:
            bias, is_bias = attn_mask, True
    if is_causal:
        if causal is not False:
            raise refuse("causal", shown(causal), "must be False where is_causal is True")
        causal = "top_left"
    lead: tuple[int, ...] = query.shape[:-3]
    batched = (query.dim() == 4 and key.dim() == 4 and value.dim() == 4
               and key.shape[0] == lead[0] and value.shape[0] == lead[0])
    alone = False  # one head without its dimension
    if not batched:
        rank = _rank(given)
        alone = rank == 2
        lead = tuple(_common_size(given, axis) for axis in range(-rank, -3))
        query, key, value = (_folded(x, lead) for x in (query, key, value))
        mask, bias = _folded_scores(mask, lead), _folded_scores(bias, lead)
    if not enable_gqa:
        query, key, value = _with_equal_heads(query, key, value)
    width = value.shape[-1]
    if query.shape[1] == 0 == key.shape[1]:
        # Without heads out is empty, but must depend on all three for autograd.
        out, lse = pad(query[..., :0], (0, width)) + key.sum() + value.sum(), query.sum(-1)
        return (out, lse) if return_lse else out
    if query.shape[-1] == 0 == key.shape[-1]:  # a column of zeros gives the same scores, 0
        query, key = (pad(x, (0, 1)) for x in (query, key))
        scale = 1.0 if scale is None else scale
    if width == 0:
        value = pad(value, (0, 1))
    try:
        result = attention(
            query, key, value, bias=bias, mask=mask, causal=causal, scale=scale,
            dropout_p=dropout_p, dropout_seed=dropout_seed, return_lse=return_lse,
            out_type=out_type, threads=threads, backend=backend, **extensions)
    except Error as error:
        raise error.named({"q": "query", "k": "key", "v": "value", "mask": "attn_mask"} | (
            {"bias": "attn_mask"} if is_bias else {}) | (
            {"causal": "is_causal"} if is_causal else {})) from None
    if width == 0:
        result = ((result[0][..., :0], result[1]) if isinstance(result, tuple) else
                  result[..., :0])
    if batched:
        return result
    if isinstance(result, tuple):
        return _unfolded(result[0], lead, alone), _unfolded(result[1], lead, alone)
    return _unfolded(result, lead, alone)


def _alignment(bias: Any, query: Tensor, key: Tensor, other: Any) -> Causal:
    """The causal mask that an object of torch.nn.attention.bias stands for."""
    lengths, wanted = (query.shape[-2], key.shape[-2]), (bias.seq_len_q, bias.seq_len_kv)
    if lengths != wanted:
        raise refuse("attn_mask", f"a CausalBias of {wanted[0]} rows and {wanted[1]} keys",
                     f"must be of {lengths[0]} rows and {lengths[1]} keys")
    if other:
        raise refuse("attn_mask", "a CausalBias", "must be None where another argument is causal")
    return "top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"


def _rank(given: dict[str, Tensor]) -> int:
    for name, x in given.items():
        if x.dim() < 2:
            raise refuse(name, f"a tensor of shape {tuple(x.shape)}",
                         "must have at least 2 dimensions")
    return max(x.dim() for x in given.values())


def _common_size(given: dict[str, Tensor], axis: int) -> int:
    """The size to which the sizes along an axis, counted from the end, broadcast."""
    common = 1
    for name, x in given.items():
        size = x.shape[axis] if x.dim() >= -axis else 1
        if common == 1:
            common = size
        elif size != 1 and size != common:
            raise refuse(name, f"a tensor of shape {tuple(x.shape)}",
                         f"its size {size} does not broadcast to {common}")
    return common


def _folded(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(B, H, S, D); copies only where the leading dimensions cannot be merged in place."""
    heads = x.shape[-3] if x.dim() > 2 else 1
    rows = x.shape[-2:]
    return x.expand(*lead, heads, *rows).reshape(math.prod(lead), heads, *rows)


def _folded_scores(x: Any, lead: tuple[int, ...]) -> Any:
    """attn_mask or bias, which broadcasts and may lack the dimension of heads. A Mask stays."""
    if x is None or isinstance(x, Mask) or x.dim() <= 3:
        return x
    if x.dim() > len(lead) + 3:
        raise refuse("attn_mask", f"a tensor of shape {tuple(x.shape)}",
                     f"must have at most {len(lead) + 3} dimensions")
    if all(size == 1 for size in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def _with_equal_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = query.shape[1], key.shape[1], value.shape[1]
    if heads[1] == heads[2] and heads[1] in (1, heads[0]):
        return query, key, value
    for name, size in zip(("key", "value"), heads[1:]):
        if 1 != size != heads[0] != 1:
            raise refuse(name, f"{size} heads", f"with {heads[0]} of query: must be as many, or "
                         "give enable_gqa=True")
    common = _common_size({"query": query, "key": key, "value": value}, -3)
    query, key, value = (x.expand(-1, common, -1, -1) for x in (query, key, value))
    return query, key, value


def _unfolded(x: Tensor, lead: tuple[int, ...], alone: bool) -> Tensor:
    x = x.reshape(*lead, *x.shape[1:]).contiguous()
    return x[0] if alone else x
