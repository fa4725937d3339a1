"""Regard for PyTorch: differentiable, on the CPU and on CUDA.

    import regard.torch
    out = regard.torch.attention(q, k, v, causal=True)
    out = regard.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = regard.torch.flash_attn_func(q, k, v, causal=True)
    regard.torch.install()   # and PyTorch's own scaled_dot_product_attention is Regard's
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("regard.torch needs PyTorch: pip install 'regard[torch]'") from error

from .flash_attention import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,
                              flash_attn_varlen_func)
from .replacement import install, installed, uninstall
from .sdpa import scaled_dot_product_attention
from .surface import attention

__all__ = [
    "attention", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func", "install", "installed", "scaled_dot_product_attention", "uninstall",
]
