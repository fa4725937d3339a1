"""The two C++ functions of torch.nn's inference path, rewritten with Regard's attention.

torch.nn.MultiheadAttention and torch.nn.TransformerEncoderLayer call them in eval mode where no
gradient is wanted. Nested tensors, into which TransformerEncoder packs padded batches, still go to
PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .limits import left_to_pytorch
from .sdpa import scaled_dot_product_attention

native_multi_head_attention = torch._native_multi_head_attention
native_encoder_layer = torch._transformer_encoder_layer_fwd
_KEYS_OF_ENTRIES = 1  # the mask_type of a mask (B, S); other masks have 0 or 2


def multi_head_attention(
        query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int,
        qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
        mask: Tensor | None = None, need_weights: bool = True, average_attn_weights: bool = True,
        mask_type: int | None = None) -> Any:
    """Stands in for torch._native_multi_head_attention; its own result is (out, None)."""
    alone = query is key and key is value and not need_weights
    if not alone or left_to_pytorch(query, mask):
        return native_multi_head_attention(
            query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias,
            mask, need_weights, average_attn_weights, mask_type)
    out = _self_attention(query, num_head, qkv_weight, qkv_bias, mask, mask_type)
    return F.linear(out, proj_weight, proj_bias), None


def encoder_layer(
        src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
        proj_weight: Tensor, proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float,
        norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
        ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
        mask: Tensor | None = None, mask_type: int | None = None) -> Tensor:
    """Stands in for torch._transformer_encoder_layer_fwd."""
    if left_to_pytorch(src, mask):
        return native_encoder_layer(
            src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu,
            norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1,
            ffn_bias_1, ffn_weight_2, ffn_bias_2, mask, mask_type)

    def attended(x: Tensor) -> Tensor:
        out = _self_attention(x, num_heads, qkv_weight, qkv_bias, mask, mask_type)
        return F.linear(out, proj_weight, proj_bias)

    def fed_forward(x: Tensor) -> Tensor:
        x = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(x) if use_gelu else F.relu(x), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        src = src + attended(norm(src, norm_weight_1, norm_bias_1))
        return src + fed_forward(norm(src, norm_weight_2, norm_bias_2))
    src = norm(src + attended(src), norm_weight_1, norm_bias_1)
    return norm(src + fed_forward(src), norm_weight_2, norm_bias_2)


def _self_attention(x: Tensor, heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
                    mask: Tensor | None, mask_type: int | None) -> Tensor:
    """(B, S, E); a row holds its heads one after another. True in a bool mask hides a key; a float
    mask is added."""
    batch, length, size = x.shape
    qkv = F.linear(x, qkv_weight, qkv_bias).view(batch, length, 3, heads, size // heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    if mask is not None:
        if mask_type == _KEYS_OF_ENTRIES:
            mask = mask[:, None, None, :]
        if mask.dtype == torch.bool:
            mask = ~mask
    out: Any = scaled_dot_product_attention(q, k, v, mask)
    return out.transpose(1, 2).reshape(batch, length, size)  # type: ignore[no-any-return]
