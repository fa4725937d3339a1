"""Small models of transformers, randomly initialised: Regard against their "eager" attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")

import transformers as hf  # noqa: E402
from transformers.masking_utils import (and_masks, causal_mask_function,  # noqa: E402
                                        packed_sequence_mask_function, sdpa_mask,
                                        sliding_window_causal_mask_function)

import regard  # noqa: E402
import regard.transformers  # noqa: E402
from transformers_cases import (DEVICES, LENGTH, WINDOW, align_text, bert,  # noqa: E402, F401
                                build, calls, check_same, deepseek_v32, gemma2, gemma3, gemma4,
                                gpt2, gpt_oss, llama, llama4, mistral, nllb_moe, padding, phimoe,
                                registered, results, t5, words)

DECODERS = [llama, mistral, gemma2, gemma3, gpt_oss, phimoe, llama4, gpt2]
ALL = [*DECODERS, bert, t5]
# Their own attention or norms are float64 throughout; the others' round to float32 inside.
DOUBLES = [gpt2, bert]


def exhaustive(value: str) -> Any:
    """A parameter for `make test-all` alone."""
    return pytest.param(value, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", [*map(exhaustive, ["none", "right"]), "left"])
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_models_in_float32(make: Callable[[], Any], side: str, device: str) -> None:
    check_same(build(make, device), words(device=device), padding(side, device), 2e-5)


@pytest.mark.parametrize("side", ["none", *map(exhaustive, ["right", "left"])])
@pytest.mark.parametrize("make", DOUBLES, ids=lambda make: make.__name__)
def test_models_in_float64(make: Callable[[], Any], side: str) -> None:
    """The loss is float32, so gradients see its rounding, the same in both."""
    check_same(build(make, dtype=torch.float64), words(), padding(side), 1e-7)


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("make", [nllb_moe, align_text, gemma4], ids=lambda make: make.__name__)
def test_layers_that_do_not_say_whether_they_are_causal(make: Callable[[], Any],
                                                        side: str) -> None:
    """A decoder whose layers say that they are not; an encoder whose layers say nothing; and layers
    that take the last queries alone."""
    check_same(build(make), words(), padding(side), 2e-5)


@pytest.mark.parametrize("make", [llama, gemma2], ids=lambda make: make.__name__)
def test_bfloat16_is_no_worse_than_eager(make: Callable[[], Any]) -> None:
    ids = words()
    exact, _ = results(build(make), "eager", ids, None)
    rounded = build(make, dtype=torch.bfloat16)
    theirs, _ = results(rounded, "eager", ids, None)
    ours, _ = results(rounded, "regard", ids, None)
    assert (ours - exact).norm() <= 1.25 * (theirs - exact).norm()


def test_autocast() -> None:
    model, ids = build(llama), words()
    exact, _ = results(model, "eager", ids, None)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, _ = results(model, "eager", ids, None)
        ours, gradients = results(model, "regard", ids, None)
    assert (ours - exact).norm() <= 1.25 * (theirs - exact).norm()
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


def test_layers_are_called_and_memory_is_linear(calls: list[dict[str, Any]]) -> None:
    """No mask or bias with as many elements as there are pairs, whatever the padding and window."""
    for make in (llama, mistral, gemma2, gpt_oss):
        for side in ("none", "right", "left"):
            calls.clear()
            results(build(make), "regard", words(), padding(side))
            assert len(calls) == 2
            for call in calls:
                assert call["bias"] is None
                assert call["causal"] == "top_left"
                mask = call.get("mask")
                assert (mask is None) == (side == "none")
                assert mask is None or mask.shape == (3, 1, 1, LENGTH)
            windowed = [call["window"] for call in calls if call.get("window") is not None]
            assert len(windowed) == {llama: 0, mistral: 2, gemma2: 1, gpt_oss: 1}[make]
            assert all(window == (WINDOW - 1, None) for window in windowed)


# ------------------------------------------------------------------------------------------- caches


def generated(model: Any, name: str, **options: Any) -> list[list[int]]:
    model.set_attn_implementation(name)
    ids = words() * padding("left")
    out = model.generate(input_ids=ids, attention_mask=padding("left"), max_new_tokens=9,
                         do_sample=False, **options)
    return out[:, LENGTH:].tolist()


@pytest.mark.parametrize("make, cache", [(make, cache) for make in DECODERS for cache in
                                         ("dynamic", "static") if (make, cache) !=
                                         (llama4, "static")])  # not by every transformers
def test_generate_with_padding(make: Callable[[], Any], cache: str) -> None:
    model = build(make).eval()
    options = {} if cache == "dynamic" else {"cache_implementation": "static",
                                             "disable_compile": True}
    expected = generated(model, "eager", **options)
    assert len({tuple(row) for row in expected}) == 3
    assert generated(model, "regard", **options) == expected


def test_generate_with_an_encoder() -> None:
    model = build(t5).eval()
    texts = []
    for name in ("eager", "regard"):
        model.set_attn_implementation(name)
        texts.append(model.generate(input_ids=words(), attention_mask=padding("right"),
                                    max_new_tokens=9, do_sample=False).tolist())
    assert texts[0] == texts[1]


def test_prefill_in_pieces() -> None:
    """More than one query, and keys in the cache before them."""
    model, ids = build(llama).eval(), words()
    whole, _ = results(model, "eager", ids, None)
    model.set_attn_implementation("regard")
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [model(input_ids=piece, past_key_values=cache).logits
                  for piece in ids.split([4, 6, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------- packing


LENGTHS = (4, 7, 1, 9)


def separately(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat([model(input_ids=piece).logits for piece in ids.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("make", [llama, mistral, gemma2], ids=lambda make: make.__name__)
def test_packed_by_positions(make: Callable[[], Any], calls: list[dict[str, Any]]) -> None:
    model, ids = build(make).eval(), words(1, sum(LENGTHS))
    expected = separately(model, ids)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    model.set_attn_implementation("regard")
    found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for call in calls:
        assert call["cu_seqlens_q"].tolist() == [0, 4, 11, 12, 21]
        assert call["max_seqlen_k"] == 9
        assert call.get("mask") is None


@pytest.mark.parametrize("make", [mistral, gpt_oss], ids=lambda make: make.__name__)
def test_packed_by_lengths(make: Callable[[], Any], calls: list[dict[str, Any]]) -> None:
    """The second one does not show its positions to its masks."""
    model, ids = build(make).eval(), words(1, sum(LENGTHS))
    expected = separately(model, ids)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    starts = torch.tensor([0, 4, 11, 12, 21])
    model.set_attn_implementation("regard")
    found = model(input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=starts,
                  cu_seq_lens_k=starts, max_length_q=9, max_length_k=9).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert all(call["cu_seqlens_q"].dtype == torch.int32 for call in calls)


def test_packed_rows_of_a_batch_and_their_gradients() -> None:
    model, ids = build(llama), words(2, 12)
    positions = torch.tensor([[*range(5), *range(7)], [*range(3), *range(9)]])
    expected, gradients = results(model, "eager", ids, None, position_ids=positions)
    found, ours = results(model, "regard", ids, None, position_ids=positions)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("side", ["none", "left", "packed"])
def test_a_model_that_selects_keys(side: str) -> None:
    """Its layers add the mask to scores of their own."""
    if not hasattr(hf, "DeepseekV32Config"):
        pytest.skip("a transformers without DeepSeek-V3.2")
    model = build(deepseek_v32)
    positions = {"position_ids": torch.cat([torch.arange(4), torch.arange(9)]).expand(3, -1)}
    check_same(model, words(), padding("none" if side == "packed" else side), 5e-5,
               **(positions if side == "packed" else {}))


@pytest.mark.parametrize("mask", [None, "bool", "float", "table", "copy", "window", "segments"])
def test_lengths_bound_every_mask(mask: str | None) -> None:
    layer, (q, k, v) = Layer(), arrays(queries=12, keys=12)
    starts = torch.tensor([0, 5, 12, 18, 24])
    kwargs = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    number = torch.bucketize(torch.arange(24), starts, right=True).view(2, 12)
    wanted = causal & (number[:, None, :, None] == number[:, None, None, :])
    given: Any = {"bool": causal[None, None], "float": torch.zeros(1, 1, 12, 12, dtype=q.dtype
                  ).masked_fill(~causal, -torch.inf), None: None}.get(mask)
    options: dict[str, Any] = dict(batch_size=2, q_length=12, kv_length=12)
    if mask in ("table", "copy"):
        given = regard.transformers.visible_keys(mask_function=causal_mask_function, **options)
        given = given.clone() if mask == "copy" else given
    if mask == "segments":
        numbers = torch.tensor([[0] * 3 + [1] * 9, [0] * 12])
        wanted = wanted & (numbers[:, None, :, None] == numbers[:, None, None, :])
        function = and_masks(causal_mask_function, packed_sequence_mask_function(numbers))
        given = regard.transformers.visible_keys(mask_function=function, **options)
    if mask == "window":
        wanted = wanted & ~causal.tril(-4)
        function = sliding_window_causal_mask_function(4)
        given = regard.transformers.visible_keys(mask_function=function, local_size=4, **options)
    out, _ = regard.transformers.attention_forward(layer, q, k, v, given, **kwargs,
                                                   is_causal=True)
    torch.testing.assert_close(out, attended(q, k, v, wanted))


@pytest.mark.parametrize("mask", [None, "bool", "table", "padding", "lengths"])
def test_selected_keys(mask: str | None) -> None:
    """Of each query; a mask and lengths hide some of them."""
    q, k, v = arrays(queries=12, keys=12)
    random = torch.Generator().manual_seed(5)
    indices = torch.rand(2, 12, 12, generator=random).argsort(-1)[..., :4].int()
    indices[:, :, 0] = torch.arange(12)
    wanted = torch.zeros(2, 1, 12, 12, dtype=torch.bool).scatter(3, indices.long()[:, None], True)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    options: dict[str, Any] = dict(batch_size=2, q_length=12, kv_length=12,
                                   mask_function=causal_mask_function)
    kwargs: dict[str, Any] = {}
    if mask == "padding":
        options["attention_mask"] = torch.arange(12) >= torch.tensor([[0], [3]])
        wanted = wanted & options["attention_mask"][:, None, None, :]
    if mask == "lengths":
        kwargs = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 5, 12, 24]))
        wanted[0, :, 5:, :5] = False
    given = (causal[None, None] if mask == "bool" else
             None if mask is None else regard.transformers.visible_keys(**options))
    out, _ = regard.transformers.attention_forward(Layer(), q, k, v, given, indices=indices,
                                                   **kwargs)
    torch.testing.assert_close(out, attended(q, k, v, wanted & (causal | (mask is None))))
    every = torch.arange(12).expand(2, 12, 12)
    out, _ = regard.transformers.attention_forward(Layer(), q, k, v, None, indices=every)
    torch.testing.assert_close(out, attended(q, k, v, causal | True))


def test_packed_sequences_of_other_keys_end_together() -> None:
    """One query for each sequence, as in a decoding step of flash-attn."""
    q, k, v = (x[:1] for x in arrays(queries=3, keys=12))
    out, _ = regard.transformers.attention_forward(
        Layer(), q, k, v, None, is_causal=True, cu_seq_lens_q=torch.tensor([0, 1, 2, 3]),
        cu_seq_lens_k=torch.tensor([0, 4, 8, 12]), max_length_q=1, max_length_k=4)
    sees = torch.arange(12) // 4 == torch.arange(3)[:, None]
    torch.testing.assert_close(out, attended(q, k, v, sees[None, None]))


# ---------------------------------------------------------------------------------- the mask alone


@pytest.mark.parametrize("window", [None, 1, 4, 11, 12, 30])
@pytest.mark.parametrize("kind", ["plain", "right", "left", "packed"])
def test_tables_of_causal_masks_say_what_the_matrix_says(window: int | None, kind: str) -> None:
    """As they are, where a layer is told more than spans; and as copies, of which spans are all."""
    rows, length = 2, 12
    function = (causal_mask_function if window is None else
                sliding_window_causal_mask_function(window))
    options: dict[str, Any] = dict(batch_size=rows, q_length=length, kv_length=length,
                                   local_size=window, allow_is_causal_skip=kind != "packed")
    if kind in ("right", "left"):
        real = torch.arange(length) < torch.tensor([[12], [7]])
        options["attention_mask"] = real if kind == "right" else real.flip(1)
    if kind == "packed":
        numbers = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 9])
        function = and_masks(function, packed_sequence_mask_function(numbers))
    table = regard.transformers.visible_keys(mask_function=function, **options)
    assert table is not None and table.dtype == torch.int32
    assert table.untyped_storage().nbytes() <= rows * length * 16
    matrix = sdpa_mask(mask_function=function, **{**options, "allow_is_causal_skip": False})
    q, k, v = arrays(queries=length, keys=length)
    expected = attended(q, k, v, matrix)
    for same in (table, table.clone(), table.expand(-1, 4, -1, -1)):
        out, _ = regard.transformers.attention_forward(Layer(), q, k, v, same)
        torch.testing.assert_close(out, expected)
    for some in (slice(9, 12), slice(4, 5)):  # of the queries, as a model may cut them
        out, _ = regard.transformers.attention_forward(Layer(), q[:, :, some], k, v,
                                                       table[:, :, some])
        torch.testing.assert_close(out, expected[:, some])


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             mask: torch.Tensor) -> torch.Tensor:
    """By SDPA; queries that see no key are 0."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return torch.where(mask.any(-1, keepdim=True), out, 0).transpose(1, 2)


def test_other_masks_stay_matrices() -> None:
    options: dict[str, Any] = dict(batch_size=2, q_length=12, kv_length=12)

    def every_other(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (q - k) % 2 == 0

    for function in (every_other, causal_mask_function):  # the second one is asked for as a matrix
        options.update(mask_function=function, allow_is_causal_skip=False)
        table = regard.transformers.visible_keys(**options)
        assert table is not None and table.shape == (2, 1, 12, 12)
        assert torch.equal(table, sdpa_mask(**options))


def test_masks_that_sdpa_does_not_need() -> None:
    """A causal one is no None, which a layer could take for no mask."""
    options: dict[str, Any] = dict(batch_size=2, kv_length=12, mask_function=causal_mask_function)
    # A query that follows others, and keys that a static cache has not yet.
    assert regard.transformers.visible_keys(**options, q_length=1, q_offset=7) is None
    assert sdpa_mask(**options, q_length=5, q_offset=0) is None
    table = regard.transformers.visible_keys(**options, q_length=5, q_offset=0)
    assert table is not None and table[0, 0].tolist() == [[12, -15, n] for n in range(1, 6)]
    q, k, v = arrays(queries=5, keys=12)
    expected = attended(q, k, v, torch.ones(5, 12, dtype=torch.bool).tril())
    for same in (table, table.clone()):
        out, _ = regard.transformers.attention_forward(Layer(), q, k, v, same)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_no_table_has_the_size_of_the_matrix(length: int) -> None:
    """A model that computes with its masks would not notice."""
    options: dict[str, Any] = dict(batch_size=2, q_length=length, kv_length=length)
    for window in (None, 2):
        function = (sliding_window_causal_mask_function(window) if window
                    else causal_mask_function)
        table = regard.transformers.visible_keys(mask_function=function, local_size=window,
                                                 **options)
        if table.dtype == torch.bool:
            assert table.shape == (2, 1, length, length)
        else:
            assert table.shape[-1] < length


def test_matrices_on_request() -> None:
    regard.transformers.register("regard_matrices", key_tables=False)
    model, ids, mask = build(mistral), words(), padding("left")
    expected, _ = results(model, "regard", ids, mask)
    found, _ = results(model, "regard_matrices", ids, mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------- the function by itself


class Layer(torch.nn.Module):
    is_causal = False


def arrays(*, queries: int = 5, keys: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, heads, length, 8, dtype=torch.float64, generator=random)
                 for heads, length in ((4, queries), (2, keys), (2, keys)))  # type: ignore


def test_additive_mask_with_a_position_bias() -> None:
    q, k, v = arrays(queries=3)
    bias = torch.randn(1, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(2, 1, 3, 5, dtype=torch.float64)
    mask[1, :, :, 2] = torch.finfo(torch.float64).min
    out, weights = regard.transformers.attention_forward(Layer(), q, k, v, mask, scaling=0.5,
                                                         position_bias=bias)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias + mask, scale=0.5, enable_gqa=True).transpose(1, 2)
    assert weights is None and out.is_contiguous()
    torch.testing.assert_close(out, expected)
    found, = torch.autograd.grad(out.square().sum(), bias)
    wanted, = torch.autograd.grad(expected.square().sum(), bias)
    torch.testing.assert_close(found, wanted)


def test_mask_longer_than_the_keys_and_one_query_for_all() -> None:
    q, k, v = arrays(queries=3)
    mask = torch.rand(2, 1, 3, 9) < 0.7
    mask[..., 0] = True
    out, _ = regard.transformers.attention_forward(Layer(), q[:1], k, v, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:1].expand(2, -1, -1, -1), k, v, attn_mask=mask[..., :5], enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_causal_comes_from_the_layer_and_begins_at_the_first_key() -> None:
    layer = Layer()
    layer.is_causal = True
    for queries, keys, said in ((5, 5, None), (3, 5, None), (5, 5, False), (1, 5, None)):
        q, k, v = arrays(queries=queries, keys=keys)
        out, _ = regard.transformers.attention_forward(layer, q, k, v, None, is_causal=said)
        causal = queries > 1 and said is not False
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2))


def test_dropout_only_in_training(calls: list[dict[str, Any]]) -> None:
    layer, (q, k, v) = Layer(), arrays()
    exact, _ = regard.transformers.attention_forward(layer.eval(), q, k, v, None)
    still, _ = regard.transformers.attention_forward(layer.eval(), q, k, v, None, dropout=0.5)
    assert torch.equal(still, exact)
    torch.manual_seed(4)
    once, _ = regard.transformers.attention_forward(layer.train(), q, k, v, None, dropout=0.5)
    again, _ = regard.transformers.attention_forward(layer.train(), q, k, v, None, dropout=0.5)
    assert [call["dropout_p"] for call in calls] == [0, 0, 0.5, 0.5]
    assert not torch.equal(once, exact) and not torch.equal(once, again)


def test_weights_are_not_returned_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    hf.utils.logging.enable_propagation()
    q, k, v = arrays()
    try:
        _, weights = regard.transformers.attention_forward(Layer(), q, k, v, None,
                                                           output_attentions=True)
    finally:
        hf.utils.logging.disable_propagation()
    assert weights is None
    assert "output_attentions=True" in caplog.text


def test_errors_name_argument_and_value() -> None:
    q, k, v = arrays()
    attend = regard.transformers.attention_forward
    with pytest.raises(regard.Unsupported, match="head_mask"):
        attend(Layer(), q, k, v, None, head_mask=torch.ones(4))
    with pytest.raises(regard.Unsupported, match="cache = object"):
        attend(Layer(), q, k, v, None, cache=object())
    for mask in (torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 5, 5, dtype=torch.bool)):
        with pytest.raises(regard.WrongType, match=r"attention_mask = torch.bool \[2, 5.*four"):
            attend(Layer(), q, k, v, mask)
    starts = torch.tensor([0, 5, 10])
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5,
               "max_length_k": 5}
    with pytest.raises(regard.Unsupported, match="position_bias"):  # nothing else says which keys
        attend(Layer(), q, k, v, None, position_bias=torch.zeros(1, 4, 5, 5), **lengths)
    with pytest.raises(regard.InvalidArgument, match="cu_seq_lens_k = None"):
        attend(Layer(), q, k, v, None, cu_seq_lens_q=starts)
    padded = regard.transformers.visible_keys(
        batch_size=2, q_length=5, kv_length=5, mask_function=causal_mask_function,
        attention_mask=torch.tensor([[True] * 4 + [False]] * 2))
    with pytest.raises(regard.Unsupported, match="cu_seq_lens_q.* padding"):
        attend(Layer(), q, k, v, padded, **lengths)
    for name in ("block_indices", "sinks"):
        with pytest.raises(regard.Unsupported, match=rf"{name} = \[2, 4\].*eager"):
            attend(Layer(), q, k, v, None, **{name: torch.ones(2, 4)})
    for name in ("", "eager", "flash_regard", "paged|regard", None):
        with pytest.raises(regard.InvalidArgument, match="name"):
            regard.transformers.register(name)  # type: ignore[arg-type]
