"""regard.masks: builders, algebra and pictures against matrices that are written by definition; and
calls with a Mask against calls with its matrix."""

from __future__ import annotations

import copy
import pickle
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import regard
from regard import masks
from regard.masks import Mask

S = 60
RANDOM = np.random.default_rng(5)
I, J = np.arange(S)[:, None], np.arange(S)[None, :]


def matrix(visible, len_q=S, len_k=S):
    """By definition: visible(i, j) of each pair."""
    return np.array([[bool(visible(i, j)) for j in range(len_k)] for i in range(len_q)],
                    bool).reshape(len_q, len_k)


CUTS = [0, 13, 13, 14, 40, 60]
DOCUMENT = [sum(cut <= i for cut in CUTS[1:]) for i in range(S)]
# Two roots; 20 and 30 are children of 10, 31 of 5.
PARENTS = [i - 1 for i in range(S)]
PARENTS[20], PARENTS[30], PARENTS[31], PARENTS[50] = 10, 10, 5, -1
BLOCKS = RANDOM.random((6, 6)) < 0.5
MANY_RUNS = np.arange(20)[:, None] % 2 == np.arange(20) % 2
MANY_RUNS[3, 5] = False


def is_ancestor(i, j):
    while i > j:
        i = PARENTS[i]
    return i == j


def near(x, y, size, kernel):
    """Whether y lies in x's window on one axis."""
    first = min(max(x - kernel // 2, 0), size - kernel)
    return first <= y < first + kernel


def grid(sizes, kernels):
    def visible(i, j):
        return all(near(*pair, size, kernel) for *pair, size, kernel in zip(
            np.unravel_index(i, sizes), np.unravel_index(j, sizes), sizes, kernels))

    return matrix(visible)


def ends_of_subtrees():
    return [max(i for i in range(S) if is_ancestor(i, j)) + 1 for j in range(S)]


# Name: the mask, the matrix, and what the mask holds.
CASES = {
    "documents": (lambda: masks.documents(CUTS), lambda i, j: DOCUMENT[i] == DOCUMENT[j],
                  "row_spans"),
    "documents, padding": (lambda: masks.documents(np.array([0, 20, 50]), S),
                           lambda i, j: i // 20 == j // 20 < 1 or 20 <= min(i, j) <= max(i, j) < 50,
                           "row_spans"),
    "causal documents": (lambda: masks.causal_documents(CUTS),
                         lambda i, j: DOCUMENT[i] == DOCUMENT[j] and j <= i, "row_spans"),
    "prefix": (lambda: masks.prefix_lm(17, S), lambda i, j: j <= i or j < 17, "row_spans"),
    "long prefix": (lambda: masks.prefix_lm(170, S), lambda i, j: True, "row_spans"),
    "tree": (lambda: masks.tree(range(S), ends_of_subtrees()), is_ancestor, "key_spans"),
    "tree from parents": (lambda: masks.tree_from_parents(PARENTS), is_ancestor, "key_spans"),
    "chunks": (lambda: masks.chunks(S, 16), lambda i, j: i // 16 == j // 16 and j <= i, "row_spans"),
    "window": (lambda: masks.sliding(S, 9), lambda i, j: i - 9 < j <= i, ""),
    "window, sinks": (lambda: masks.sliding(S, 9, 3), lambda i, j: j <= i and (j < 3 or i - 9 < j),
                      "row_spans"),
    "wide window": (lambda: masks.sliding(S, 900, 300), lambda i, j: j <= i, "row_spans"),
    "2-D": (lambda: masks.neighbourhood_2d(6, 10, (3, 4)), grid((6, 10), (3, 4)), "row_spans"),
    "2-D, whole rows": (lambda: masks.neighbourhood_2d(12, 5, (9, 5)), grid((12, 5), (9, 5)),
                        "row_spans"),
    "2-D, many rows": (lambda: masks.neighbourhood_2d(12, 5, (9, 3)), grid((12, 5), (9, 3)), "dense"),
    "3-D": (lambda: masks.neighbourhood_3d(3, 4, 5, (2, 3, 2)), grid((3, 4, 5), (2, 3, 2)),
            "row_spans"),
    "3-D, whole rows": (lambda: masks.neighbourhood_3d(4, 3, 5, (2, 3, 5)),
                        grid((4, 3, 5), (2, 3, 5)), "row_spans"),
    "3-D, many rows": (lambda: masks.neighbourhood_3d(5, 4, 3, 3), grid((5, 4, 3), (3, 3, 3)),
                       "row_spans"),
    "3-D, dense": (lambda: masks.neighbourhood_3d(4, 5, 3, (3, 3, 2)), grid((4, 5, 3), (3, 3, 2)),
                   "dense"),
    "blocks": (lambda: masks.blocks(BLOCKS, 10), lambda i, j: BLOCKS[i // 10, j // 10], "row_spans"),
    "blocks, cut": (lambda: masks.blocks(BLOCKS, (11, 13), S),
                    lambda i, j: BLOCKS[i // 11, j // 13], "row_spans"),
    "blocks, wide": (lambda: masks.blocks(np.tri(20, dtype=bool), 3),
                     lambda i, j: j // 3 <= i // 3, "row_spans"),
    "blocks by columns": (lambda: masks.blocks(MANY_RUNS[:4], (15, 3)),
                          lambda i, j: MANY_RUNS[i // 15, j // 3], "key_spans"),
    "blocks, dense": (lambda: masks.blocks(MANY_RUNS, 3), lambda i, j: MANY_RUNS[i // 3, j // 3],
                      "dense"),
    "matrix": (lambda: masks.from_dense(I * J % 3 == 0), lambda i, j: i * j % 3 == 0, "dense"),
    "causal": (lambda: Mask(S, S, causal=True), lambda i, j: j <= i, ""),
    "both ways": (lambda: Mask(S, S, window=(3, 5)), lambda i, j: i - 3 <= j <= i + 5, ""),
}


def wanted(name):
    definition = CASES[name][1]
    return definition if isinstance(definition, np.ndarray) else matrix(definition)


def problem(random, batch=1, heads=2, len_q=S, len_k=S):
    shapes = [(batch, heads, length, 8) for length in (len_q, len_k, len_k, len_q)]
    return [random.standard_normal(shape, dtype=np.float32) for shape in shapes]


def all_results(q, k, v, dout, **options):
    out, lse = regard.attention(q, k, v, return_lse=True, **options)
    found = regard.attention_backward(dout, q, k, v, out, lse, **options)
    return [out, lse, found.dq, found.dk, found.dv]


def assert_same_bits(arrays, mask, dense, **options):
    ours, theirs = all_results(*arrays, mask=mask), all_results(*arrays, mask=dense, **options)
    assert all(np.array_equal(x, y) for x, y in zip(ours, theirs))


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

    trees = masks.tree([range(S)] * 2, [np.arange(S) + 1, [S] * S])
    assert (trees.to_dense() == np.stack([np.eye(S), I >= J])[:, None]).all()


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


@pytest.mark.parametrize("parents", [[0], [1, -1], [-2], [-1, 0, 0, 1], [-1, -1, 0], [-1, 0, 1, 0, 2]])
def test_orders_that_are_not_depth_first(parents):
    with pytest.raises(regard.InvalidArgument, match="parents = .*depth-first"):
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

@pytest.mark.parametrize("name", ["causal documents", "tree", "2-D, many rows", "window, sinks"])
def test_tiles(name):
    dense = wanted(name)
    for rows, keys in ((7, 16), (60, 1), (128, 128)):
        found = [0, 0, 0]
        for i in range(0, S, rows):
            for j in range(0, S, keys):
                tile = dense[i:i + rows, j:j + keys]
                found[2 if tile.all() else 1 if tile.any() else 0] += 1
        assert CASES[name][0]().tiles(rows, keys) == tuple(found)


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
    assert repr(masks.prefix_lm([60, 60, 60], S)) == "Mask(60 x 60, batch=3, row_spans (n=1), 100 % visible)"
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


@pytest.mark.parametrize("surface", ["numpy", "torch", "jax"])
def test_refused_calls(surface, random):
    mask = masks.causal_documents(CUTS)
    x = random.standard_normal((2, 3, S, 8), dtype=np.float32)
    if surface == "torch":
        x = pytest.importorskip("torch").from_numpy(x)
        with pytest.raises(regard.InvalidArgument, match="NumPy; make it with like=q"):
            regard.attention(x, x, x, mask=mask)
        mask = mask.like(x)
    if surface == "jax":
        x = pytest.importorskip("jax.numpy").asarray(x)
    short = x[:, :, :50]
    packed = {"cu_seqlens_q": x, "cu_seqlens_k": x, "max_seqlen_q": 1, "max_seqlen_k": 1}
    batched = masks.prefix_lm([1, 2, 3], S, like=x)
    for q, k, options, words in (
            (short, x, {}, r"mask = a Mask\(60 x 60\): the call has 50 queries and 60 keys"),
            (x, short, {}, "60 queries and 50 keys"),
            (x.swapaxes(1, 2), short.swapaxes(1, 2), {"layout": "bshd"}, "60 queries and 50 keys"),
            (x, x, {"mask": batched}, r"batch=3\): the call has 2 batch entries and 3 query heads"),
            (x[0], x[0], packed, "is for sequences of one length"),
            (x, x, {"causal": True}, "causal = True: a Mask.*has causal='top_left'"),
            (x, x, {"window": 3}, "window = 3: a Mask"),
            (x, x, {"row_spans": mask.row_spans}, "row_spans = an array: a Mask.*give one of the two")):
        options = {"mask": mask} | options
        for call in (regard.attention, regard.explain, regard.check):
            with pytest.raises(regard.InvalidArgument, match=words):
                call(q, k, k, **options)
        with pytest.raises(regard.InvalidArgument, match=words):
            regard.attention_backward(q, q, k, k, q, q, **options)


# ------------------------------------------------------------------------------- calls and frameworks

def test_next_to_other_options(random):
    """What the mask does not hold may be given with it, in both layouts."""
    q, k, v, dout = problem(random, batch=2)
    mask = masks.documents(CUTS)
    dense = wanted("causal documents")
    keys = np.stack([np.arange(S), np.arange(S) + 20], 1).astype(np.int32)
    found = regard.attention(q, k, v, mask=mask, causal=True, key_spans=keys)
    assert np.array_equal(found, regard.attention(q, k, v, mask=dense & (I < J + 20)))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    found = regard.attention(q, k, v, mask=mask, softcap=2.0, layout="bshd")
    want = regard.attention(q, k, v, mask=wanted("documents"), softcap=2.0, layout="bshd")
    assert np.array_equal(found, want)


def test_check_and_explain(random):
    q, k, v, _ = problem(random)
    for name in ("causal documents", "tree", "2-D, many rows"):
        mask = CASES[name][0]()
        assert regard.check(q, k, v, mask=mask, backward=True, show=False)
        assert regard.explain(q, k, v, mask=mask).supported
        regard.prepare(q, k, v, mask=mask)
    assert regard.explain(q, k, v, mask=masks.sliding(S, 9)).pairs == 2 * wanted("window").sum()


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("name", CASES)
def test_builders_of_pytorch(name, torch, random):
    mask = CASES[name][0]().like(torch.ones(1))
    assert all(isinstance(x, torch.Tensor) for x in mask.arrays().values())
    assert np.array_equal(mask.to_dense(), wanted(name)) or not mask.arrays()
    assert mask.density() == pytest.approx(wanted(name).mean()) and mask.tiles(9, 9)[0] >= 0


def made_by(x, integers, bools):
    """Masks from arrays of a framework, or like one; and their matrices."""
    return [(masks.documents(integers(CUTS)), wanted("documents")),
            (masks.causal_documents(integers([0, 20, 50]), S),
             wanted("documents, padding") & (J <= I)),
            (masks.causal_documents(CUTS, like=x), wanted("causal documents")),
            (masks.prefix_lm(integers(17), S), wanted("prefix")),
            (masks.tree(integers(range(S)), ends_of_subtrees()), wanted("tree")),
            (masks.tree_from_parents(integers(PARENTS)), wanted("tree")),
            (masks.chunks(S, 16, like=x), wanted("chunks")),
            (masks.sliding(S, 9, 3, like=x), wanted("window, sinks")),
            (masks.neighbourhood_2d(6, 10, (3, 4), like=x), wanted("2-D")),
            (masks.neighbourhood_3d(4, 5, 3, (3, 3, 2), like=x), wanted("3-D, dense")),
            (masks.blocks(bools(BLOCKS), 10), wanted("blocks")),
            (masks.blocks(bools(MANY_RUNS), 3), wanted("blocks, dense")),
            (masks.prefix_lm(17, S) & masks.chunks(S, 16, like=x),
             wanted("prefix") & wanted("chunks")),
            (masks.chunks(S, 16, like=x) | masks.sliding(S, 9), wanted("chunks") | wanted("window"))]


def test_made_by_pytorch(torch):
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        x = torch.ones(1, device=device)
        made = made_by(x, lambda n: torch.tensor(n, device=device),
                       lambda n: torch.from_numpy(n).to(device))
        for mask, dense in made:
            assert all(part.device == x.device for part in mask.arrays().values())
            assert np.array_equal(mask.to_dense().cpu(), dense)


def test_made_without_reading_tensors(torch):
    """Tensors without elements refuse to be read, as a GPU's would wait."""
    x = torch.ones(1, device="meta")
    integers = {n: torch.zeros(n, dtype=torch.int32, device="meta") for n in (6, S)}
    maps = torch.zeros((6, 6), dtype=torch.bool, device="meta")
    for mask in (masks.causal_documents(integers[6], S), masks.prefix_lm(integers[6], S),
                 masks.tree_from_parents(integers[S]), masks.chunks(S, 3, like=x),
                 masks.sliding(S, 3, 1, like=x), masks.neighbourhood_2d(6, 10, 3, like=x),
                 masks.neighbourhood_2d(12, 5, (9, 3), like=x), masks.blocks(maps, 10),
                 masks.prefix_lm(integers[6], S) & masks.chunks(S, 3, like=x)):
        assert "visible" not in repr(mask)


def torch_problem(torch, random):
    q, k, v, dout = (torch.from_numpy(x) for x in problem(random))
    return [x.requires_grad_() for x in (q, k, v)], dout


def torch_results(torch, attend, rows, dout):
    out = attend(*rows)
    return [out.detach(), *torch.autograd.grad(out, rows, dout)]


@pytest.mark.parametrize("name", ["causal documents", "tree", "2-D, many rows", "window"])
def test_pytorch(name, torch, random):
    import regard.torch as rt

    rows, dout = torch_problem(torch, random)
    mask, dense = CASES[name][0]().like(dout), torch.from_numpy(wanted(name))
    want = torch_results(torch, lambda q, k, v: rt.attention(q, k, v, mask=dense), rows, dout)

    def shim(q, k, v):
        return rt.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def folded(q, k, v):
        q, k, v = (x[:, None] for x in (q, k, v))
        return rt.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]

    def replaced(q, k, v):
        with rt.installed():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    for attend in (lambda q, k, v: rt.attention(q, k, v, mask=mask),
                   lambda q, k, v: regard.attention(q, k, v, mask=mask), shim, folded, replaced):
        found = torch_results(torch, attend, rows, dout)
        assert all(torch.equal(x, y) for x, y in zip(found, want))
    q, k, v = (x.detach() for x in rows)
    assert torch.equal(regard.attention(q, k, v, mask=mask), want[0])
    assert regard.check(q, k, v, mask=mask, dout=dout, show=False)


def test_compiled_by_pytorch(torch, random):
    import regard.torch as rt

    rows, dout = torch_problem(torch, random)
    mask = masks.causal_documents(torch.tensor(CUTS))

    def attend(q, k, v, mask):
        return rt.attention(q, k, v, mask=mask)

    want = torch_results(torch, lambda *rows: attend(*rows, mask), rows, dout)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = torch_results(torch, lambda *rows: compiled(*rows, mask), rows, dout)
    assert all(torch.equal(x, y) for x, y in zip(found, want))


def test_flex_masks(torch):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    document, limits = torch.tensor(DOCUMENT), torch.tensor([5, 9])
    for mask_mod, batch, heads, kind, definition in (
            (lambda b, h, q, k: (document[q] == document[k]) & (q >= k), None, None, "row_spans",
             lambda b, h: wanted("causal documents")),
            (lambda b, h, q, k: (q + k) % 2 == 0, None, None, "dense",
             lambda b, h: (I + J) % 2 == 0),
            (lambda b, h, q, k: (k < limits[b]) | (q - k == h), 2, 3, "row_spans",
             lambda b, h: (J < int(limits[b])) | (I - J == h))):
        block_mask = flex.create_block_mask(mask_mod, batch, heads, S, S, device="cpu")
        mask = masks.from_flex(block_mask)
        dense = np.stack([np.stack([definition(b, h) for h in range(heads or 1)])
                          for b in range(batch or 1)])
        assert [*mask.arrays()] == [kind] and np.array_equal(mask.to_dense(), dense.squeeze())
    with pytest.raises(regard.WrongType, match="block_mask = "):
        masks.from_flex(document)


@pytest.mark.exhaustive
def test_made_by_jax():
    jax = pytest.importorskip("jax")
    for mask, dense in made_by(jax.numpy.ones(1), jax.numpy.asarray, jax.numpy.asarray):
        assert all(isinstance(part, jax.Array) for part in mask.arrays().values())
        assert np.array_equal(mask.to_dense(), dense)


def test_jax(random):
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp
    import regard.jax as rj

    q, k, v, dout = (jnp.asarray(x) for x in problem(random))

    @jax.jit
    def gradients(mask, q, k, v):
        def loss(*rows):
            return (rj.attention(*rows, mask=mask) * dout).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    @jax.jit
    def made_inside(cuts, q, k, v):
        return rj.attention(q, k, v, mask=masks.causal_documents(cuts, S))

    mask, dense = masks.causal_documents(CUTS), jnp.asarray(wanted("causal documents"))
    found, want = gradients(mask, q, k, v), gradients(dense, q, k, v)
    assert all(jnp.array_equal(x, y) for x, y in zip(found, want))
    want = rj.attention(q, k, v, mask=dense)
    assert jnp.array_equal(made_inside(jnp.asarray(CUTS), q, k, v), want)
    assert jnp.array_equal(regard.attention(q, k, v, mask=mask), want)
    q, k, v, want = (jnp.swapaxes(x, 1, 2) for x in (q, k, v, want))
    assert jnp.array_equal(rj.dot_product_attention(q, k, v, mask=mask), want)
    lengths = jnp.asarray([S], jnp.int32)  # then the window becomes a matrix
    windowed = {"local_window_size": 7, "query_seq_lengths": lengths}
    found = rj.dot_product_attention(q, k, v, mask=mask, **windowed)
    assert jnp.array_equal(found, rj.dot_product_attention(q, k, v, mask=dense, **windowed))
