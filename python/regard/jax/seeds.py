"""Seeds of dropout that are arrays of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import word64
from ..errors import WrongType, refuse


def seed_words(seed: Any) -> Any:
    """An integer or a key as two uint32, low and high."""
    if isinstance(seed, (np.ndarray, np.generic)) and seed.shape == () and seed.dtype.kind in "iu":
        number = word64("dropout_seed", int(seed))  # JAX may not have 64 bits for it
        return jnp.asarray(np.array([number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF], np.uint32))
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(seed)
        if words.shape == (2,):
            return words[::-1]
    elif seed.shape == (2,) and seed.dtype == jnp.uint32:
        return jnp.asarray(seed)[::-1]
    elif seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer):
        seed = jnp.asarray(seed)
        high = seed >> 32 if seed.dtype.itemsize == 8 else jnp.where(seed < 0, -1, 0)
        return jnp.stack([seed.astype(jnp.uint32), high.astype(jnp.uint32)])
    raise refuse("dropout_seed", f"an array of {seed.dtype} and shape {seed.shape}",
                 "must be an integer of shape (), or a key of jax.random of two words", WrongType)
