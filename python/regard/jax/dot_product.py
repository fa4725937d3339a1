"""jax.nn.dot_product_attention's arguments and results, computed by the library."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import checks
from ..errors import Error, refuse
from ..mask_value import Mask
from ..masks import from_dense
from .attention import as_array, attention


def dot_product_attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *,
                          scale: float | None = None, is_causal: bool = False,
                          query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
                          local_window_size: int | tuple[int, int] | None = None,
                          implementation: str | None = None, return_residual: bool = False) -> Any:
    """Stands in for jax.nn.dot_product_attention.

    The differences: no matrix of T x S is made; a row that sees no key is 0, not the mean of the
    values; a bias of -inf hides its pair; value may have another head size than key; scale is a
    number, not an array; windows are not negative, and lengths at most T and S.

    Args:
        query: (B, T, N, H) or (T, N, H).
        key, value: (B, S, K, H) or (S, K, H); N is a multiple of K.
        bias, mask: broadcast to (B, N, T, S); the mask is bool, True = visible, or a
            `regard.masks.Mask`.
        scale: 1/sqrt(H) if None.
        is_causal: query t sees keys up to t.
        query_seq_lengths, key_value_seq_lengths: (B) int32.
        local_window_size: (left, right): how many keys before and after t are visible, next to t;
            or one number for both. Without is_causal, it becomes a mask of (T, S) if T is not S or
            if lengths are given.
        implementation: must be None.
        return_residual: also return the log-sum-exp, (B, T, N) or (T, N), in the type of key and
            without a gradient; `attention` returns it in float32 with its gradient.

    Raises:
        as `attention`.
    """
    if implementation is not None:
        raise refuse("implementation", repr(implementation),
                     "must be None; JAX's own are in jax.nn.dot_product_attention")
    q, k, v = (as_array(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    shape = q.shape
    for x, name in ((q, "query"), (k, "key"), (v, "value")):
        if x.ndim not in (3, 4):
            raise refuse(name, f"an array of shape {x.shape}",
                         "must have 4 dimensions, (B, T, N, H), or 3 without the batch")
    q, k, v = (x if x.ndim == 4 else x[None] for x in (q, k, v))
    used_q = _lengths(query_seq_lengths, "query_seq_lengths", q.shape[0])
    used_k = _lengths(key_value_seq_lengths, "key_value_seq_lengths", q.shape[0])
    lengths = used_q is not None or used_k is not None
    is_causal = checks.flag("is_causal", is_causal)
    window = _window(local_window_size)
    if window is not None and not is_causal and (lengths or q.shape[1] != k.shape[1]):
        near = _near(q.shape[1], k.shape[1], *window)
        if isinstance(mask, Mask):
            mask = mask & from_dense(near)
        else:
            mask = near if mask is None else _both(near, as_array(mask, "mask"))
        window = None
    try:
        made = attention(q, k, v, bias=bias, mask=mask, scale=scale, window=window,
                         causal="top_left" if is_causal else False, seqused_q=used_q,
                         seqused_k=used_k, layout="bshd", return_lse=return_residual)
    except Error as error:
        raise error.named({
            "q": "query", "k": "key", "v": "value", "window": "local_window_size",
            "seqused_q": "query_seq_lengths", "seqused_k": "key_value_seq_lengths",
            "causal": "is_causal"}) from None
    out = made[0] if return_residual else made
    out = out.reshape(*shape[:-1], out.shape[-1])
    if not return_residual:
        return out
    residual = jnp.swapaxes(made[1], 1, 2).astype(k.dtype).reshape(shape[:-1])
    return out, jax.lax.stop_gradient(residual)


def _lengths(x: Any, argument: str, batch: int) -> Any:
    if x is None:
        return None
    x = as_array(x, argument)
    if x.dtype != jnp.int32 or x.shape != (batch,):
        raise refuse(argument, f"{x.dtype} {list(x.shape)}", f"must be int32 [{batch}]")
    return x


def _window(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    left, right = checks.window("local_window_size", size)
    if left < 0 or right < 0:
        raise refuse("local_window_size", size, "must not be negative")
    return left, right


def _both(near: Any, mask: Any) -> Any:
    return near.reshape((1,) * max(0, mask.ndim - near.ndim) + near.shape) & mask


def _near(len_q: int, len_k: int, left: int, right: int) -> Any:
    """(len_q, len_k) bool: whether key j lies in the window of query i."""
    left, right = min(left, len_q), min(right, len_k)  # sums below must be int32
    i, j = jnp.arange(len_q)[:, None], jnp.arange(len_k)[None, :]
    return (j >= i - left) & (j <= i + right)
