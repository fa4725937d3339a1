"""Attention of the models of Hugging Face's transformers.

    import regard.transformers
    regard.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="regard")

Two functions are registered: one computes attention, one says which keys a query sees. The second
returns a matrix (B, 1, Sq, Sk) only where it must. Causal masks, sliding windows, padding, packed
sequences, chunks, images and others become *tables* of linear size (mask_tables.py), so that memory
stays linear and hidden tiles are skipped. A causal mask is never None, as it is for SDPA: no mask at
all has another meaning in some models.
"""

from __future__ import annotations

from typing import Any, cast

from . import torch as regard_torch  # says how to get PyTorch where it is missing
import torch  # isort: skip

from .errors import Unavailable, Unsupported, WrongType, refuse
from .mask_functions import (FEWEST_ASKED, CausalPattern, is_plain, pattern_of, table_of_closures,
                             table_of_pairs)
from .mask_tables import CausalKeys, Packed, add_table, causal_table, spans_of_sequences
from .masks.library import is_concrete

MINIMUM = "4.53"  # the first version in which a mask function can be registered

# Options of attention functions that say which pairs count, or change their weights.
_NOT_COMPUTED = ("block_indices", "sinks", "head_mask")


def register(name: str = "regard", *, key_tables: bool = True) -> None:
    """Makes `attn_implementation=name` mean Regard in every model of this process.

    Args:
        name: not "eager", and without "flash" and "|", which have a meaning for transformers.
        key_tables: False makes every mask the matrix that eager attention adds to its scores, for
            models that compute with their masks.

    Raises:
        InvalidArgument: for such a name. Unavailable: transformers is missing or too old.
    """
    if not isinstance(name, str) or not name or name == "eager" or "flash" in name or "|" in name:
        raise refuse("name", repr(name), "must be a name of its own, without 'flash' and '|'")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask
    except ImportError as error:
        raise Unavailable(f"transformers: {MINIMUM} or later is needed: {error}", "transformers",
                          "") from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, visible_keys if key_tables else eager_mask)


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
                      value: torch.Tensor, attention_mask: torch.Tensor | None,
                      dropout: float = 0.0, scaling: float | None = None,
                      is_causal: bool | None = None, sliding_window: int | None = None,
                      softcap: float | None = None, s_aux: torch.Tensor | None = None,
                      position_bias: torch.Tensor | None = None,
                      indices: torch.Tensor | None = None,
                      **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The function that a model's attention layer calls.

    Args:
        module: the layer; its `training` and `is_causal` are read.
        query: (B, Hq, Sq, D). key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), heads not repeated.
        attention_mask: bool (True = visible) or added to the scores, broadcasts to (B, Hq, Sq, Sk);
            or a table; or None: causal where the layer says so and Sq > 1, from the first key on.
        dropout: the probability; used in training only.
        sliding_window: how many keys a query sees, including its own; for a causal layer without a
            mask.
        softcap, s_aux: cap of the scores; logits (Hq) that join the denominators.
        position_bias: added to the scores, with a gradient; broadcasts to (B, Hq, Sq, Sk).
        indices: (B, Sq, n), distinct integers from 0 on: the keys that a query sees at most; a
            matrix is made of them.
        kwargs: cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k of packed sequences, within
            which a mask, too, shows no other keys. Others are ignored, as by the stock
            implementations.

    Returns:
        (B, Sq, Hq, Dv), contiguous; and None instead of the weights, which are never in memory.

    Raises:
        as `regard.torch.attention`; WrongType for another mask; Unsupported for a paged cache, a
            mask for heads, a selection of blocks (block_indices), and sinks of each query.
    """
    _refuse_what_would_be_lost(kwargs)
    if query.shape[0] == 1 != key.shape[0]:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    options: dict[str, Any] = {
        "scale": scaling, "softcap": softcap or 0.0, "bias": position_bias,
        "sink": None if s_aux is None else s_aux.reshape(-1).float(),
        "dropout_p": dropout if module.training else 0.0,
    }
    packed = _packed_by_lengths(kwargs)
    is_matrix = attention_mask is not None and attention_mask.dtype != torch.int32
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if is_causal and query.shape[2] > 1:
            window = None if sliding_window is None else (sliding_window - 1, None)
            options.update(causal="top_left", window=window)
    elif attention_mask.ndim != 4:
        raise refuse("attention_mask", f"{attention_mask.dtype} {list(attention_mask.shape)}",
                     "must have four dimensions, and broadcast to (B, Hq, Sq, Sk)", WrongType)
    elif attention_mask.dtype == torch.int32:
        packed = add_table(options, attention_mask, query, key, packed)
    else:
        _add_matrix(options, attention_mask[..., :key.shape[2]])
    if packed is not None and (is_matrix or indices is not None):
        options["row_spans"] = spans_of_sequences(packed, query.shape[0], query.shape[2],
                                                  key.shape[2])
        packed = None
    if indices is not None:
        _select(options, indices, key.shape[2])
    if packed is not None:
        if "causal" in options:
            options["causal"] = "bottom_right"  # as flash-attn has it, where lengths differ
        return _packed(query, key, value, packed, options), None
    return _dense(query, key, value, options), None


def visible_keys(**options: Any) -> torch.Tensor | None:
    """The mask function: a table, or the matrix that transformers makes for SDPA; None for a mask
    that hides nothing and is not causal, or has a single query.

    Takes the keywords that transformers passes (batch_size, q_length, kv_length, mask_function,
    attention_mask (B, Sk), ...).
    """
    if not _may_be_table(options) or _adds_its_masks(options.get("config")):
        return _matrix(options)
    pattern = _causal_pattern(options)
    if pattern is not None:
        return _causal_keys(pattern, options)
    needs_matrix = is_plain(options.get("mask_function")) and not any(
        options.get(name, default) for name, default in _SKIPS.items())
    if (needs_matrix or not _is_readable(torch.device(options.get("device", "cpu")))
            or _is_skipped(options)):
        return _matrix(options)
    table = table_of_closures(options)
    if table is None and options["q_length"] * options["kv_length"] >= FEWEST_ASKED:
        table = table_of_pairs(options)
    return _matrix(options) if table is None else table


# ------------------------------------------------------------------------------------------- masks


# The options by which transformers allows None in place of a mask, and their defaults.
_SKIPS = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": False}


def _adds_its_masks(config: Any) -> bool:
    """Whether layers compute with their masks: to select keys, as DeepSeek-V3.2 does."""
    return getattr(config, "index_topk", None) is not None


def _may_be_table(options: dict[str, Any]) -> bool:
    """False for a single query, whose matrix is linear; while compiling; and for a transformers that
    does not say how many queries there are."""
    padding, batch = options.get("attention_mask"), options["batch_size"]
    return (options.get("q_length", 1) > 1
            and (padding is None or (padding.ndim == 2 and padding.shape[0] == batch))
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _matrix(options: dict[str, Any]) -> torch.Tensor | None:
    """The matrix for SDPA, and what SDPA has None for: a causal mask becomes a table."""
    from transformers.masking_utils import sdpa_mask

    mask: torch.Tensor | None = sdpa_mask(**options)
    if mask is not None or _queries(options) == 1:
        return mask
    if options.get("allow_is_causal_skip", True):
        return _causal(options)
    # A model may be told to be an encoder, and its layers still say that they are causal.
    is_causal = getattr(options.get("config"), "is_causal", True)
    return None if is_causal else _whole_matrix(options)


def _causal(options: dict[str, Any]) -> torch.Tensor:
    """The mask that hides later keys and no others."""
    device = options.get("device", getattr(options.get("cache_position"), "device", "cpu"))
    table = causal_table(options["batch_size"], _queries(options), options["kv_length"], device)
    return _whole_matrix(options) if table is None else table


def _whole_matrix(options: dict[str, Any]) -> torch.Tensor:
    from transformers.masking_utils import sdpa_mask

    return cast(torch.Tensor, sdpa_mask(**options | dict.fromkeys(_SKIPS, False)))


def _queries(options: dict[str, Any]) -> int:
    return options.get("q_length") or len(options["cache_position"])


def _is_readable(device: torch.device) -> bool:
    """Whether tensors that are made there have values, for which the host may wait."""
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return is_concrete(torch.empty(0, device=device)) and not is_capturing


def _causal_pattern(options: dict[str, Any]) -> CausalPattern | None:
    """None for another mask, or one that cannot be recognised."""
    length, padding = options["kv_length"], options.get("attention_mask")
    offsets = options.get("q_offset", 0), options.get("kv_offset", 0)
    if options["q_length"] != length or (padding is not None and padding.shape[1] != length):
        return None
    if any(isinstance(offset, torch.Tensor) or offset != 0 for offset in offsets):
        return None
    pattern = pattern_of(options.get("mask_function"))
    if pattern is None:
        return None
    if pattern.segments is None:  # then transformers tells whether the mask is a plain one
        return pattern if options.get("allow_is_causal_skip", True) else None
    return pattern if padding is None else None


def _causal_keys(pattern: CausalPattern, options: dict[str, Any]) -> torch.Tensor | None:
    padding, window, length = (options.get("attention_mask"), pattern.window, options["kv_length"])
    if padding is not None and not _is_readable(padding.device):
        return _matrix(options)
    if window is not None and window >= length:
        window = None
    rows = pattern.segments
    if rows is None and padding is not None and not bool(padding.all()):
        rows = padding.bool()
    if window is None and rows is None:
        return _causal(options)
    table = table_of_closures(options)
    if table is None:
        return _matrix(options)
    table.regard_keys = CausalKeys(length, window, rows)  # type: ignore[attr-defined]
    return table


def _is_skipped(options: dict[str, Any]) -> bool:
    """Whether transformers passes None for this mask, which is asked for no pair then."""
    from transformers.masking_utils import sdpa_mask

    class Asked(Exception):
        pass

    def ask(*indices: torch.Tensor) -> torch.Tensor:
        raise Asked

    try:
        sdpa_mask(**options | {"mask_function": ask, "use_vmap": False})
    except Asked:
        return False
    return True


def _add_matrix(options: dict[str, Any], matrix: torch.Tensor) -> None:
    if matrix.dtype == torch.bool:
        options["mask"] = matrix
    elif options["bias"] is None:
        options["bias"] = matrix
    else:
        options["bias"] = options["bias"] + matrix


# ---------------------------------------------------------------------------------------- the call


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           options: dict[str, Any]) -> torch.Tensor:
    rows = (x.transpose(1, 2) for x in (query, key, value))
    out = cast(torch.Tensor, regard_torch.attention(*rows, layout="bshd", **options))
    return out.contiguous()


def _select(options: dict[str, Any], indices: torch.Tensor, keys: int) -> None:
    """Hides the keys whose indices are not among (B, Sq, n)."""
    if indices.shape[2] >= keys:
        return
    chosen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter_(2, indices.long(), True)[:, None]
    options["mask"] = options["mask"] & chosen if "mask" in options else chosen


def _packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Packed,
            options: dict[str, Any]) -> torch.Tensor:
    """Attention of packed sequences; the rows of all batch entries follow each other."""
    if options["bias"] is not None:
        raise refuse("position_bias", list(options["bias"].shape),
                     "packed sequences cannot have one", Unsupported)
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = cast(torch.Tensor, regard_torch.attention(
        *rows, cu_seqlens_q=packed.starts_q, cu_seqlens_k=packed.starts_k,
        max_seqlen_q=packed.longest_q, max_seqlen_k=packed.longest_k, **options))
    return out.reshape(query.shape[0], query.shape[2], *out.shape[1:]).contiguous()


def _packed_by_lengths(kwargs: dict[str, Any]) -> Packed | None:
    """From the arguments that transformers has for packed sequences; None without them."""
    starts_q, starts_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if starts_q is None and starts_k is None:
        return None
    if starts_q is None or starts_k is None:
        missing = "cu_seq_lens_q" if starts_q is None else "cu_seq_lens_k"
        raise refuse(missing, None, "must be given next to the other one")

    def longest(starts: torch.Tensor, given: Any) -> int:
        return int(starts.diff().max() if given is None else given)

    return Packed(starts_q.to(torch.int32), starts_k.to(torch.int32),
                  longest(starts_q, kwargs.get("max_length_q")),
                  longest(starts_k, kwargs.get("max_length_k")))


def _refuse_what_would_be_lost(kwargs: dict[str, Any]) -> None:
    if kwargs.get("cache") is not None:
        raise refuse("cache", type(kwargs["cache"]).__name__,
                     "continuous batching needs another attn_implementation", Unsupported)
    for name in _NOT_COMPUTED:
        if kwargs.get(name) is not None:
            raise refuse(name, list(kwargs[name].shape), "needs attn_implementation='eager'",
                         Unsupported)
    if kwargs.get("output_attentions", False):
        from transformers.utils import logging

        logging.get_logger("transformers").warning_once(
            "Regard never holds the attention weights: output_attentions=True returns none. For "
            "weights use attn_implementation='eager'.")
