"""Small models of transformers, randomly initialised, and what an attention implementation makes of
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf

import regard.torch
import regard.transformers

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
LENGTH = 13  # longer than every window below
WINDOW = 5
VOCABULARY = 64
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.2)


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=WINDOW))


def gemma2() -> Any:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(
        **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention"]))


def gemma3() -> Any:
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"]))


def gemma3_with_images() -> Any:
    """Takes token_type_ids, of which 1 is a token of an image. Its eye is never used."""
    eye = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
               image_size=4, patch_size=2)
    return hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(
        text_config=gemma3().config.to_dict(), vision_config=eye, mm_tokens_per_image=4))


def gpt_oss() -> Any:
    return hf.GptOssForCausalLM(hf.GptOssConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"]))


def phimoe() -> Any:
    """Has windows and does not pass them to the attention function."""
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    return hf.PhimoeForCausalLM(hf.PhimoeConfig(
        **sizes, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1))


def llama4() -> Any:
    """Chunks, and 1 layer without."""
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=48, attention_chunk_size=WINDOW, num_local_experts=2,
        num_experts_per_tok=1, moe_layers=[], no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"]))


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        initializer_range=0.2))


def bert() -> Any:
    return hf.BertForMaskedLM(hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=0.2))


def t5() -> Any:
    return hf.T5ForConditionalGeneration(hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=None))


def deepseek_v32() -> Any:
    """A query sees the four keys that an indexer selects."""
    return hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, n_routed_experts=2,
        num_experts_per_tok=1, n_group=1, topk_group=1, first_k_dense_replace=2, index_topk=4,
        index_n_heads=2, index_head_dim=8, max_position_embeddings=64, pad_token_id=0,
        initializer_range=0.2))


def nllb_moe() -> Any:
    return hf.NllbMoeForConditionalGeneration(hf.NllbMoeConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, init_std=0.2, max_position_embeddings=64,
        num_experts=2, router_jitter_noise=0.0, pad_token_id=0))


def align_text() -> Any:
    return hf.AlignTextModel(hf.AlignTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=0.2))


def gemma4() -> Any:
    """Two layers share the keys of the two before them."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4}, sliding_window=WINDOW, num_kv_shared_layers=2,
        layer_types=kinds, global_head_dim=8, num_global_key_value_heads=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """One thread: the matrices are too small for two."""
    regard.transformers.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The keywords of every call of `regard.torch.attention`."""
    made: list[dict[str, Any]] = []
    attention = regard.torch.attention

    def spy(*arrays: Any, **options: Any) -> Any:
        made.append(options)
        return attention(*arrays, **options)

    monkeypatch.setattr(regard.torch, "attention", spy)
    yield made


def build(make: Callable[[], Any], device: str = "cpu", dtype: Any = torch.float32) -> Any:
    torch.manual_seed(1)
    return make().to(device=device, dtype=dtype).train()


def words(rows: int = 3, length: int = LENGTH, device: str = "cpu") -> torch.Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randint(2, VOCABULARY, (rows, length), generator=random).to(device)


def padding(side: str, device: str = "cpu") -> torch.Tensor | None:
    """(3, LENGTH), 1 = a word; rows of 13, 6 and 9 words."""
    if side == "none":
        return None
    mask = (torch.arange(LENGTH) < torch.tensor([13, 6, 9])[:, None]).long()
    return (mask.flip(1) if side == "left" else mask).to(device)


def results(model: Any, name: str, ids: torch.Tensor, mask: torch.Tensor | None,
            **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the words, and the gradients of a loss on them, by the implementation `name`."""
    model.set_attn_implementation(name)
    model.zero_grad()
    torch.manual_seed(3)  # Phimoe's router draws its experts
    if model.config.is_encoder_decoder:
        options["decoder_input_ids"] = ids.flip(0, 1)
    out = model(input_ids=ids, attention_mask=mask, use_cache=False, **options)
    logits = out.logits if "logits" in out else out.last_hidden_state
    if mask is not None and not model.config.is_encoder_decoder:
        logits = logits[mask.bool()]
    logits.float().log_softmax(-1)[..., 1].sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()
                             if p.grad is not None}


def check_same(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, tolerance: float,
               **options: Any) -> None:
    """Regard's logits and gradients are those of eager."""
    expected, gradients = results(model, "eager", ids, mask, **options)
    found, ours = results(model, "regard", ids, mask, **options)
    assert expected.std() > 0.1  # the model says something
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    assert ours.keys() == gradients.keys()
    largest = max(g.abs().max() for g in gradients.values())
    for name, gradient in gradients.items():
        assert (ours[name] - gradient).abs().max() <= tolerance * largest, name
