"""Attention of the models of Hugging Face's transformers.

    import regard.transformers
    regard.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="regard")

Two functions are registered: one computes attention, one says which keys a query sees. The second
returns a matrix (B, 1, Sq, Sk) only where it must. Causal masks, sliding windows, padding and
packed sequences become *key tables* of linear size, so that memory stays linear and hidden tiles
are skipped:

    (B, S) bool          which keys are real
    (B, S) integer       the number of the packed sequence that a key belongs to
    (B or 1, S or 1, W)  one of the two, with a window of W keys that includes the query's own; the
                         last dimension has stride 0, and only its size has a meaning

These are causal. The window is a part of the mask, because some models do not pass it to the
attention function. Masks of chunks, of images and others become *tables of spans*, also linear:

    (B, 1, Sq, 2 + 2 n) int32  Sk, -Sk, and n spans of the keys that a query sees

They have four dimensions because transformers and models pass on, as they are, masks that have.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from . import torch as regard_torch  # says how to get PyTorch where it is missing
import torch  # isort: skip

from .errors import Unavailable, Unsupported, WrongType, refuse
from .mask_functions import (FEWEST_ASKED, HEADER, CausalPattern, is_plain, pattern_of,
                             table_of_closures, table_of_pairs)
from .mask_maps import keep_maps_of_tensors
from .masks.band import Band, options_of
from .masks.library import is_concrete

MINIMUM = "4.53"  # the first version in which a mask function can be registered


class Packed(NamedTuple):
    """Packed sequences: where each begins and the last one ends (int32), and the longest length."""

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int


def register(name: str = "regard", *, key_tables: bool = True) -> None:
    """Makes `attn_implementation=name` mean Regard in every model of this process.

    Args:
        name: not "eager", and without "flash" and "|", which have a meaning for transformers.
        key_tables: False makes every mask a matrix, for models that compute with their masks.

    Raises:
        InvalidArgument: for such a name. Unavailable: transformers is missing or too old.
    """
    if not isinstance(name, str) or not name or name == "eager" or "flash" in name or "|" in name:
        raise refuse("name", repr(name), "must be a name of its own, without 'flash' and '|'")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise Unavailable(f"transformers: {MINIMUM} or later is needed: {error}", "transformers",
                          "") from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, visible_keys if key_tables else sdpa_mask)


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
                      value: torch.Tensor, attention_mask: torch.Tensor | None,
                      dropout: float = 0.0, scaling: float | None = None,
                      is_causal: bool | None = None, sliding_window: int | None = None,
                      softcap: float | None = None, s_aux: torch.Tensor | None = None,
                      position_bias: torch.Tensor | None = None,
                      **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The function that a model's attention layer calls.

    Args:
        module: the layer; its `training` and `is_causal` are read.
        query: (B, Hq, Sq, D). key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), heads not repeated.
        attention_mask: bool (True = visible) or added to the scores, broadcasts to (B, Hq, Sq, Sk);
            or a table; or None: causal where the layer is and Sq > 1, from the first key on.
        dropout: the probability; used in training only.
        sliding_window: how many keys a query sees, including its own; for a causal layer without a
            mask.
        softcap, s_aux: cap of the scores; logits (Hq) that join the denominators.
        position_bias: added to the scores, with a gradient; broadcasts to (B, Hq, Sq, Sk).
        kwargs: cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k of packed sequences. Others
            are ignored, as by the stock implementations.

    Returns:
        (B, Sq, Hq, Dv), contiguous; and None instead of the weights, which are never in memory.

    Raises:
        as `regard.torch.attention`; Unsupported for a paged cache or a mask for heads.
    """
    _refuse_what_would_be_lost(kwargs)
    if query.shape[0] == 1 != key.shape[0]:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    options: dict[str, Any] = {
        "scale": scaling, "softcap": softcap or 0.0, "bias": position_bias,
        "sink": None if s_aux is None else s_aux.reshape(-1).float(),
        "dropout_p": dropout if module.training else 0.0,
    }
    causal = query.shape[2] > 1 and (
        is_causal if is_causal is not None else getattr(module, "is_causal", True))
    if attention_mask is not None and attention_mask.ndim == 4:
        if attention_mask.dtype == torch.int32:
            options.update(_span_options(attention_mask, query.shape[2], key.shape[2]))
            return _dense(query, key, value, options), None
        _add_matrix(options, attention_mask[..., :key.shape[2]])
        return _dense(query, key, value, options), None
    packed = _packed_by_lengths(kwargs)
    if attention_mask is None:
        if causal:
            options.update(causal="top_left", window=_window(sliding_window))
    else:
        window, keys = _read_table(attention_mask, query, key)
        options.update(causal="top_left", window=_window(window))
        if keys is not None and keys.dtype == torch.bool:
            if packed is not None:
                raise refuse("cu_seq_lens_q", list(packed.starts_q.shape),
                             "packed sequences cannot have padding", Unsupported)
            options["mask"] = keys[:, None, None, :]
        elif keys is not None and packed is None:
            packed = _packed_by_segments(attention_mask, keys)
    if packed is not None:
        return _packed(query, key, value, packed, options), None
    return _dense(query, key, value, options), None


def visible_keys(**options: Any) -> torch.Tensor | None:
    """The mask function: None, a table, or the matrix that transformers makes for SDPA.

    Takes the keywords that transformers passes (batch_size, q_length, kv_length, mask_function,
    attention_mask (B, Sk), ...).
    """
    from transformers.masking_utils import sdpa_mask

    padding = options.get("attention_mask")
    if padding is not None and padding.ndim == 3:  # made before the forward pass, by generate()
        return cast(torch.Tensor, padding)
    if not _may_be_table(options):
        return sdpa_mask(**options)
    pattern = _causal_pattern(options)
    if pattern is not None:
        return _key_table(pattern, options)
    needs_matrix = is_plain(options.get("mask_function")) and not any(
        options.get(name, default) for name, default in _SKIPS.items())
    if needs_matrix or not _is_readable(torch.device(options.get("device", "cpu"))):
        return sdpa_mask(**options)
    if _is_skipped(options):
        return None
    table = table_of_closures(options)
    if table is None and options["q_length"] * options["kv_length"] >= FEWEST_ASKED:
        table = table_of_pairs(options)
    return sdpa_mask(**options) if table is None else table


# ------------------------------------------------------------------------------------------- masks


# The options by which transformers allows None in place of a mask, and their defaults.
_SKIPS = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": False}


def _may_be_table(options: dict[str, Any]) -> bool:
    """False for a single query, whose matrix is linear; while compiling; and for a transformers that
    does not say how many queries there are."""
    padding, batch = options.get("attention_mask"), options["batch_size"]
    return (options.get("q_length", 1) > 1
            and (padding is None or (padding.ndim == 2 and padding.shape[0] == batch))
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


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


def _key_table(pattern: CausalPattern, options: dict[str, Any]) -> torch.Tensor | None:
    padding, window = options.get("attention_mask"), pattern.window
    if window is not None and window >= options["kv_length"]:
        window = None
    table = pattern.segments
    if table is None and padding is not None and not bool(padding.all()):
        table = padding.bool()
    if window is None:
        return table
    if table is None:
        table = torch.ones((1, 1), dtype=torch.bool, device=options.get("device", "cpu"))
    return table[..., None].expand(*table.shape, window)


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


def _read_table(table: torch.Tensor, query: torch.Tensor,
                key: torch.Tensor) -> tuple[int | None, torch.Tensor | None]:
    """The window; and (B, S), bool (real keys) or integers (sequences), or None for all keys."""
    shape = tuple(table.shape)
    length = query.shape[2]
    if (table.ndim not in (2, 3) or table.is_floating_point() or key.shape[2] != length
            or shape[:2] not in ((query.shape[0], length), (1, 1))):
        raise refuse("attention_mask", f"{table.dtype} {list(shape)}",
                     f"must be (B, Hq, Sq, Sk), or hold one bool or integer for each of "
                     f"{query.shape[0]} x {length} keys, with as many queries", WrongType)
    window = shape[2] if table.ndim == 3 else None
    rows = table[..., 0] if table.ndim == 3 else table
    return window, rows if shape[1] == length else None


def _span_options(table: torch.Tensor, queries: int, keys: int) -> dict[str, Any]:
    """row_spans of a table of spans, and causal and window that hide no more, by which kernels skip
    tiles. Reads values of the table, and therefore keeps the result in it, which all layers of a
    pass share. A table that a model has computed with is found by its header."""
    kept = getattr(table, "regard_spans", None)
    if kept is not None and kept[0] == (queries, keys):
        return cast(dict[str, Any], kept[1])
    begin, end = table[..., HEADER::2], table[..., HEADER + 1::2]
    if begin.shape != end.shape or 0 in table.shape or table.shape[2] != queries:
        raise _no_table(table, queries, keys)
    row = torch.arange(queries, device=table.device)[:, None]
    is_empty = end <= begin
    low = torch.where(is_empty, keys, begin - row).amin()
    high = torch.where(is_empty, -queries, end - 1 - row).amax()
    *header, left, right = torch.stack([*table[0, 0, 0, :HEADER], low, high]).tolist()
    if header[0] != -header[1] or header[0] < keys:
        raise _no_table(table, queries, keys)
    band = Band(None if left <= 1 - queries else left, None if right >= keys - 1 else right)
    options = {"row_spans": table[..., HEADER:], **(options_of(band, queries, keys) or {})}
    if type(table) is torch.Tensor:
        keep_maps_of_tensors(row_spans=options["row_spans"])
    table.regard_spans = (queries, keys), options  # type: ignore[attr-defined]
    return options


def _no_table(table: torch.Tensor, queries: int, keys: int) -> Exception:
    return refuse("attention_mask", f"int32 {list(table.shape)}",
                  f"is no table that Regard has made for {queries} queries and {keys} keys; "
                  "register(key_tables=False) makes matrices, with which models can compute",
                  WrongType)


def _add_matrix(options: dict[str, Any], matrix: torch.Tensor) -> None:
    if matrix.dtype == torch.bool:
        options["mask"] = matrix
    elif options["bias"] is None:
        options["bias"] = matrix
    else:
        options["bias"] = options["bias"] + matrix


def _window(size: int | None) -> tuple[int, None] | None:
    """A window of `size` keys that includes the query's own; the causal mask bounds its right."""
    return None if size is None else (size - 1, None)


# ---------------------------------------------------------------------------------------- the call


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           options: dict[str, Any]) -> torch.Tensor:
    rows = (x.transpose(1, 2) for x in (query, key, value))
    out = cast(torch.Tensor, regard_torch.attention(*rows, layout="bshd", **options))
    return out.contiguous()


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
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    starts_q, starts_k, longest_q, longest_k = (kwargs.get(name) for name in names)
    if starts_q is None or starts_k is None or longest_q is None or longest_k is None:
        return None
    return Packed(starts_q.to(torch.int32), starts_k.to(torch.int32), int(longest_q),
                  int(longest_k))


def _packed_by_segments(table: torch.Tensor, segments: torch.Tensor) -> Packed:
    """From a key table. Reads its values, and therefore keeps the result in the table, which all
    layers of a pass share."""
    kept: Packed | None = getattr(table, "regard_packed", None)
    if kept is not None:
        return kept
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = first.flatten().nonzero().flatten()
    starts = torch.cat((starts, starts.new_tensor([segments.numel()]))).to(torch.int32)
    longest = int(starts.diff().max())
    packed = Packed(starts, starts, longest, longest)
    table.regard_packed = packed  # type: ignore[attr-defined]
    return packed


def _refuse_what_would_be_lost(kwargs: dict[str, Any]) -> None:
    if kwargs.get("cache") is not None:
        raise refuse("cache", type(kwargs["cache"]).__name__,
                     "continuous batching needs another attn_implementation", Unsupported)
    if kwargs.get("head_mask") is not None:
        raise refuse("head_mask", list(kwargs["head_mask"].shape),
                     "needs attn_implementation='eager'", Unsupported)
    if kwargs.get("output_attentions", False):
        from transformers.utils import logging

        logging.get_logger("transformers").warning_once(
            "Regard never holds the attention weights: output_attentions=True returns none. For "
            "weights use attn_implementation='eager'.")
