"""Calls with a Mask against calls with its matrix, in each framework; masks that frameworks make."""

from __future__ import annotations

import numpy as np
import pytest
import regard
from mask_cases import (BLOCKS, CASES, CUTS, DOCUMENT, MANY_RUNS, PARENTS, I, J, S,
                        ends_of_subtrees, problem, wanted)
from regard import masks

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


def test_causal_is_what_it_is_in_a_call(random):
    """With real lengths, with positions, and after & with other masks."""
    arrays = problem(random)[:3]
    mask, full = masks.Mask(S, S, causal=True), masks.Mask(S, S, row_spans=np.array([[0, S]], np.int32))
    used = np.array([40], np.int32)
    for options in ({"seqused_q": used, "seqused_k": used}, {"k_position": 3},
                    {"q_positions": np.array([7], np.int32)}):
        want = regard.attention(*arrays, causal=True, **options)
        for one in (mask, mask & full, full & mask, mask & mask):
            assert np.array_equal(regard.attention(*arrays, mask=one, **options), want)


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
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
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


def test_integers_beyond_32_bits(torch, monkeypatch):
    """They are refused; where the host would wait for a GPU, they are cut to the limits."""
    from regard.masks.library import TorchLibrary

    for make, value in ((masks.prefix_lm, 2**32 + 3), (masks.prefix_lm, -2**32 + 3),
                        (masks.documents, [0, 2**32 + 3]), (masks.tree_from_parents, [2**32 - 1])):
        length = () if make is masks.tree_from_parents else (S,)
        with pytest.raises(regard.InvalidArgument, match=r"must be from -2\^31"):
            make(torch.tensor(value), *length)
    monkeypatch.setattr(TorchLibrary, "is_read_at_once", lambda self, x: False)
    assert masks.prefix_lm(torch.tensor(2**32 + 3), S).density() == 1
    assert np.array_equal(masks.prefix_lm(torch.tensor(-2**32 + 3), S).to_dense(), J <= I)


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


BATCHED = {
    "documents": (lambda x: masks.documents(x, S), [CUTS, [0, 5, 9, 9, 9, 50]]),
    "prefix": (lambda x: masks.prefix_lm(x, S), [3, 9]),
    "tree": (masks.tree_from_parents, [[*range(-1, S - 1)], [-1] + [0] * (S - 1)]),
    "blocks": (lambda x: masks.blocks(x > 0, S), [[[1]], [[0]]]),
    "both": (lambda x: masks.documents(x, S) & masks.chunks(S, 4, like=x),
             [CUTS, [0, 5, 9, 9, 9, 50]]),
}


@pytest.mark.parametrize("name", BATCHED)
def test_made_under_vmap(torch, name):
    import regard.torch as rt

    make, given = BATCHED[name]
    given, q = torch.tensor(given), torch.randn(2, 1, 2, S, 8)

    def attend(q, x):
        return rt.attention(q, q, q, mask=make(x))

    found = torch.vmap(attend)(q, given)
    assert all(torch.equal(one, attend(*each)) for one, *each in zip(found, q, given, strict=True))


def test_a_length_is_asked_for_under_vmap(torch):
    with pytest.raises(regard.InvalidArgument, match="^length = None: must be given where"):
        torch.vmap(lambda x: masks.documents(x).row_spans)(torch.tensor([CUTS]))


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


def test_explain_says_what_a_mask_shows():
    q = np.zeros((1, 2, 512, 8), np.float32)
    mask = masks.causal_documents([0, 128, 512])
    text = str(regard.explain(q, q, q, mask=mask))
    pairs = 128 * 129 / 2 + 384 * 385 / 2
    assert f"shown      {100 * pairs / 512**2:.1f} % of the pairs; tiles of 128 x 128: " in text
    assert text.endswith("9 hidden, 4 partial, 3 full")
    assert "mask       at most 50.1 % of the pairs" in text
    assert "shown" not in str(regard.explain(q, q, q, causal=True))
    q = np.zeros((1, 2, 40000, 8), np.float32)  # within a second or two
    mask = masks.documents([0, 20000, 40000])
    assert str(regard.explain(q, q, q, mask=mask)).endswith("full")
    text = str(regard.explain(q, q, q, mask=mask & masks.tree(range(40000), [40000] * 40000)))
    assert text.endswith("shown      not counted: only a test of each of 1600000000 pairs would tell")
