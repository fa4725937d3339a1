"""Masks of transformers as tables of spans: chunks, images, packed sequences, any function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")

import transformers as hf  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import masking_utils as hf_masks  # noqa: E402

import regard  # noqa: E402
import regard.transformers  # noqa: E402
from regard import mask_functions, mask_tables  # noqa: E402
from transformers_cases import (DEVICES, LENGTH, WINDOW, build, calls,  # noqa: E402, F401
                                check_same, gemma3_with_images, llama, llama4, padding, registered,
                                results, words)

if not hasattr(hf_masks, "blockwise_overlay"):
    pytest.skip("a transformers without masks of blocks", allow_module_level=True)

IMAGES = torch.zeros(3, LENGTH, dtype=torch.int64)  # 1 where a token is of an image
IMAGES[0, 2:6] = IMAGES[0, 8:12] = IMAGES[1, 7:] = IMAGES[2, :3] = 1
PACKED = torch.tensor([[*range(5), *range(8)], [*range(1), *range(12)], [*range(13)]])
MIXED: list[dict[str, Any]] = [{"token_type_ids": IMAGES},
                               {"token_type_ids": IMAGES, "position_ids": PACKED}]


@pytest.fixture
def asked_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unknown functions are asked for short sequences too, four rows at a time."""
    monkeypatch.setattr(regard.transformers, "FEWEST_ASKED", 1)
    monkeypatch.setattr(mask_functions, "_ASKED_AT_ONCE", 4 * 3 * LENGTH)
    yield


# ------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_images(side: str, device: str, calls: list[dict[str, Any]]) -> None:
    model, ids = build(gemma3_with_images, device), words(device=device)
    check_same(model, ids, padding(side, device), 2e-5, token_type_ids=IMAGES.to(device))
    assert [call["row_spans"].shape[-1] for call in calls] == [2, 2]
    assert all(call.get("mask") is None and call["bias"] is None for call in calls)


@pytest.mark.parametrize("make, options", [(llama4, {"position_ids": PACKED}),
                                           *[(gemma3_with_images, one) for one in MIXED]])
def test_packed_chunks_and_images(make: Callable[[], Any], options: dict[str, Any],
                                  calls: list[dict[str, Any]]) -> None:
    check_same(build(make), words(), None, 2e-5, **options)
    assert any("row_spans" in call for call in calls)
    assert all(call.get("mask") is None for call in calls)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_after_images(cache: str) -> None:
    model, texts = build(gemma3_with_images).eval(), []
    options = {} if cache == "dynamic" else {"cache_implementation": "static",
                                             "disable_compile": True}
    for name in ("eager", "regard"):
        model.set_attn_implementation(name)
        out = model.generate(input_ids=words() * padding("left"), attention_mask=padding("left"),
                             token_type_ids=IMAGES, max_new_tokens=6, do_sample=False, **options)
        texts.append(out[:, LENGTH:].tolist())
    assert texts[0] == texts[1]


def test_functions_of_the_user(asked_early: None, calls: list[dict[str, Any]]) -> None:
    """A mask that is made before the forward pass, of a function that nobody knows."""
    model, ids = build(llama), words()

    def early(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (k < 3) | (batch == 1)

    found = {}
    for name in ("eager", "regard"):
        model.set_attn_implementation(name)
        mask = hf_masks.create_causal_mask(
            config=model.config, inputs_embeds=model.get_input_embeddings()(ids),
            attention_mask=None, past_key_values=None, or_mask_function=early)
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits.log_softmax(-1)[..., 1].sum().backward()
        found[name] = [logits, *(p.grad.clone() for p in model.parameters())]
    for ours, theirs in zip(found["regard"], found["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert [call["row_spans"].shape for call in calls] == [(3, 1, LENGTH, 2)] * 2
    assert (found["eager"][0] - model(input_ids=ids).logits).abs().max() > 0.1  # it matters


# ------------------------------------------------------------------------------------------ memory


class Largest(TorchDispatchMode):
    """Records the bytes of the largest memory that an operator's results use."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


LONG = 768  # a matrix of as many rows and columns is larger than all other tensors of the models


def long_problem(make: Callable[[], Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    ids = words(1, LONG)
    if make is llama4:
        return ids, {}
    images = torch.zeros_like(ids)
    images[:, 100:150] = images[:, 400:700] = 1
    return ids, {"token_type_ids": images}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("make", [llama4, gemma3_with_images], ids=lambda make: make.__name__)
def test_no_matrix_is_made(make: Callable[[], Any], packed: bool) -> None:
    model, (ids, options) = build(make), long_problem(make)
    if packed:
        options["position_ids"] = torch.cat([torch.arange(300), torch.arange(LONG - 300)])[None]
    found = {}
    for name in ("regard", "sdpa"):
        with Largest() as largest:
            results(model, name, ids, None, **options)
        found[name] = largest.bytes
    assert found["regard"] < LONG * LONG <= found["sdpa"]


def test_functions_are_asked_in_linear_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_functions, "_ASKED_AT_ONCE", 16 * LONG)
    options = interface(lambda b, h, q, k: (k - q) % LONG < 200, queries=LONG, keys=LONG,
                        use_vmap=True)
    monkeypatch.setattr(regard.transformers, "FEWEST_ASKED", LONG * LONG)
    with Largest() as largest:
        table = regard.transformers.visible_keys(**options)
    assert largest.bytes < LONG * LONG and table.shape[-1] == 2 + 4
    assert torch.equal(as_matrix(table, LONG), hf_masks.sdpa_mask(**options))
    monkeypatch.setattr(regard.transformers, "FEWEST_ASKED", LONG * LONG + 1)
    assert regard.transformers.visible_keys(**options).shape == (1, 1, LONG, LONG)


# ------------------------------------------------------------------------------ the table by itself


def interface(function: Any, *, batch: int = 1, queries: int = LENGTH, keys: int = LENGTH,
              **options: Any) -> dict[str, Any]:
    """What transformers passes to a mask function's interface."""
    return dict(batch_size=batch, q_length=queries, kv_length=keys, mask_function=function,
                allow_is_causal_skip=False, device=torch.device("cpu")) | options


def as_matrix(table: torch.Tensor, keys: int) -> torch.Tensor:
    """What a table of spans says, pair by pair."""
    header = torch.tensor([keys, -keys - table.shape[-1]])
    assert table.dtype == torch.int32 and (table[..., :2] == header).all()
    begin, end = (table[..., n::2, None] for n in (2, 3))
    return ((begin <= torch.arange(keys)) & (torch.arange(keys) < end)).any(-2)


def masks() -> dict[str, Any]:
    causal, both = hf_masks.causal_mask_function, hf_masks.bidirectional_mask_function
    blocks = hf_masks.blockwise_overlay(torch.tensor(
        [[-1, -1, 0, 0, 0, 0, -1, -1, 1, 1, 1, 1, 1], [0, 0, 0, 4, 4, -1, -2, -1, 2, -1, 1, 1, 1]]))
    chunks = hf_masks.chunked_causal_mask_function(WINDOW, torch.tensor([0, 3]))
    window = hf_masks.sliding_window_causal_mask_function(WINDOW)
    positions = torch.tensor([[*range(5), *range(8)], [*range(4, 11), *range(6)]])
    numbers = hf_masks.find_packed_sequence_indices(positions)
    ahead = hf_masks.sliding_window_bidirectional_overlay(3)
    union, cut = hf_masks.or_masks, hf_masks.and_masks

    def packed(function: Any) -> Any:
        if hasattr(hf_masks, "packed_sequence_compatibility_function"):  # after 5.17
            return hf_masks.packed_sequence_compatibility_function(function, positions, numbers)
        return cut(function, hf_masks.packed_sequence_mask_function(numbers))

    return {
        "chunks": chunks, "packed chunks": packed(chunks), "ahead": cut(ahead, both),
        "images": union(causal, blocks), "images of chunks": union(chunks, blocks),
        "images in a window": cut(union(causal, blocks), hf_masks.sliding_window_overlay(WINDOW)),
        "packed images": packed(union(window, blocks)),
        "images, packed": union(packed(window), blocks),
        "documents": cut(both, hf_masks.packed_sequence_mask_function(numbers - 7)),
        "blocks alone": blocks, "window or ahead": union(window, cut(ahead, blocks)),
    }


PADDINGS = {"none": torch.ones(2, LENGTH),
            "right": torch.arange(LENGTH) < torch.tensor([[13], [8]]),
            "left": torch.arange(LENGTH) >= torch.tensor([[0], [4]]),
            "holes": torch.tensor([[1] * 13, [0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 0, 0]])}


@pytest.mark.parametrize("side", PADDINGS)
@pytest.mark.parametrize("name", masks())
def test_tables_say_what_the_matrix_says(name: str, side: str) -> None:
    options = interface(masks()[name], batch=2, attention_mask=PADDINGS[side].bool())
    wanted = hf_masks.sdpa_mask(**options)
    for make in (mask_functions.table_of_closures, mask_functions.table_of_pairs):
        table = make(options)
        if table is None:  # spans of a query times those of the padding: more columns than keys
            assert side == "holes" and name in ("images of chunks", "images, packed")
            continue
        assert torch.equal(as_matrix(table, LENGTH).expand(wanted.shape), wanted)


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize("queries, keys, q_offset, kv_offset", [(4, 9, 4, 0), (9, 13, 0, 0),
                                                                (3, 7, 10, 6)])
def test_tables_of_caches(queries: int, keys: int, q_offset: int, kv_offset: int,
                          kind: Any) -> None:
    """Queries after others, keys that are not there yet, and keys that are there no more."""
    for name in ("chunks", "images", "images in a window", "ahead"):
        options = interface(masks()[name], batch=2, queries=queries, keys=keys,
                            q_offset=kind(q_offset), kv_offset=kind(kv_offset))
        wanted = hf_masks.sdpa_mask(**options)
        for make in (mask_functions.table_of_closures, mask_functions.table_of_pairs):
            assert torch.equal(as_matrix(make(options), keys).expand(wanted.shape), wanted)


def test_masks_that_spans_cannot_say_are_matrices() -> None:
    """Blocks in two parts, more than 8 spans, and a function of another module."""
    def every_third(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return k % 3 == 0

    torn = hf_masks.blockwise_overlay(torch.tensor([[0, 0, 1, 1, 0, 0, 1] * 8]))
    lone = hf_masks.padding_mask_function(torch.ones(1, 56, dtype=torch.bool))
    for function in (torn, lone, every_third):
        options = interface(function, queries=56, keys=56)
        assert mask_functions.table_of_closures(options) is None
        table = regard.transformers.visible_keys(**options)
        assert torch.equal(table, hf_masks.sdpa_mask(**options))
    assert mask_functions.table_of_pairs(options) is None  # 19 spans


def test_the_band_hides_no_more() -> None:
    """The bounds that kernels skip tiles by."""
    for name, causal, window in (
            ("chunks", "top_left", (WINDOW - 1, -1)), ("images", "none", (-1, 4)),
            ("images in a window", "none", (4, 4)), ("ahead", "none", (3, 3))):
        table = mask_functions.table_of_closures(interface(masks()[name], batch=2))
        options = mask_tables._span_options(table, LENGTH, LENGTH)
        assert (options["causal"], options["window"]) == (causal, window)
        assert mask_tables._span_options(table, LENGTH, LENGTH) is options


def test_tensors_without_values_make_matrices() -> None:
    with torch.device("meta"):
        model = build(gemma3_with_images, "meta")
        model.set_attn_implementation("regard")
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
        out = model(input_ids=ids, token_type_ids=ids, use_cache=False)
    assert out.logits.shape == (2, LENGTH, model.config.text_config.vocab_size)


class Layer(torch.nn.Module):
    is_causal = True


def arrays(keys: int = LENGTH) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(2, heads, length, 8, dtype=torch.float64, generator=random)
            for heads, length in ((4, LENGTH), (2, keys), (2, keys))]


def test_tables_survive_copies_and_cuts() -> None:
    q, k, v = arrays()
    options = interface(masks()["images in a window"], batch=2)
    table = regard.transformers.visible_keys(**options)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=hf_masks.sdpa_mask(**options), enable_gqa=True).transpose(1, 2)
    for same in (table, table.clone(), table[:, :, :, :LENGTH], table.expand(-1, 4, -1, -1)):
        out, _ = regard.transformers.attention_forward(Layer(), q, k, v, same)
        torch.testing.assert_close(out, expected)


def test_queries_without_keys_are_0() -> None:
    q, k, v = arrays()
    table = regard.transformers.visible_keys(**interface(masks()["blocks alone"], batch=2))
    out, _ = regard.transformers.attention_forward(Layer(), q, k, v, table)
    assert (out[0, :2] == 0).all() and (out[0, 2:6] != 0).all()
    nothing = hf_masks.blockwise_overlay(torch.full((2, LENGTH), -1))
    table = regard.transformers.visible_keys(**interface(nothing, batch=2))
    out, _ = regard.transformers.attention_forward(Layer(), q, k, v, table)
    assert (out == 0).all()


def test_tables_that_a_model_has_changed_are_refused() -> None:
    table = regard.transformers.visible_keys(**interface(masks()["images"], batch=2))
    longer = torch.nn.functional.pad(table, (0, 2))
    changed = {"two of them": torch.cat([table, table], -1), "more keys": longer,
               "an odd size": table[..., :3], "other queries": table[:, :, 1:],
               "numbers": torch.ones(2, 1, LENGTH, 4, dtype=torch.int32),
               "empty": table[..., :0]}
    for name, wrong in changed.items():
        q, k, v = arrays(LENGTH + 2 if name in ("two of them", "more keys") else LENGTH)
        with pytest.raises(regard.WrongType, match=r"attention_mask = int32 \[2, 1, 1.*key_tables"):
            regard.transformers.attention_forward(Layer(), q, k, v, wrong)


def test_plain_masks_are_matrices_on_request() -> None:
    """A model that computes with its masks says so, and gets the matrix of a usual mask."""
    plain = {"chunks": masks()["chunks"], "causal": hf_masks.causal_mask_function,
             "both": hf_masks.bidirectional_mask_function}
    for function in plain.values():
        table = regard.transformers.visible_keys(**interface(function, batch=2))
        assert table.dtype == torch.bool and table.shape == (2, 1, LENGTH, LENGTH)
    for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
        options = interface(plain["chunks"], batch=2, local_size=WINDOW) | {name: True}
        assert regard.transformers.visible_keys(**options).dtype == torch.int32
    skipped = interface(plain["both"], batch=2, allow_is_bidirectional_skip=True)
    assert regard.transformers.visible_keys(**skipped) is None
    padded = skipped | {"attention_mask": PADDINGS["left"]}
    assert regard.transformers.visible_keys(**padded).shape == (2, 1, LENGTH, 4)
