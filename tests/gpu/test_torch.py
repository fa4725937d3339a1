"""Beside PyTorch in one process: its memory, streams, events and graphs; no hidden waiting."""

import threading
import time

import pytest

import device

torch = pytest.importorskip("torch")
if device.is_host() or not torch.cuda.is_available():
    pytest.skip("needs PyTorch and a GPU", allow_module_level=True)

import regard_ctypes as regard  # noqa: E402
import torch_calls as calls  # noqa: E402

BACKENDS = device.backends()
LIMITS = {"f32": 5e-6, "bf16": 1.2e-2, "f16": 2e-3}


class Work:
    """A problem in PyTorch's memory, (B, S, H, D) viewed as (B, H, S, D), and room for results."""

    def __init__(self, shape=(2, 4, 256, 64), kv_heads=None, type="bf16", seed=1, **options):
        batch, heads, length, dim = shape
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.dtype = calls.TYPES[type]
        sizes = {"q": heads, "k": kv_heads or heads, "v": kv_heads or heads}
        self.given = {name: self.normal(batch, length, h, dim).transpose(1, 2)
                      for name, h in sizes.items()}
        self.dout = self.normal(batch, length, heads, dim).transpose(1, 2)
        self.options = options
        self.out = torch.full_like(self.given["q"], torch.nan)
        self.lse = torch.full((batch, heads, length), torch.nan, device="cuda")
        self.gradients = {"d" + name: torch.full_like(x, torch.nan)
                          for name, x in self.given.items()}
        self.attention = calls.attention(**self.given, **options)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, device="cuda").to(self.dtype)

    def renew(self):
        """Other inputs in the same memory."""
        for x in (*self.given.values(), self.dout):
            x.copy_(torch.randn(x.shape, generator=self.generator, device="cuda"))

    def spoil(self):
        for x in self.results().values():
            x.fill_(torch.nan)

    def results(self):
        return {"out": self.out, "lse": self.lse, **self.gradients}

    def copies(self):
        return {name: x.clone() for name, x in self.results().items()}

    def workspaces(self, backend):
        return [calls.workspace(self.attention, which, self.out, backend)
                for which in ("forward", "backward")]

    def solve(self, backend, workspaces=(None, None), stream=None):
        calls.forward(self.attention, self.out, self.lse, backend=backend,
                      workspace=workspaces[0], stream=stream)
        calls.backward(self.attention, self.out, self.lse, self.dout, self.gradients,
                       backend=backend, workspace=workspaces[1], stream=stream)

    def truth(self):
        return calls.exact_gradients(**self.given, dout=self.dout, **self.options)

    def check(self, type="bf16"):
        for name, want in self.truth().items():
            got = self.results()[name].double()
            error = float((got - want).norm() / want.norm())
            assert error <= LIMITS[type], f"{name}: {error:.3g}"


def same(got, want, names=None):
    for name in names or want:
        assert torch.equal(got[name], want[name]), f"{name} differs"


def busy(seconds=0.3):
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(seconds * 1.5e9))


@pytest.fixture(autouse=True)
def synchronised():
    yield
    torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("dim, options", [
    (64, {"causal": "top_left"}), (128, {}), (128, {"causal": "bottom_right", "kv_heads": 2}),
    (256, {"causal": "top_left"}), (80, {"window": (300, 100)}), (64, {"softcap": 4.0})], ids=str)
def test_long_problems_against_float64(dim, options, type, backend):
    if backend == "cuda:simt" and (type != "f32" or dim > 128):
        pytest.skip("slow, and the same code")
    if backend == "cuda:wgmma" and type == "f32" and dim > 128:
        pytest.skip("refused: f32 has tiles up to 128")
    work = Work((2, 4, 1500, dim), type=type, **options)
    work.solve(backend)
    work.check(type)


@pytest.mark.parametrize("options", [{"causal": "top_left"}, {}], ids=str)
def test_a_hundred_deterministic_runs(options):
    work = Work((2, 8, 2048, 128), kv_heads=4, deterministic=1, **options)
    spaces = work.workspaces("cuda:mma")
    work.solve("cuda:mma", spaces)
    want = work.copies()
    for _ in range(100):
        work.spoil()
        work.solve("cuda:mma", spaces)
        same(work.results(), want)


def test_as_pytorch_s_own():
    work = Work((2, 4, 512, 64), causal="top_left")
    work.solve("")
    leaves = [x.detach().requires_grad_() for x in work.given.values()]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    gradients = torch.autograd.grad(out, leaves, work.dout)
    for got, want in zip([work.out, *work.gradients.values()], [out, *gradients]):
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 1e-2


# ---------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("own", [True, False], ids=["own workspace", "the library's"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_order_between_streams_by_events(backend, own):
    """Inputs come from one stream, late; results go to another."""
    work = Work()
    spaces = work.workspaces(backend) if own else (None, None)
    work.solve(backend, spaces)  # compiles
    torch.cuda.synchronize()
    first, second, third = (torch.cuda.Stream() for _ in range(3))
    ready, done = torch.cuda.Event(), torch.cuda.Event()
    work.spoil()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        busy(0.1)
        work.renew()
        ready.record()
    second.wait_event(ready)
    work.solve(backend, spaces, stream=second)
    done.record(second)
    with torch.cuda.stream(third):
        third.wait_event(done)
        results = work.copies()
    torch.cuda.synchronize()
    truth = work.truth()
    for name, want in truth.items():
        error = (results[name].double() - want).norm() / want.norm()
        assert error <= LIMITS["bf16"], f"{name}: {float(error):.3g}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_streams_at_once(backend):
    works = [Work((2, 4, 700, 64), seed=seed, deterministic=1) for seed in (1, 2)]
    for work in works:
        work.solve(backend)
    torch.cuda.synchronize()
    want = [work.copies() for work in works]
    streams = [torch.cuda.Stream() for _ in works]
    for _ in range(10):
        for work in works:
            work.spoil()
        torch.cuda.synchronize()
        for work, stream in zip(works, streams):
            work.solve(backend, stream=stream)
        torch.cuda.synchronize()
        for work, results in zip(works, want):
            same(work.results(), results)


@pytest.mark.alone
@pytest.mark.parametrize("own", [True, False], ids=["own workspace", "the library's"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_waits_for_the_gpu(backend, own):
    work = Work()
    spaces = work.workspaces(backend) if own else (None, None)
    for _ in range(2):  # compiles, and fills the pool of memory
        work.solve(backend, spaces)
    torch.cuda.synchronize()
    began = time.perf_counter()
    busy(0.5)
    work.solve(backend, spaces)
    returned = time.perf_counter() - began
    still_busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    assert still_busy, "the work was done when the call returned"
    assert returned < 0.5 * whole, f"the calls took {returned:.3f} s of {whole:.3f} s"
    work.check()


# ----------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("own", [True, False], ids=["own workspace", "the library's"])
@pytest.mark.parametrize("options", [{"causal": "top_left"}, {"deterministic": 1, "kv_heads": 2}],
                         ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_capture_and_replay(backend, options, own):
    work = Work(**options)
    spaces = work.workspaces(backend) if own else (None, None)
    work.solve(backend, spaces)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.solve(backend, spaces)
    for _ in range(3):
        work.renew()
        work.spoil()
        graph.replay()
        torch.cuda.synchronize()
        work.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capture_may_be_the_first_call(backend):
    """Kernels that were never used before are compiled and loaded while a stream is captured."""
    work = Work((1, 2, 130, 56), softcap=3.5, window=(40, 11), scale=0.11)
    spaces = work.workspaces(backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.solve(backend, spaces)
    work.spoil()
    graph.replay()
    torch.cuda.synchronize()
    work.check()


def captured(attention, out, lse):
    """A graph of a forward call, which has been called before."""
    space = calls.workspace(attention, "forward", out, "cuda:mma")
    calls.forward(attention, out, lse, backend="cuda:mma", workspace=space)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.forward(attention, out, lse, backend="cuda:mma", workspace=space)
    graph.workspace = space
    return graph


@pytest.mark.parametrize("kv_heads, keys", [(1, 3000), (8, 3000), (8, 1000)], ids=[
    "a launch merges", "the last block merges", "a cluster merges"])
def test_capture_of_split_keys(kv_heads, keys):
    work = Work((1, 8, keys, 128), kv_heads=kv_heads)
    q = work.given["q"][:, :, :1].contiguous()
    attention = calls.attention(q=q, k=work.given["k"], v=work.given["v"])
    out, lse = torch.empty_like(q), torch.empty((1, 8, 1), device="cuda")
    graph = captured(attention, out, lse)
    for _ in range(5):
        q.copy_(torch.randn(q.shape, device="cuda"))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        want, _ = calls.exact(q.double(), work.given["k"].double(), work.given["v"].double())
        assert float((out.double() - want).norm() / want.norm()) < LIMITS["bf16"]


def test_capture_of_stream_k():
    """Lengths that a replay finds changed, from a sequence without keys to one that has nearly all."""
    batch, longest = 24, 6000
    work = Work((batch, 8, longest, 128), kv_heads=4)
    q, k, v = work.given["q"][:, :, :2].contiguous(), work.given["k"], work.given["v"]
    used = torch.zeros(batch, dtype=torch.int32, device="cuda")
    attention = calls.attention(q=q, k=k, v=v, seqused_k=used)
    out, lse = torch.empty_like(q), torch.empty((batch, 8, 2), device="cuda")
    assert "stream-K" in calls.explain(attention, "forward", out, "cuda:mma")
    graph = captured(attention, out, lse)
    for longest_at in (0, 7, 23):
        lengths = torch.randint(0, 300, (batch,), generator=work.generator, device="cuda")
        lengths[longest_at], lengths[12] = longest, 0
        used.copy_(lengths)
        for x in (out, lse):
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for b, length in enumerate(lengths.tolist()):
            if length == 0:
                assert not out[b].any() and torch.isneginf(lse[b]).all()
                continue
            want, want_lse = calls.exact(*(x[b : b + 1, :, :n].double() for x, n in
                                           ((q, 2), (k, length), (v, length))))
            assert float((out[b].double() - want[0]).norm() / want.norm()) < LIMITS["bf16"]
            assert torch.allclose(lse[b].double(), want_lse[0], atol=1e-4)


# --------------------------------------------------------------------------------------- contexts


def test_the_current_context_stays():
    driver = device.STATE.driver
    work = Work()
    tensors = calls.forward_tensors(work.out, work.lse)
    calls_made = [calls.prepared("forward", work.attention, tensors,
                                 calls.run_of(work.out, backend)) for backend in BACKENDS]
    before = driver.current()
    for call in calls_made:
        call()
        assert driver.current() == before
    torch.cuda.synchronize()
    seen = []

    def bare():
        """A thread in which no context is current."""
        driver.detach()
        seen.append(driver.current())
        work.out.data_ptr()
        for call in calls_made:
            try:
                call()
            except regard.RegardError as error:
                seen.append(str(error))
            seen.append(driver.current())

    thread = threading.Thread(target=bare)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert seen == [None] * (1 + len(calls_made)), seen
    assert not torch.isnan(work.out).any()


def test_another_context_may_be_current():
    """A context of the same GPU that is not PyTorch's: the stream's context is what counts."""
    driver = device.STATE.driver
    work = Work()
    work.solve("cuda:mma")
    torch.cuda.synchronize()
    want = work.copies()
    work.spoil()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    run = calls.run_of(work.out, "cuda:mma", stream=stream)
    call = calls.prepared("forward", work.attention, calls.forward_tensors(work.out, work.lse), run)
    other = driver.another_context()
    try:
        driver.call("cuCtxSetCurrent", other)
        call()
        assert driver.current() == other.value
    finally:
        driver.attach()
        driver.call("cuCtxDestroy_v2", other)
    torch.cuda.synchronize()
    same(work.results(), want, ["out", "lse"])
