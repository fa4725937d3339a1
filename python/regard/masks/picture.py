"""Pictures of masks: grey PNGs."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from ..checks import integer
from ..mask_value import Mask
from .visible import parts_of

_LIGHTEST = 208  # the grey of a cell that shows almost nothing; one that shows nothing is white


def cells(mask: Mask, pixels: int, batch: int = 0, head: int = 0) -> Any:
    """One batch entry and head as (height, width) NumPy uint8: 255 hides all, 0 shows all."""
    import numpy

    batch = integer("batch", batch, 0, mask.batch - 1)
    head = integer("head", head, 0, mask.heads - 1)
    longest = max(mask.len_q, mask.len_k)
    if not mask.len_q or not mask.len_k:
        return numpy.full((1, 1), 255, numpy.uint8)
    count = min(pixels, longest)
    rows, keys = (_cuts(length, max(1, count * length // longest))
                  for length in (mask.len_q, mask.len_k))
    shares = numpy.empty((len(rows) - 1, len(keys) - 1))
    for n, (begin, end) in enumerate(zip(rows, rows[1:])):
        shown = sum(numpy.add.reduceat(part, keys[:-1], axis=1, dtype=numpy.int64).sum(0)
                    for part in parts_of(mask, int(begin), int(end), batch, head))
        shares[n] = shown / ((end - begin) * numpy.diff(keys))
    grey = numpy.where(shares == 0, 255, numpy.rint(_LIGHTEST * (1 - shares))).astype(numpy.uint8)
    enlarged = max(1, pixels // count)
    return grey.repeat(enlarged, 0).repeat(enlarged, 1)


def _cuts(length: int, parts: int) -> Any:
    """Where each of so many parts of a length begins, and where the last one ends."""
    import numpy

    return numpy.arange(parts + 1) * length // parts


def png(grey: Any) -> bytes:
    """The file of an array (height, width) of uint8."""
    height, width = grey.shape
    lines = b"".join(b"\0" + row.tobytes() for row in grey)  # 0: a line is stored as it is

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(
            ">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of grey
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b""))
