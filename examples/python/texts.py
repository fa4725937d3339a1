"""Real text that is on every machine: the sources of Python's own library, as bytes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

VOCABULARY = 256
ENOUGH = 4_000_000  # bytes


def library_bytes(enough: int = ENOUGH) -> torch.Tensor:
    """uint8 (n): the standard library's modules in the order of their names, cut at `enough`."""
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= enough:
            break
    return torch.frombuffer(bytearray(text[:enough]), dtype=torch.uint8)


class Batches:
    """Pieces of the text; the ones of a step depend on the seed and the step alone."""

    def __init__(self, rows: int, length: int, seed: int, device: str) -> None:
        self.text = library_bytes()
        self.rows, self.length, self.seed, self.device = rows, length, seed, device

    def pieces(self, step: int) -> torch.Tensor:
        """int64 (rows, length)"""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.length, (self.rows, 1), generator=random)
        return self.text[starts + torch.arange(self.length)].long().to(self.device)

    def hidden(self, step: int, share: float = 0.15) -> torch.Tensor:
        """bool (rows, length): which bytes of the step's pieces a model has to guess."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + step + 500_000)
        return (torch.rand(self.rows, self.length, generator=random) < share).to(self.device)
