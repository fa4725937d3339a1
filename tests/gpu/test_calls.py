"""How the library behaves as a guest on a GPU: errors, workspaces, threads, streams, repeats."""

import ctypes
import threading

import numpy as np
import pytest

import cases
import device
import regard_ctypes as regard
from solve import normal, problem, same_bits, solve

TYPES = ["f64", "f32", "bf16", "f16"]
needs_gpu = pytest.mark.skipif("device.is_host()", reason="needs a GPU")


def a_case(type="bf16", **base):
    features = ("grouped", "bias_head", "sink", "bottom_right", "dlse", "mask_keys")
    case = cases.make(features, type, **({"sizes": (90, 210), "dim": 64} | base))
    case.options["deterministic"] = 1
    return case


# ----------------------------------------------------------------------------------------- errors


@needs_gpu
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "sink", "out", "lse"])
def test_a_host_pointer_is_named(name):
    case = a_case()
    device.STATE.on_host = frozenset({name})
    with pytest.raises(regard.RegardError) as caught:
        cases.run(case, "cuda:mma")
    error = caught.value
    assert error.argument == name and error.status == "invalid_argument", str(error)
    assert "host" in str(error)


@needs_gpu
@pytest.mark.parametrize("name", ["dout", "dlse", "dq", "dk", "dv", "dbias", "dsink"])
def test_a_host_pointer_is_named_backward(name):
    case = a_case()
    device.STATE.on_host = frozenset({name})
    with pytest.raises(regard.RegardError) as caught:
        cases.run(case, "cuda:mma")
    assert caught.value.argument == name, str(caught.value)


@needs_gpu
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_a_host_table_of_sequences_is_named(name):
    case = cases.make(("packed", "seqused"), "bf16")
    device.STATE.on_host = frozenset({name})
    with pytest.raises(regard.RegardError) as caught:
        cases.run(case, "cuda:mma")
    assert caught.value.argument == name, str(caught.value)


REFUSED = {
    "another GPU": ({"device_index": 99}, "device", "unavailable"),
    "a negative GPU": ({"device_index": -1}, "device", None),
    "unknown family": ({"backend": "cuda:abacus"}, "backend", None),
    "unknown part of a tile": ({"backend": "cuda:mma@columns=3"}, "backend", None),
    "a CPU's backend": ({"backend": "cpu:avx2"}, "backend", None),
    "an impossible tile": ({"backend": "cuda:mma@rows=48,keys=48,warps=5"}, "backend",
                           "unsupported"),
    "too little shared memory": ({"backend": "cuda:mma/1"}, "backend", "unsupported"),
    "types that old chips lack": ({"backend": "cuda:mma75"}, "backend", "unsupported"),
}


@needs_gpu
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    how, argument, status = REFUSED[name]
    with pytest.raises(regard.RegardError) as caught:
        cases.run(a_case(), **({"backend": "cuda:mma"} | how))
    error = caught.value
    assert error.argument == argument, str(error)
    assert error.status == status or status is None and error.status != "internal", str(error)


@needs_gpu
def test_f64_has_no_tensor_cores():
    with pytest.raises(regard.RegardError) as caught:
        cases.run(a_case("f64"), "cuda:mma")
    assert caught.value.status == "unsupported" and caught.value.argument == "backend"
    cases.compare(case := a_case("f64"), cases.run(case, "cuda"))  # chosen freely: simt


@needs_gpu
def test_the_default_is_the_gpu_s_best():
    case = a_case()
    for backend in ("", "cuda"):
        cases.compare(case, cases.run(case, backend))
        _, numbers = regard.explain(case.attention(), "forward", backend=backend)
        assert numbers.supported and numbers.backend.decode().startswith("cuda:mma"), (
            numbers.backend)


@needs_gpu
@pytest.mark.alone
def test_out_of_memory_is_said_and_nothing_written():
    """A workspace of 1 GB on a card that has less left; the tensors themselves are small."""
    machine, rows, dim = device.STATE.driver, 2**21, 128
    stream = machine.stream()
    dq = machine.allocate(2 * rows * dim)
    small = machine.allocate(8 * rows)
    held = []

    def tensor(address, type, sizes, strides):
        result = regard.Tensor(address, type, len(sizes))
        result.sizes[: len(sizes)], result.strides[: len(sizes)] = sizes, strides
        return result

    many = tensor(small, regard.BF16_CODE, [1, 1, rows, dim], [0, 0, 0, 1])  # one row, repeated
    keys = tensor(small, regard.BF16_CODE, [1, 1, 256, dim], [0, 0, dim, 1])
    out_dq = tensor(dq, regard.BF16_CODE, [1, 1, rows, dim], [rows * dim, rows * dim, dim, 1])
    lse = tensor(small, regard.F32, [1, 1, rows], [0, rows, 1])
    try:
        machine.fill(dq, 0x5A, 2 * rows * dim, stream)
        machine.fill(small, 0, 8 * rows, stream)
        machine.wait(stream)
        size = 1 << 36
        while size >= 1 << 26:
            try:
                if machine.free_bytes() < size:
                    raise MemoryError
                held.append(machine.allocate(size))
            except (MemoryError, device.driver.CudaError):
                size //= 2
        attention = regard.Attention(many, keys, keys)
        tensors = regard.BackwardTensors(out=many, lse=lse, dout=many, dq=out_dq)
        run = regard.Run("cuda:mma", device=1, stream=stream)
        status = regard.C.regard_backward(attention, tensors, run)
        error = regard.RegardError(status)
        got = np.zeros(4096, np.uint8)
        machine.download(got, dq, stream)
        assert error.status == "out_of_memory", str(error)
        assert (got == 0x5A).all()
    finally:
        for address in [*held, dq, small]:
            machine.free(address)
    case = a_case()
    cases.compare(case, cases.run(case, "cuda:mma"))  # and life goes on


# ------------------------------------------------------------------------------------- workspaces


@pytest.mark.parametrize("type", TYPES)
def test_the_library_s_own_workspace_gives_the_same_bits(type, backend):
    case = a_case(type)
    want = cases.run(case, backend)
    device.STATE.own_workspace = False
    same_bits(cases.run(case, backend), want)
    case = cases.make((), type, batch=1, heads=(4, 1), sizes=(2, 3000), dim=64)  # split keys
    got = cases.run(case, backend)
    cases.compare(case, got)
    device.STATE.own_workspace = True
    same_bits(cases.run(case, backend), got, ["out", "lse"])


@needs_gpu
@pytest.mark.parametrize("fault", ["short", "unaligned", "host", "null"])
def test_a_bad_workspace_is_refused(fault):
    case, machine = a_case(), device.STATE.driver
    attention = case.attention()
    size = regard.workspace(attention, "backward", backend="cuda:mma")
    assert size > 0
    memory = machine.allocate(size + 512)
    host = np.zeros(size + 512, np.uint8)
    given = {"short": (memory, 256), "unaligned": (memory + 16, size),
             "host": (host.ctypes.data + -host.ctypes.data % 256, size), "null": (0, size)}[fault]
    results = cases.run(case, "cuda:mma")
    gradients = {name: x for name, x in results.items() if name not in ("out", "lse")}
    try:
        with pytest.raises(regard.RegardError) as caught:
            regard.backward(attention, results["out"], results["lse"], case.dout, case.dlse,
                            gradients=gradients, backend="cuda:mma",
                            workspace=ctypes.c_void_p(given[0]), workspace_size=given[1])
    finally:
        machine.free(memory)
    assert caught.value.argument.startswith("workspace"), str(caught.value)


@needs_gpu
def test_explanations_need_no_data():
    attention = a_case().attention()
    for name in ("q", "k", "v", "bias", "sink", "mask"):
        getattr(attention, name).data = None
    for which in ("forward", "backward"):
        text, numbers = regard.explain(attention, which, backend="cuda:mma")
        assert numbers.supported and numbers.kernel and text.endswith("\n")
        assert numbers.workspace == regard.workspace(attention, which, backend="cuda:mma")


# ------------------------------------------------------------------------------- streams, threads


@needs_gpu
@pytest.mark.parametrize("handle", [None, 1, 2], ids=["null", "legacy", "per thread"])
def test_default_streams(handle, backend):
    case = a_case("bf16", sizes=(300, 400))
    want = cases.run(case, backend)
    same_bits(cases.run(case, backend, stream=ctypes.c_void_p(handle)), want)


def test_different_problems_in_many_threads(backend):
    """Kernels that are compiled, loaded and run at the same time by eight threads."""
    features = [(), ("top_left",), ("softcap",), ("alibi",), ("bias_keys",), ("window",), ("sink",),
                ("dropout",)]
    made = [cases.make(one, "bf16", sizes=(130, 170), dim=48) for one in features]
    for case in made:
        assert case.truth and case.unfused and case.size
    failures = []

    def work(case):
        try:
            device.STATE.driver.attach()
            for _ in range(3):
                cases.compare(case, cases.run(case, backend))
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures[0]


# ---------------------------------------------------------------------------------------- repeats


@pytest.mark.parametrize("type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("features", [
    ("bottom_right", "grouped"), ("bias_head", "sink"), ("packed", "top_left"),
    ("bias_batch", "dropout", "mask_keys")], ids="+".join)
def test_deterministic_runs_are_bitwise_the_same(features, type, backend):
    case = cases.make(features, type, sizes=(330, 410), dim=64)
    case.options["deterministic"] = 1
    want = cases.run(case, backend)
    cases.compare(case, want)
    for _ in range(5 if device.is_host() else 40):
        same_bits(cases.run(case, backend), want)


@pytest.mark.parametrize("type", ["f32", "bf16", "f16"])
def test_forward_is_always_bitwise_the_same(type, backend):
    case = cases.make(("bottom_right", "sink"), type, sizes=(330, 410), dim=64)
    want = cases.run(case, backend)
    for _ in range(10):
        same_bits(cases.run(case, backend), want, ["out", "lse", "dk", "dv"])


@pytest.mark.parametrize("type", ["f32", "bf16"])
@pytest.mark.parametrize("features", [("bias_head", "sink"), ("grouped", "top_left")], ids="+".join)
def test_accumulated_gradients(features, type, backend):
    """Twice into the same tensors is twice as much, to rounding."""
    case = cases.make((*features, "accumulate", "f32_outputs"), type, sizes=(130, 170), dim=64)
    cases.compare(case, cases.run(case, backend))


# ---------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_dropout_mask_bit_for_bit(heads, type, backend):
    """Equal scores, and the identity as v (then as dout), show which pairs are kept."""
    batch, rows, columns, dim = 2, 150, 300, 64
    dropout = (0.3, 0x123456789ABCDEF0, 77)
    q = regard.store(np.zeros((batch, heads[0], rows, dim)), regard.DTYPES[type])
    k = normal(batch, heads[1], columns, dim, type=type)
    keep = np.zeros((batch, heads[0], rows, columns), bool)
    regard.dropout_mask(regard.Attention(q, k, k, dropout=dropout), keep)
    for begin in range(0, columns, dim):
        v = np.zeros((batch, heads[1], columns, dim))
        part = np.arange(begin, min(begin + dim, columns))
        v[:, :, part, part - begin] = 1
        got = solve(q, k, regard.store(v, regard.DTYPES[type]), backend=backend, dropout=dropout)
        seen = regard.load(got["out"])[..., : len(part)] != 0
        assert np.array_equal(seen, keep[..., part])
    for begin in range(0, rows, dim):
        dout = np.zeros((batch, heads[0], rows, dim))
        part = np.arange(begin, min(begin + dim, rows))
        dout[:, :1, part, part - begin] = 1  # one query head of the first kv head
        got = solve(q, k, regard.store(np.zeros_like(v), regard.DTYPES[type]),
                    regard.store(dout, regard.DTYPES[type]), backend=backend, dropout=dropout)
        seen = regard.load(got["dv"])[:, 0, :, : len(part)] != 0
        assert np.array_equal(seen, keep[:, 0][:, part].swapaxes(1, 2))


# ------------------------------------------------------------------------------------------ tiles

TILES = {
    "forward": ["rows=128,keys=64,warps=4", "rows=128,keys=32,warps=8", "rows=64,keys=64,warps=4",
                "rows=64,keys=128,warps=4", "rows=64,keys=32,warps=2", "rows=32,keys=32,warps=2",
                "rows=16,keys=64,warps=1,stages=1", "rows=64,keys=32,warps=8,slices=2",
                "rows=256,keys=64,warps=8", "rows=128,keys=128,warps=8"],
    "backward": ["rows=64,keys=128,warps=8", "rows=32,keys=128,warps=8", "rows=64,keys=64,warps=4",
                 "rows=32,keys=64,warps=4,stages=1", "rows=64,keys=64,warps=8,slices=2",
                 "rows=128,keys=128,warps=8", "rows=32,keys=32,warps=2",
                 "rows=64,keys=128,warps=4,slices=1", "rows=64,keys=32,warps=4,slices=2"],
}


@needs_gpu
@pytest.mark.parametrize("type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("which", TILES)
def test_forced_tiles(which, type):
    """A tile changes a result by rounding only; one that does not fit is refused."""
    case = cases.make(("bottom_right", "grouped"), type, sizes=(200, 330), dim=64)
    good = cases.run(case, "cuda:mma")
    ran = 0
    for index, tile in enumerate(TILES[which]):
        if index % 3 != ["f32", "bf16", "f16"].index(type) and type != "bf16":
            continue
        backend = "cuda:mma@" + tile
        results = {name: cases.sentinel(x.shape, x.dtype) for name, x in good.items()}
        try:
            if which == "forward":
                regard.forward(case.attention(), results["out"], results["lse"], backend=backend)
                results = {name: results[name] for name in ("out", "lse")}
            else:
                results |= {name: good[name] for name in ("out", "lse")}
                gradients = {name: results[name] for name in ("dq", "dk", "dv")}
                regard.backward(case.attention(), results["out"], results["lse"], case.dout,
                                gradients=gradients, backend=backend)
        except regard.RegardError as error:
            assert error.status == "unsupported" and error.argument == "backend", str(error)
            continue
        ran += 1
        cases.compare(case, results)
    assert ran >= 1, "no tile could run"


def test_two_problems_do_not_disturb_each_other(backend):
    """A small problem after a large one in the same memory, and again."""
    large = problem(2, 4, 2, 300, 400, 64, type="bf16")
    small = problem(1, 2, 2, 33, 65, 64, type="bf16")
    want = solve(**small, backend=backend, deterministic=1)
    for _ in range(3):
        solve(**large, backend=backend, deterministic=1)
        same_bits(solve(**small, backend=backend, deterministic=1), want)
