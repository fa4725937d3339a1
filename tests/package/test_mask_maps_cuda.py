"""Masks of PyTorch and CuPy on a GPU keep their tile maps: results, streams, graphs, memory."""

from __future__ import annotations

import gc
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that PyTorch sees", allow_module_level=True)

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402
from regard import mask_maps, masks  # noqa: E402

S = 512
CUTS = [0, 70, 200, 333, S]
KEPT = "tile map: that of the Mask, made before the call"


def leaves(seed=0):
    draw = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1, 4, S, 64, generator=draw, device="cuda").bfloat16().requires_grad_()
            for _ in range(3)]


def spanned():
    return masks.causal_documents(torch.tensor(CUTS, dtype=torch.int32, device="cuda"), S)


def blocks():
    """A matrix with hidden, partial and full tiles."""
    i = torch.arange(S, device="cuda")
    return masks.from_dense((i[:, None] // 100 >= i[None, :] // 100).contiguous())


def step(given, **options):
    """out and the gradients, in a fixed order of sums."""
    out = rt.attention(*given, deterministic=True, **options)
    return out, *torch.autograd.grad(out, given, torch.ones_like(out))


def without_maps(mask):
    """The options of a call that makes its own maps: other tensors, which no mask holds."""
    names = {"row_spans": mask.row_spans, "key_spans": mask.key_spans, "mask": mask.dense}
    return {name: x.clone() for name, x in names.items() if x is not None} | {
        "causal": mask.causal, "window": mask.window}


def wanted(given, mask):
    return step(given, **without_maps(mask))


def same(found, want):
    return all(torch.equal(a, b) for a, b in zip(found, want))


def made(mask):
    """How many times maps were made, of both passes at once."""
    return mask_maps._of_tensors[next(iter(mask.arrays().values()))].made


@pytest.mark.parametrize("mask_of", [spanned, blocks])
def test_layers_share_maps(mask_of):
    mask = mask_of()
    text = regard.explain(*leaves(), mask=mask, deterministic=True).text
    assert KEPT not in text and "tile map" in text  # else the test shows nothing
    for seed in range(4):
        assert same(step(leaves(seed), mask=mask), wanted(leaves(seed), mask))
    assert made(mask) == 1
    for pass_ in ("forward", "backward"):
        text = regard.explain(*leaves(), pass_=pass_, mask=mask, deterministic=True).text
        assert KEPT in text


def test_every_surface():
    mask, given = spanned(), leaves()
    q, k, v = (x.detach() for x in given)
    out, lse = rt.attention(q, k, v, mask=mask, return_lse=True)
    assert made(mask) == 1
    assert torch.equal(regard.attention(q, k, v, mask=mask), out)
    assert torch.equal(rt.scaled_dot_product_attention(q, k, v, mask), out)
    with rt.installed():
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(found, out)
    into = torch.empty_like(q)
    regard.attention(q, k, v, mask=mask, out=into)
    assert torch.equal(into, out)
    regard.attention_backward(out, q, k, v, out, lse, mask=mask)
    assert made(mask) == 1
    compiled = torch.compile(lambda q, k, v: rt.attention(q, k, v, mask=mask, deterministic=True),
                             backend="aot_eager", fullgraph=True)
    want = wanted(given, mask)
    for _ in range(3):
        out = compiled(*given)
        assert same((out, *torch.autograd.grad(out, given, torch.ones_like(out))), want)
    assert made(mask) <= 2  # deterministic is another geometry
    torch._dynamo.reset()


@pytest.mark.parametrize("mask_of, name", [(spanned, "row_spans"), (blocks, "dense")])
def test_a_change_in_place_is_seen(mask_of, name):
    mask, given = mask_of(), leaves()
    before = step(given, mask=mask)
    x = getattr(mask, name)
    if name == "dense":
        x[:300, :].logical_and_(torch.arange(S, device="cuda") >= 128)
    else:
        x.copy_(masks.causal_documents(torch.tensor([0, 400, S], dtype=torch.int32, device="cuda"),
                                       S).row_spans)
    after = step(given, mask=mask)
    assert same(after, wanted(given, mask)) and not torch.equal(after[0], before[0])
    assert made(mask) == 2


def test_streams():
    """A map on one stream is not read on another, however late the first one is."""
    mask, given = spanned(), leaves()
    want = wanted(given, mask)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for stream, cycles in zip(streams, (500_000_000, 0)):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            found += [step(given, mask=mask), step(given, mask=mask)]
    torch.cuda.synchronize()
    assert all(same(one, want) for one in found)
    assert made(mask) == 2


@pytest.mark.parametrize("mask_of", [spanned, blocks])
def test_graphs(mask_of):
    """A graph makes its own maps at each replay, and leaves none behind."""
    mask, given = mask_of(), leaves()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = step(given, mask=mask)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    count = made(mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(given, mask=mask)
    assert made(mask) == count
    graph.replay()
    assert same(found, want)
    if mask.dense is not None:
        mask.dense[:, 300:].fill_(False)
        graph.replay()
        assert same(found, wanted(given, mask))
    assert same(step(given, mask=mask), wanted(given, mask))


def test_a_mask_first_used_in_a_graph():
    given = leaves()
    for _ in range(2):
        step(given, mask=spanned())
    torch.cuda.synchronize()
    mask = spanned()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(given, mask=mask)
    assert made(mask) == 0
    assert same(step(given, mask=mask), wanted(given, mask))
    graph.replay()
    assert same(found, wanted(given, mask))


def test_compiled_with_graphs():
    pytest.importorskip("triton")
    mask, given = spanned(), [x.detach() for x in leaves()]
    want = rt.attention(*given, **without_maps(mask))
    compiled = torch.compile(lambda q, k, v, mask: rt.attention(q, k, v, mask=mask) + 0,
                             mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*given, mask).clone(), want)
    assert torch.equal(rt.attention(*given, mask=mask), want)
    torch._dynamo.reset()


def test_maps_live_until_the_backward_pass():
    given = leaves()
    mask = spanned()
    want = wanted(given, mask)
    outs = [rt.attention(*given, deterministic=True, mask=mask) for _ in range(3)]
    kept = mask_maps._of_tensors[mask.row_spans]
    del mask
    gc.collect()
    for out in outs:
        assert same((out, *torch.autograd.grad(out, given, torch.ones_like(out))), want)
    assert kept.made == 1


def test_memory_goes_with_the_mask():
    given = leaves()
    step(given, mask=spanned())
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        mask = spanned()
        step(given, mask=mask)
        del mask
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_at_most_eight_are_kept():
    mask, given = spanned(), [x.detach() for x in leaves()]
    sizes = []
    for n in range(12):
        rt.attention(*given, mask=mask, softcap=float(n + 1))
        sizes.append(torch.cuda.memory_allocated())
    assert made(mask) == 12 and sizes[-1] == sizes[8]


def test_nothing_waits_for_the_device():
    given, first, second = leaves(), spanned(), spanned()
    step(given, mask=first)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        for mask in (first, second):
            step(given, mask=mask)
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def test_threads_share_a_mask():
    mask, given = spanned(), [x.detach() for x in leaves()]
    want = rt.attention(*given, **without_maps(mask))
    torch.cuda.synchronize()
    wrong = []

    def work():
        for _ in range(20):
            if not torch.equal(rt.attention(*given, mask=mask), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_cupy():
    cupy = pytest.importorskip("cupy")
    mask = masks.causal_documents(CUTS, S, like=cupy.empty(1))
    q, k, v = (cupy.random.default_rng(n).standard_normal((1, 4, S, 64)).astype("float16")
               for n in range(3))
    options = {"row_spans": mask.row_spans.copy(), "causal": mask.causal, "window": mask.window}
    want, lse = regard.attention(q, k, v, return_lse=True, **options)
    for _ in range(3):
        assert (regard.attention(q, k, v, mask=mask) == want).all()
        for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
            cupy.cuda.Device().synchronize()
            with stream:
                found = regard.attention(q, k, v, mask=mask)
                stream.synchronize()
                assert (found == want).all()
    assert KEPT in regard.explain(q, k, v, mask=mask).text
    options["deterministic"] = True
    wanted_gradients = regard.attention_backward(want, q, k, v, want, lse, **options)
    found = regard.attention_backward(want, q, k, v, want, lse, mask=mask, deterministic=True)
    assert all((getattr(found, name) == getattr(wanted_gradients, name)).all()
               for name in ("dq", "dk", "dv"))
