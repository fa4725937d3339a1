"""Attention for JAX: under jit, grad, vmap, scan and checkpoint, on CPUs and CUDA GPUs.

    from regard.jax import attention, dot_product_attention

`attention` takes every feature of the library, `dot_product_attention` JAX's own arguments.
"""

try:
    import jax
except ImportError as error:
    raise ImportError("regard.jax needs JAX: pip install 'regard[jax]'") from error
if jax.__version_info__ < (0, 6):
    raise ImportError(f"regard.jax needs JAX 0.6 or newer; this is {jax.__version__}")

from . import mask_tree as mask_tree  # makes masks arguments of compiled functions
from .attention import attention, attention_backward
from .dot_product import dot_product_attention

__all__ = ["attention", "attention_backward", "dot_product_attention"]
