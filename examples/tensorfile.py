"""Reads and writes .safetensors files with NumPy alone (bf16 comes out as float32)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "|u1",
    "BOOL": "|b1",
}
NAMES = {np.dtype(code): name for name, code in TYPES.items()}


def _bf16_to_f32(raw: bytes) -> np.ndarray:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors by name, and the file's own key-value text (__metadata__)."""
    raw = Path(path).read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        data = raw[begin + first : begin + last]
        flat = (
            _bf16_to_f32(data)
            if entry["dtype"] == "BF16"
            else np.frombuffer(data, TYPES[entry["dtype"]])
        )
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata


def save(
    path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes the tensors in the given order; the same input gives the same bytes."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    chunks, offset = [], 0
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))
