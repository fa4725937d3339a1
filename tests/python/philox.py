"""Philox4x32 and the dropout mask that docs/semantics.md derives from it, in NumPy.

Source of the generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(2011). An element is decided by 16 bits of the block of its 8 columns' group:
    word block  (j / 32) * 4 + (j % 8) / 2,   lane  ((j % 32) / 8) * 2 + j % 2
"""

import numpy as np

MASK = np.uint64(0xFFFFFFFF)


def philox4x32(counter, key, rounds):
    """counter: four integers or arrays below 2^32; key: two. Returns four uint64 arrays < 2^32."""
    c = [np.asarray(x, np.uint64) for x in np.broadcast_arrays(*counter)]
    k = [np.asarray(x, np.uint64) for x in key]
    for _ in range(rounds):
        wide0, wide1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(wide1 >> np.uint64(32)) ^ c[1] ^ k[0], wide1 & MASK,
             (wide0 >> np.uint64(32)) ^ c[3] ^ k[1], wide0 & MASK]
        k = [(k[0] + np.uint64(0x9E3779B9)) & MASK, (k[1] + np.uint64(0xBB67AE85)) & MASK]
    return c


def threshold(p):
    """p in steps of 1/65536, below 1; halves round up."""
    return min(65535, int(np.floor(p * 65536 + 0.5)))


def realised(p):
    return threshold(p) / 65536


def keep_mask(p, seed, offset, batch, heads, rows, columns, *, row_positions=None, k_position=0,
              batch_begin=0, head_begin=0):
    """(batch, heads, rows, columns) of bool; true = kept. row_positions: (batch, rows)."""
    low = 0xFFFFFFFF
    r = philox4x32((offset & low, offset >> 32, 0, 0), (seed & low, seed >> 32), 10)
    b, h, i, j = np.ogrid[:batch, :heads, :rows, :columns]
    if row_positions is not None:
        i = row_positions[:, None, :, None]
    b, h, j = b + batch_begin, h + head_begin, j + k_position
    words = philox4x32(((j // 32) * 4 + (j % 8) // 2, i, h, b), (r[0], r[1]), 7)
    lane = ((j % 32) // 8) * 2 + j % 2
    word = np.choose(lane // 2, words)
    u = (word >> (16 * (lane % 2)).astype(np.uint64)) & np.uint64(0xFFFF)
    return u >= threshold(p)
