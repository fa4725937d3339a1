"""regard.torch on a GPU: PyTorch's streams, graphs, memory and devices. Few kernels serve all."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that PyTorch sees", allow_module_level=True)

import regard  # noqa: E402
import regard.torch as rt  # noqa: E402


def normal(*shape, seed=0, dtype=torch.bfloat16, device="cuda"):
    draw = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float32, device=device).to(dtype)


def leaves(dtype=torch.bfloat16, device="cuda", heads=(4, 2)):
    """q, k, v as views of (B, S, H, D)."""
    return [normal(2, 200, h, 64, seed=seed, dtype=dtype, device=device).transpose(1, 2)
            .detach().requires_grad_() for seed, h in enumerate((heads[0], heads[1], heads[1]))]


def step(q, k, v, **options):
    """out and the gradients, in a fixed order of sums."""
    out = rt.attention(q, k, v, causal=True, deterministic=True, **options)
    return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1.2e-2), (torch.float16, 2e-3)])
def test_half_types_against_float64(dtype, limit):
    given = leaves(dtype)
    dout = normal(2, 4, 200, 64, seed=5, dtype=dtype)
    out = rt.attention(*given, causal=True)
    found = out, *torch.autograd.grad(out, given, dout)
    exact = [x.detach().double().requires_grad_() for x in given]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        truth = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True,
                                                                 enable_gqa=True)
    wanted = truth, *torch.autograd.grad(truth, exact, dout.double())
    for a, b in zip(found, wanted):
        assert a.dtype == dtype
        assert ((a.double() - b).norm() / b.norm()).item() < limit


def test_the_current_stream_is_used():
    wanted = step(*leaves())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    given = [torch.full_like(x, torch.nan) for x in leaves()]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # tens of milliseconds, ahead of the inputs
        for x, value in zip(given, leaves()):
            x.copy_(value.detach())
        found = step(*(x.requires_grad_() for x in given))
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_nothing_waits_for_the_device():
    given = leaves()
    begins = torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda")
    packed = [x[0].transpose(0, 1).detach().requires_grad_() for x in given]

    def everything():
        step(*given)
        rt.attention(*given, dropout_p=0.1, causal=True).sum().backward()
        rt.flash_attn_varlen_func(*packed, begins, begins, 100, 100).sum().backward()

    everything()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        event = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)  # about a second
        event.record()
        everything()
        assert not event.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def test_graphs_replay_on_new_inputs():
    given = leaves()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and lets autograd settle on it
        step(*given)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(*given)
    for seed in (7, 8):
        with torch.no_grad():
            for i, x in enumerate(given):
                x.copy_(normal(*x.shape, seed=10 * seed + i))
        graph.replay()
        replayed = [x.clone() for x in found]
        wanted = step(*given)
        assert all(torch.equal(a, b) for a, b in zip(replayed, wanted))


def test_graphs_and_dropout():
    given = [x.detach() for x in leaves()]

    def run(seed):
        return rt.attention(*given, dropout_p=0.1, causal=True, dropout_seed=seed)

    wanted = {seed: run(seed) for seed in (5, 6)}
    seed = torch.tensor(5, device="cuda")
    run(seed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fixed, found, drawn = run(5), run(seed), run(None)
        with pytest.raises(regard.Unsupported, match="captured"):
            run(torch.tensor(5))
    all_drawn = []
    for number in (5, 6):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(fixed, wanted[5]) and torch.equal(found, wanted[number])
        all_drawn.append(drawn.clone())
    assert not torch.equal(*all_drawn)


def test_graphs_of_a_step_with_dropout():
    """The gradients of a replay belong to the weights that its forward pass has dropped."""
    given = leaves()
    dout = normal(2, 4, 200, 64, seed=5)
    seed = torch.zeros(2, dtype=torch.int64, device="cuda")

    def step_of(seeds):
        outs = [rt.attention(*given, dropout_p=0.3, deterministic=True, dropout_seed=one)
                for one in seeds]
        return *outs, *torch.autograd.grad(outs, given, [dout, dout])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step_of(seed.unbind())
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step_of(seed.unbind())
    for numbers in ((1, 2), (3, 2**62)):
        seed.copy_(torch.tensor(numbers))
        graph.replay()
        replayed = [x.clone() for x in found]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step_of(numbers)))


def test_a_seed_is_not_waited_for():
    """A call with a seed that the GPU has yet to compute returns at once."""
    given = [x.detach() for x in leaves()]
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    wanted = rt.attention(*given, dropout_p=0.1, dropout_seed=11)
    rt.attention(*given, dropout_p=0.1, dropout_seed=seed)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    seed.fill_(11)
    found = rt.attention(*given, dropout_p=0.1, dropout_seed=seed)
    assert not torch.cuda.current_stream().query()
    assert torch.equal(found, wanted)


def test_compiled():
    def function(q, k, v):
        return rt.attention(q, k, v, causal=True, deterministic=True)

    given = leaves()
    wanted = step(*given)
    out = torch.compile(function, fullgraph=True, backend="aot_eager")(*given)
    found = out, *torch.autograd.grad(out, given, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    torch._dynamo.reset()


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    wanted = step(*leaves())
    given = [x.detach().to("cuda:1").requires_grad_() for x in leaves()]
    assert torch.cuda.current_device() == 0
    found = step(*given)
    assert torch.cuda.current_device() == 0
    for a, b in zip(found, wanted):
        assert a.device.index == 1 and torch.equal(a.cpu(), b.cpu())


def test_tensors_of_two_devices_are_refused():
    q = normal(1, 2, 8, 64)
    for argument, change in (("k", {"k": q.cpu()}), ("mask", {"mask": torch.ones(8, 8) > 0}),
                             ("sink", {"sink": torch.ones(2)})):
        with pytest.raises(regard.InvalidArgument) as caught:
            rt.attention(**({"q": q, "k": q, "v": q} | change))
        assert caught.value.argument == argument
    with pytest.raises(regard.InvalidArgument):
        rt.attention(q.cpu(), q, q)


def test_gradients_repeat_to_the_bit():
    given = leaves(heads=(4, 1))
    wanted = step(*given)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(step(*given), wanted))


def test_memory_goes_back_to_pytorch():
    given = leaves()
    step(*given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        step(*given)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
