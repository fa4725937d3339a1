"""Dropout: its mask bit for bit against an independent Philox, its statistics, its use."""

import numpy as np
import pytest

import philox
import regard_ctypes as regard
from solve import normal, problem, same_bits, solve

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 17, 64), (1, 1, 3, 1031), (1, 1, 1030, 3),
          (3, 1, 33, 97)]
KEYS = [(0, 0), (1, 0), (0, 1), (2**32, 0), (0, 2**32), (2**64 - 1, 2**64 - 1),
        (0x0123456789ABCDEF, 0xFEDCBA9876543210)]


def library_mask(p, seed, offset, batch, heads, rows, columns):
    attention = regard.Attention(
        np.zeros((batch, heads, rows, 1)), np.zeros((batch, heads, columns, 1)),
        np.zeros((batch, heads, columns, 1)), dropout=(p, seed, offset))
    keep = np.full((batch, heads, rows, columns), 2, np.uint8).view(bool)
    regard.dropout_mask(attention, keep)
    bits = keep.view(np.uint8)
    assert bits.max(initial=0) <= 1
    return bits.astype(bool)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_mask_bit_for_bit(p, key, shape):
    assert np.array_equal(library_mask(p, *key, *shape), philox.keep_mask(p, *key, *shape))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_seed_in_memory(key):
    """In two words that are no aligned 64-bit number."""
    seed, offset = key
    words = np.array([0, seed & 0xFFFFFFFF, seed >> 32], np.uint32)[1:]
    shape = SHAPES[2]
    assert np.array_equal(library_mask(0.3, words, offset, *shape),
                          philox.keep_mask(0.3, seed, offset, *shape))


def test_mask_into_strides_and_packed():
    cu_q, cu_k = np.array([0, 4, 9], np.int32), np.array([0, 40, 45], np.int32)
    attention = regard.Attention(
        np.zeros((9, 2, 1)), np.zeros((45, 1, 1)), np.zeros((45, 1, 1)), cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=40, dropout=(0.4, 3, 4))
    room = np.zeros((2, 5, 2, 43), bool)
    regard.dropout_mask(attention, room.transpose(0, 2, 1, 3)[..., :40])
    want = philox.keep_mask(0.4, 3, 4, 2, 2, 5, 40)
    assert np.array_equal(room.transpose(0, 2, 1, 3)[..., :40], want)
    assert not room[..., 40:].any()


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 1 / 3, 0.5, 0.9, 1 - 1e-9, 3.5 / 65536,
                               2.5 / 65536, 65534.6 / 65536])
def test_realised_probability(p):
    assert regard.dropout_probability(p) == philox.realised(p)
    assert library_mask(p, 1, 2, 1, 1, 40, 40).mean() == pytest.approx(
        1 - philox.realised(p), abs=0.05)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_statistics(p):
    """Rates of the whole, of every lane and of neighbours lie within five sigma."""
    keep = library_mask(p, 42, 0, 4, 4, 256, 512)
    q = 1 - philox.realised(p)

    def rate(sample, expected):
        sigma = np.sqrt(expected * (1 - expected) / sample.size)
        assert abs(sample.mean() - expected) < 5 * sigma

    rate(keep, q)
    for lane in range(32):
        rate(keep[..., lane::32], q)
    rate(keep[..., :-1] & keep[..., 1:], q * q)
    rate(keep[..., :-8] & keep[..., 8:], q * q)
    rate(keep[..., :-1, :] & keep[..., 1:, :], q * q)
    rate(keep[:-1] & keep[1:], q * q)
    rate(keep[:, :-1] & keep[:, 1:], q * q)
    for other in (library_mask(p, 43, 0, 4, 4, 256, 512), library_mask(p, 42, 1, 4, 4, 256, 512)):
        rate(keep & other, q * q)


@pytest.mark.parametrize("type", ["f64", "f32", "bf16", "f16"])
def test_forward_applies_this_mask(type, backend):
    """With equal scores and the identity as v, the output shows the mask and its scale."""
    batch, heads, rows, columns = 2, 2, 37, 130
    identity = np.broadcast_to(np.eye(columns), (batch, heads, columns, columns))
    got = solve(regard.store(np.zeros((batch, heads, rows, 8)), regard.DTYPES[type]),
                normal(batch, heads, columns, 8, type=type),
                np.ascontiguousarray(regard.store(identity, regard.DTYPES[type])),
                backend=backend, dropout=(0.25, 9, 8))
    out = regard.load(got["out"])
    keep = philox.keep_mask(0.25, 9, 8, batch, heads, rows, columns)
    assert np.array_equal(out != 0, keep)
    np.testing.assert_allclose(out[keep], 1 / 0.75 / columns, rtol=0.01)
    np.testing.assert_allclose(got["lse"], np.log(columns), rtol=1e-6)


def test_p_of_zero_changes_no_bit(backend):
    p = problem(1, 2, 2, 20, 70, 16)
    how = {"backend": backend, "deterministic": 1}  # tiles of keys add to dq in any order else
    plain, zero = solve(**p, **how), solve(**p, **how, dropout=(0.0, 5, 6))
    assert all(np.array_equal(plain[name], zero[name]) for name in plain)


def test_calls_read_a_seed_in_memory(backend):
    p = problem(2, 2, 1, 20, 70, 16)
    words = np.array([7, 9], np.uint32)
    want = solve(**p, backend=backend, dropout=(0.3, 9 << 32 | 7, 5))
    same_bits(solve(**p, backend=backend, dropout=(0.3, words, 5)), want)
    words[0] += 1
    assert not np.array_equal(solve(**p, backend=backend, dropout=(0.3, words, 5))["out"],
                              want["out"])
