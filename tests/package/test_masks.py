"""regard.masks: builders, algebra and pictures against matrices that are written by definition."""

from __future__ import annotations

import copy
import pickle
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import regard
from mask_cases import (BLOCKS, CASES, CUTS, MANY_RUNS, I, J, S, assert_same_bits, matrix, problem,
                        wanted)
from regard import masks
from regard.masks import Mask

# ------------------------------------------------------------------------------------------ builders

@pytest.mark.parametrize("name", CASES)
def test_builders(name, random):
    mask, dense = CASES[name][0](), wanted(name)
    assert (mask.len_q, mask.len_k, mask.batch, mask.heads) == (S, S, 1, 1)
    assert ",".join(mask.arrays()) == CASES[name][2]
    found = mask.to_dense()
    assert found.shape == (S, S) and found.dtype == bool and (found == dense).all()
    assert mask.density() == pytest.approx(dense.mean())
    arrays = problem(random)
    assert_same_bits(arrays, mask, dense)
    for part in pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), mask.like(dense):
        assert (part.to_dense() == dense).all()


def test_masks_of_batch_entries_and_heads(random):
    prefixes = [3, 50]
    mask = masks.prefix_lm(prefixes, S)
    assert (mask.batch, mask.heads) == (2, 1)
    dense = np.stack([matrix(lambda i, j: j <= i or j < prefix) for prefix in prefixes])[:, None]
    assert (mask.to_dense() == dense).all() and mask.density() == dense.mean()
    assert_same_bits(problem(random, batch=2), mask, dense)

    maps = random.random((2, 3, 6, 6)) < 0.5
    mask = masks.blocks(maps, 10)
    dense = maps.repeat(10, 2).repeat(10, 3)
    assert (mask.to_dense() == dense).all() and mask.density() == pytest.approx(dense.mean())
    assert_same_bits(problem(random, batch=2, heads=3), mask, dense)

    assert masks.prefix_lm([], 3).to_dense().shape == (0, 1, 3, 3)
    assert (masks.blocks(maps[0, 0], np.array(10)).to_dense() == dense[0, 0]).all()
    trees = masks.tree([range(S)] * 2, [np.arange(S) + 1, [S] * S])
    assert (trees.to_dense() == np.stack([np.eye(S), I >= J])[:, None]).all()


def test_blocks_of_any_size():
    """Products of blocks and sizes that are no int32 are cut to the length."""
    shown = np.array([[1, 0, 1, 1], [0, 1, 1, 1]], bool)
    for size in (4, 2**29, 2**31 - 1):
        dense = np.kron(shown, np.ones((4, 4), bool)) if size == 4 else np.ones((8, 10), bool)
        assert (masks.blocks(shown, size, (8, 10)).to_dense() == dense[:8, :10]).all()
    columns = masks.blocks(np.tile(MANY_RUNS[:4], (1, 2)), (2**30, 1), (9, 40))
    assert [*columns.arrays()] == ["key_spans"]
    assert (columns.to_dense() == np.tile(MANY_RUNS[0], 2)).all()
    with pytest.raises(regard.InvalidArgument, match="length = 2147483648"):
        masks.blocks(shown, 2**29)


@pytest.mark.parametrize("len_q, len_k", [(7, 20), (20, 7), (1, 1), (0, 5), (5, 0)])
def test_other_numbers_of_queries_than_keys(len_q, len_k, random):
    spans = random.integers(-3, len_k + 3, (len_q, 6), dtype=np.int32)
    mask = Mask(len_q, len_k, row_spans=spans, causal="bottom_right", window=(4, None))
    dense = matrix(lambda i, j: any(b <= j < e for b, e in spans[i].reshape(3, 2))
                   and i + len_k - len_q - 4 <= j <= i + len_k - len_q, len_q, len_k)
    assert (mask.to_dense() == dense).all()
    assert mask.density() == pytest.approx(dense.mean() if dense.size else 0)
    if dense.size:
        assert_same_bits(problem(random, len_q=len_q, len_k=len_k), mask, dense)


def test_arrays_of_one_dimension(random):
    """They broadcast, as in a call."""
    arrays, span, keys = problem(random), np.array([3, 21], np.int32), J[0] % 3 > 0
    rows, columns = (J >= 3) & (J < 21) & (I >= 0), (I >= 3) & (I < 21) & (J >= 0)
    for held, dense in (({"row_spans": span}, rows), ({"key_spans": span}, columns),
                        ({"dense": keys}, np.broadcast_to(keys, (S, S)))):
        mask = Mask(S, S, **held)
        assert (mask.to_dense() == dense).all() and mask.density() == pytest.approx(dense.mean())
        assert ((mask & Mask(S, S, **held)).to_dense() == dense).all()
        assert np.array_equal(regard.attention(*arrays[:3], **{
            "mask" if name == "dense" else name: x for name, x in held.items()}),
            regard.attention(*arrays[:3], mask=mask))
    with pytest.raises(regard.InvalidArgument, match=r"an array of shape \(3,\): its last size"):
        Mask(S, S, row_spans=np.zeros(3, np.int32))
    with pytest.raises(regard.InvalidArgument, match=r"an array of shape \(\): must broadcast"):
        Mask(S, S, row_spans=np.int32(0))


def test_inputs_stay_the_callers():
    spans = np.zeros((S, 2), np.int32)
    mask = Mask(S, S, row_spans=spans)
    spans[:] = [0, S]
    assert mask.density() == 0
    with pytest.raises(ValueError, match="read-only"):
        mask.row_spans[0] = 1
    with pytest.raises(AttributeError):
        mask.len_q = 3
    assert masks.from_dense(dense := I == J).dense is dense


@pytest.mark.parametrize("parents, words", [
    ([0], "element 0 is 0: .*earlier token"), ([-1, 0, 2], "element 2 is 2: .*earlier token"),
    ([-2], "element 0 is -2: .*earlier token"), ([-1, 0, 0, 1], "element 1 is 0: .*depth-first"),
    ([-1, -1, 0], "element 0 is -1: .*depth-first"),
    ([-1, 0, 1, 0, 2], "element 1 is 0: .*depth-first")])
def test_orders_that_are_not_depth_first(parents, words):
    with pytest.raises(regard.InvalidArgument, match=f"parents = an array whose {words}"):
        masks.tree_from_parents(parents)


def test_trees_of_any_shape(random):
    for length in (0, 1, 2, 3, 33, 64, 65):
        parents, path = [], [-1]
        for i in range(length):  # a walk in depth-first order
            path = path[:random.integers(1, len(path) + 1) if random.random() < 0.3 else None]
            parents.append(path[-1])
            path.append(i)
        dense = np.eye(length, dtype=bool)
        for i, parent in enumerate(parents):
            if parent >= 0:
                dense[i] |= dense[parent]
        assert (masks.tree_from_parents(parents).to_dense() == dense).all()


# ------------------------------------------------------------------------------------------- algebra

SHOWN_BY_SPANS = [name for name, case in CASES.items() if case[2] in ("", "row_spans")]


@pytest.mark.parametrize("name", CASES)
def test_and(name):
    for other in ("causal documents", "window", "both ways", "tree", "matrix"):
        found = CASES[name][0]() & CASES[other][0]()
        assert (found.to_dense() == (wanted(name) & wanted(other))).all()


@pytest.mark.parametrize("name", SHOWN_BY_SPANS)
def test_or(name):
    for other in ("causal documents", "window", "both ways", "window, sinks"):
        found = CASES[name][0]() | CASES[other][0]()
        assert (found.to_dense() == (wanted(name) | wanted(other))).all()


def test_or_of_other_kinds():
    tree, causal, dense = (CASES[name][0]() for name in ("tree", "causal", "matrix"))
    everything = Mask(S, S)
    own = Mask(S, S, key_spans=np.stack([np.arange(S), np.arange(S) + 3], 1).astype(np.int32))
    for a, b in ((tree, own), (tree, causal), (own & causal, tree), (tree & causal, causal),
                 (dense, masks.from_dense(I == J)), (dense & causal, causal),
                 (everything, dense), (tree, everything)):
        assert ((a | b).to_dense() == (a.to_dense() | b.to_dense())).all()
        assert ((b | a).to_dense() == (a.to_dense() | b.to_dense())).all()


def test_bands_of_other_numbers_of_queries_than_keys():
    """Diagonals that one call cannot name become spans."""
    bands = [Mask(len_q, len_k, causal=causal, window=window) for len_q, len_k in ((9, 14), (14, 9))
             for causal in ("none", "top_left", "bottom_right")
             for window in (None, (2, 3), (7, None), (None, 1), (100, 100))]
    for a in bands:
        for b in bands:
            if a.len_q == b.len_q:
                assert ((a & b).to_dense() == (a.to_dense() & b.to_dense())).all()
                assert ((a | b).to_dense() == (a.to_dense() | b.to_dense())).all()


def test_bands_follow_real_lengths():
    q = np.zeros((1, 1, 20, 4), np.float32)
    used = {"seqused_q": np.array([11], np.int32), "seqused_k": np.array([14], np.int32)}
    full = Mask(20, 20, row_spans=np.array([[0, 20]], np.int32))
    bands = [Mask(20, 20, causal=causal, window=window) for causal, window in (
        ("bottom_right", None), ("bottom_right", (3, None)), ("none", (4, 2)))]

    def seen(mask):
        weights = regard.attention(q, q, np.eye(20, dtype=np.float32)[None, None], mask=mask, **used)
        return weights[0, 0, :11] > 0

    for a in bands:
        assert (seen(a & full) == seen(a)).all() and (seen(full & a) == seen(a)).all()
        assert (seen((a & full) | a) == seen(a)).all()
        for b in bands:
            assert (seen(a & b) == (seen(a) & seen(b))).all() and not (a & b).whole_lengths
    for mask in (masks.chunks(20, 3) & bands[0] & masks.causal_documents([0, 20]),
                 bands[0] | masks.documents([0, 4, 20]), (bands[1] | bands[2]) & full,
                 (bands[1] | bands[2]).like(full.row_spans), copy.copy(bands[1] | bands[2])):
        assert mask.whole_lengths and regard.attention(q, q, q, mask=mask).shape == q.shape
        for name in used:
            with pytest.raises(regard.InvalidArgument, match=f"{name} = .*whole lengths"):
                regard.attention(q, q, q, mask=mask, **{name: used[name]})
        with pytest.raises(regard.InvalidArgument, match="q_positions = .*whole lengths"):
            regard.attention(q, q, q, mask=mask, q_positions=np.zeros((1, 1), np.int32))


def test_bounds_that_hide_nothing_of_whole_lengths():
    """They hide pairs where rows have positions: a union either shows what one of its parts does, or
    is for whole lengths."""
    q, size = np.zeros((1, 1, 4, 8), np.float32), 4
    v = np.eye(4, 8, dtype=np.float32)[None, None]

    def seen(mask, position):
        at = {"q_positions": np.array([position], np.int32)}
        return regard.attention(q, q, v, mask=mask, **at)[0, 0, :, :4] > 0

    spans = np.array([[0, 1]] * size, np.int32)
    parts = [Mask(size, size, **holds, causal=causal, window=window)
             for holds in ({}, {"row_spans": spans}, {"dense": np.ones((size, size), bool)})
             for causal in ("none", "top_left") for window in (None, (8, None), (5, 3))]
    joined = 0
    for a in parts:
        for b in parts:
            try:
                union = a | b
            except regard.InvalidArgument:  # spans and a matrix
                continue
            assert (union.to_dense() == (a.to_dense() | b.to_dense())).all()
            if union.whole_lengths:
                for name, value in (("q_positions", np.array([0], np.int32)), ("k_position", 3)):
                    with pytest.raises(regard.InvalidArgument, match=f"{name} = .*whole lengths"):
                        regard.attention(q, q, v, mask=union, **{name: value})
            else:
                joined += 1
                for position in (0, 3, 100):
                    assert (seen(union, position) == (seen(a, position) | seen(b, position))).all()
    assert joined > len(parts)


def test_what_spans_cannot_say():
    rows, keys = masks.neighbourhood_2d(6, 10, 3), CASES["tree"][0]()
    for combine, words in ((lambda: rows & rows, "3 and 3 spans: .* up to 9 spans, more than 8"),
                           (lambda: rows | rows | rows, "has 9 row_spans, more than 8"),
                           (lambda: rows | keys, "both hold row_spans, or both key_spans"),
                           (lambda: rows | masks.from_dense(I == J), "or both a matrix"),
                           (lambda: rows & masks.chunks(61, 4), "len_q is 60 and 61"),
                           (lambda: masks.prefix_lm([1, 2], S) | masks.prefix_lm([1, 2, 3], S),
                            "batch is 2 and 3")):
        with pytest.raises(regard.InvalidArgument, match=words):
            combine()
    with pytest.raises(TypeError):
        rows & 3


# ---------------------------------------------------------------------------------------- inspection

def counted(dense, rows, keys):
    """The numbers of hidden, partial and full tiles of (entries, Sq, Sk)."""
    found = [0, 0, 0]
    for entry in dense:
        for i in range(0, entry.shape[0], rows):
            for j in range(0, entry.shape[1], keys):
                tile = entry[i:i + rows, j:j + keys]
                found[2 if tile.all() else 1 if tile.any() else 0] += 1
    return tuple(found)


@pytest.mark.parametrize("kinds", [(), ("row_spans",), ("key_spans",), ("row_spans", "key_spans")])
def test_tiles_and_density(kinds, random):
    """Spans in any order, empty, beyond the ends; a row's that overlap."""
    for _ in range(40):
        len_q, len_k = (int(x) for x in random.integers(1, 60, 2))
        arrays = {name: random.integers(-5, other + 5, (2, 1, own, 2 * int(random.integers(1, 4))))
                  .astype(np.int32) for name, own, other in (("row_spans", len_q, len_k),
                                                             ("key_spans", len_k, len_q))}
        bands = [{}, {"causal": "top_left"}, {"causal": "bottom_right", "window": (9, None)},
                 {"window": (5, 20)}]
        mask = Mask(len_q, len_k, **{name: arrays[name] for name in kinds},
                    **bands[random.integers(4)])
        dense = np.reshape(mask.to_dense(), (-1, len_q, len_k))
        assert mask.density() == pytest.approx(dense.mean())
        for rows, keys in ((7, 16), (60, 1), (128, 128)):
            assert mask.tiles(rows, keys) == counted(dense, rows, keys), mask


def decoded(picture):
    """The pixels of a grey PNG whose lines are stored as they are; checks its chunks."""
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    place, found = 8, {}
    while place < len(picture):
        size, kind = struct.unpack(">I4s", picture[place:place + 8])
        data = picture[place + 8:place + 8 + size]
        assert struct.unpack(">I", picture[place + 8 + size:place + 12 + size])[0] == zlib.crc32(
            kind + data)
        found[kind] = data
        place += size + 12
    width, height, *rest = struct.unpack(">IIBBBBB", found[b"IHDR"])
    assert rest == [8, 0, 0, 0, 0] and found[b"IEND"] == b""
    lines = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert (lines[:, 0] == 0).all()
    return lines[:, 1:]


def test_pictures(tmp_path):
    mask = masks.causal_documents(CUTS)
    picture = mask.show(tmp_path / "mask.png", pixels=130)
    assert (tmp_path / "mask.png").read_bytes() == picture
    grey = np.where(wanted("causal documents"), 0, 255)
    assert (decoded(picture) == grey.repeat(2, 0).repeat(2, 1)).all()
    small = decoded(mask.show(pixels=20))
    shares = wanted("causal documents").reshape(20, 3, 20, 3).mean((1, 3))
    assert ((small == 255) == (shares == 0)).all() and ((small == 0) == (shares == 1)).all()
    assert decoded(Mask(30, 60).show(pixels=20)).shape == (10, 20)
    assert decoded(Mask(0, 0).show()).shape == (1, 1)
    with pytest.raises(regard.InvalidArgument, match="head = 1"):
        mask.show(head=1)


def test_text():
    assert repr(masks.sliding(S, 4)) == (
        "Mask(60 x 60, causal='top_left', window=(3, -1), 6.5 % visible)")
    assert repr(masks.prefix_lm([60, 60, 60], S)) == (
        "Mask(60 x 60, batch=3, row_spans (n=1), 100 % visible)")
    assert repr(masks.from_dense(I == J)) == "Mask(60 x 60, dense, 1.67 % visible)"
    assert repr(masks.from_dense(np.broadcast_to(True, (1, 9000, 9000)))) == "Mask(9000 x 9000, dense)"


# ------------------------------------------------------------------------------------------ refusals

def test_wrong_arguments():
    f32, i32 = np.zeros((S, 2), np.float32), np.zeros((S, 3), np.int32)
    for argument, make in (
            ("cu_seqlens", lambda: masks.documents([0])),
            ("cu_seqlens", lambda: masks.documents([0, 2.5])),
            ("cu_seqlens", lambda: masks.documents([[0, 1]])),
            ("cu_seqlens", lambda: masks.documents([1, 3])),
            ("cu_seqlens", lambda: masks.documents([0, 3, 2])),
            ("cu_seqlens", lambda: masks.documents([0, 2**31])),
            ("length", lambda: masks.causal_documents([0, 3], 2)),
            ("prefix", lambda: masks.prefix_lm([[3]], S)),
            ("length", lambda: masks.prefix_lm(3, -1)),
            ("end", lambda: masks.tree([1, 2], [3])),
            ("parents", lambda: masks.tree_from_parents([[0]])),
            ("size", lambda: masks.chunks(S, 0)),
            ("window", lambda: masks.sliding(S, 0)),
            ("sinks", lambda: masks.sliding(S, 1, -1)),
            ("kernel", lambda: masks.neighbourhood_2d(6, 10, 7)),
            ("kernel", lambda: masks.neighbourhood_2d(6, 10, (3, 3, 3))),
            ("height", lambda: masks.neighbourhood_3d(3, 0, 3, 1)),
            ("block_map", lambda: masks.blocks(np.ones((3, 3)), 4)),
            ("block_map", lambda: masks.blocks([True], 4)),
            ("size", lambda: masks.blocks(BLOCKS, (1, 2, 3))),
            ("length", lambda: masks.blocks(BLOCKS, 10, 61)),
            ("array", lambda: masks.from_dense(True)),
            ("dense", lambda: masks.from_dense(f32)),
            ("like", lambda: masks.chunks(S, 3, like=SimpleNamespace(shape=(), __dlpack__=None))),
            ("len_q", lambda: Mask(-1, 3)),
            ("causal", lambda: Mask(3, 4, causal=True)),
            ("window", lambda: Mask(3, 4, window=(1, 2, 3))),
            ("row_spans", lambda: Mask(S, S, row_spans=f32)),
            ("row_spans", lambda: Mask(S, S, row_spans=i32)),
            ("row_spans", lambda: Mask(S, S, row_spans=[[0, 1]])),
            ("key_spans", lambda: Mask(S, 3, key_spans=i32[:, :2])),
            ("key_spans", lambda: Mask(S, S, key_spans=np.zeros((S, 18), np.int32))),
            ("dense", lambda: Mask(S, 3, dense=np.ones((2, 1, S, 4), bool))),
            ("dense", lambda: Mask(S, S, dense=np.ones((2, 1, S, S), bool),
                                   row_spans=np.ones((3, 1, S, 2), np.int32)))):
        with pytest.raises(regard.InvalidArgument) as caught:
            make()
        assert caught.value.argument == argument and str(caught.value).startswith(f"{argument} = ")
