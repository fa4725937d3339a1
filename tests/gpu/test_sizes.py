"""Head sizes, lengths, layouts and head counts that tiles do not fit, against the oracle."""

import numpy as np
import pytest

import cases
import device
import regard_ctypes as regard
from solve import normal, same_bits, solve

TYPES = ["f64", "f32", "bf16", "f16"]
# (D, Dv); each with one type a family, all types for those of ALL_TYPES.
HEAD_SIZES = [(1, 1), (3, 5), (8, 8), (16, 16), (17, 17), (24, 40), (31, 32), (33, 31), (40, 40),
              (48, 64), (63, 65), (64, 64), (64, 128), (72, 72), (80, 80), (96, 96), (100, 36),
              (112, 112), (120, 120), (127, 129), (128, 128), (128, 64), (136, 136), (160, 160),
              (192, 128), (200, 200), (256, 256), (257, 255), (320, 320), (384, 16), (16, 384),
              (511, 512), (512, 512)]
ALL_TYPES = [(64, 64), (128, 128), (192, 128), (200, 200), (256, 256), (17, 17)]


def judge(case, backend, **how):
    cases.compare(case, cases.run(case, backend, **how))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("size", HEAD_SIZES, ids=str)
def test_head_size(size, type, backend):
    if size not in ALL_TYPES:
        types = device.types_of(backend)
        if types[HEAD_SIZES.index(size) % len(types)] != type:
            pytest.skip("another type has this size")
    features = ("bottom_right",) if size in ALL_TYPES or HEAD_SIZES.index(size) % 3 == 0 else ()
    case = cases.make(features, type, sizes=(75, 140), dim=size[0], dim_v=size[1])
    for which in ("forward", "backward"):
        text, numbers = regard.explain(case.attention(), which, backend=backend)
        if not numbers.supported and backend != "cuda:wgmma":  # which device.call follows up
            large = device.STATE.driver.capability() in (80, 90, 100)  # shared memory
            assert backend == "cuda:mma" and max(size) > 256, text
            assert type == "f32" or not large, text
            pytest.skip(f"refused, as it may be: {text}")
    judge(case, backend)


@pytest.mark.parametrize("size", [513, 1000])
def test_a_head_size_that_is_too_large_is_refused(size, backend):
    if device.is_host():
        pytest.skip("the CPU takes any size")
    x = np.zeros((1, 1, 2, size), np.float32)
    with pytest.raises(regard.RegardError) as caught:
        regard.forward(regard.Attention(x, x, x), x.copy(), backend=backend)
    assert caught.value.status in ("unsupported", "unavailable"), str(caught.value)


@pytest.mark.parametrize("type", ["f32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191])
def test_lengths_around_tiles(rows, type, backend):
    """One kernel for all of them."""
    for columns in (1, 16, 63, 64, 65, 128, 200):
        judge(cases.make(("bottom_right",), type, batch=1, sizes=(rows, columns), dim=64), backend)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("layout", ["gaps", "reversed", "stride_0", "bshd"])
@pytest.mark.parametrize("dim", [64, 72])
def test_layouts(dim, layout, type, backend):
    if backend == "cuda:simt" and dim == 72:
        pytest.skip("of the tensor cores' concern")
    judge(cases.make(("grouped", "bias_head"), type, sizes=(70, 150), dim=dim, layout=layout),
          backend)


@pytest.mark.parametrize("type", ["bf16", "f16"])
@pytest.mark.parametrize("dim", [4, 26, 127, 250])
def test_rows_that_end_within_sixteen_bytes(dim, type, backend):
    """What follows them, up to where the next row begins, is not written."""
    judge(cases.make(("grouped", "bottom_right"), type, sizes=(70, 150), dim=dim, layout="padded"),
          backend)


@pytest.mark.parametrize("shift", [1, 2, 4])
@pytest.mark.parametrize("type", ["f32", "bf16", "f16"])
def test_unaligned_pointers(type, shift, backend):
    """Dense tensors that begin a few elements after a multiple of 256 bytes."""
    case = cases.make(("top_left",), type, sizes=(70, 90), dim=64)

    def shifted(array):
        room = cases.sentinel((array.size + shift,), array.dtype)
        view = room[shift:].reshape(array.shape)
        view[...] = array
        return view

    case.inputs = {name: shifted(array) for name, array in case.inputs.items()}
    case.dout = shifted(case.dout)
    judge(case, backend)


# Few queries against many keys: the keys of a head are split over blocks.
DECODE = [  # batch, heads, kv heads, Sq, Sk, D, features
    (1, 1, 1, 1, 9000, 128, ()),
    (1, 8, 1, 1, 5000, 64, ()),
    (2, 8, 2, 1, 2100, 128, ("sink",)),
    (1, 8, 2, 3, 2001, 128, ("bottom_right",)),
    (1, 4, 4, 7, 4096, 64, ("bottom_right", "alibi")),
    (1, 8, 1, 16, 1700, 128, ("bottom_right", "window")),
    (2, 4, 2, 1, 4000, 64, ("mask_keys",)),
    (2, 4, 2, 6, 2000, 256, ("seqused", "softcap")),
    (1, 6, 2, 5, 1500, 40, ("bias_keys",)),
    (1, 2, 2, 1, 2000, 64, ("dropout",)),
    (3, 2, 1, 1, 70, 64, ()),
]


@pytest.mark.parametrize("type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_decode(shape, type, backend):
    batch, heads, heads_kv, rows, columns, dim, features = shape
    turn = (DECODE.index(shape) + ["f32", "bf16", "f16"].index(type)) % 3
    if turn if backend == "cuda:simt" else turn == 2:
        pytest.skip("another type has this shape")
    judge(cases.make(features, type, batch=batch, heads=(heads, heads_kv), sizes=(rows, columns),
                     dim=dim), backend)


@pytest.mark.parametrize("type", ["f32", "bf16"])
@pytest.mark.parametrize("features", [
    ("plain",), ("bottom_right", "grouped"), ("window", "top_left"), ("bias_head", "mask_keys"),
    ("top_left", "sink", "dlse"), ("bottom_right", "dropout")], ids="+".join)
def test_long(features, type, backend):
    """Many tiles each way, with skipped, partial and whole ones."""
    sizes = (517, 1100) if "top_left" not in features else (700, 700)
    judge(cases.make(features, type, batch=1, sizes=sizes, dim=64), backend)


@pytest.mark.parametrize("type", ["bf16"])
@pytest.mark.parametrize("window", [(0, 0), (1, 0), (63, 0), (64, 64), (200, -1), (-1, 5),
                                    (5, 130)], ids=str)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_windows(causal, window, type, backend):
    """Rows and keys that see nothing among them: Sq > Sk and Sq < Sk."""
    for sizes in ((150, 320), (320, 150)):
        case = cases.make((), type, batch=1, heads=(2, 1), sizes=sizes, dim=64, causal=causal,
                          window=window)
        judge(case, backend)


@pytest.mark.parametrize("type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("deterministic", [0, 1])
def test_many_packed_sequences(deterministic, type, backend):
    """Lengths from 0 on, some of them longer than a tile, beside each one alone."""
    lengths_q, lengths_k = [0, 1, 130, 0, 17, 64, 3, 0], [5, 1, 200, 0, 65, 64, 0, 9]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32)
                  for x in (lengths_q, lengths_k))
    total_q, total_k = int(cu_q[-1]), int(cu_k[-1])
    q, dout = normal(total_q, 4, 64, type=type), normal(total_q, 4, 64, type=type, seed=3)
    k, v = normal(total_k, 2, 64, type=type, seed=1), normal(total_k, 2, 64, type=type, seed=2)
    got = solve(q, k, v, dout, backend=backend, causal="bottom_right", cu_seqlens_q=cu_q,
                cu_seqlens_k=cu_k, max_seqlen_q=130, max_seqlen_k=200, deterministic=deterministic)
    for b, (rows, columns) in enumerate(zip(lengths_q, lengths_k)):
        at_q, at_k = np.s_[cu_q[b] : cu_q[b + 1]], np.s_[cu_k[b] : cu_k[b + 1]]

        def alone(x, at):
            return np.ascontiguousarray(x[at].swapaxes(0, 1))[None]

        want = solve(alone(q, at_q), alone(k, at_k), alone(v, at_k), alone(dout, at_q),
                     backend=backend, causal="bottom_right", deterministic=deterministic)
        unit = {"f32": 1e-5, "bf16": 2.0**-6, "f16": 2.0**-8}[type]
        for name, at in (("out", at_q), ("dq", at_q), ("dk", at_k), ("dv", at_k)):
            x, y = regard.load(alone(got[name], at)), regard.load(want[name])
            np.testing.assert_allclose(x, y, rtol=unit, atol=unit, err_msg=f"{name} of {b}")


@pytest.mark.alone
def test_strides_over_2_to_the_31():
    """Batch entries 2^31 + some elements apart: one block of 4.3 GB holds all tensors."""
    if device.is_host():
        pytest.skip("takes a GPU's memory")
    machine = device.STATE.driver
    batch, heads, rows, dim, apart = 2, 2, 100, 64, 2**31 + 2**20
    inputs = {"q": 0, "k": 1, "v": 2, "dout": 3}
    values = {name: normal(batch, heads, rows, dim, type="bf16", seed=seed)
              for name, seed in inputs.items()}
    want = solve(**values, backend="cuda:mma", deterministic=1)
    size = heads * rows * dim  # elements of a batch entry
    base = machine.allocate(2 * (apart + 16 * size))
    stream = machine.stream()
    try:
        def far(place):
            tensor = regard.Tensor(base + 2 * place * size, regard.BF16_CODE, 4)
            tensor.sizes[:] = [batch, heads, rows, dim]
            tensor.strides[:] = [apart, rows * dim, dim, 1]
            return tensor

        names = ["q", "k", "v", "dout", "out", "dq", "dk", "dv"]
        place = {name: far(index) for index, name in enumerate(names)}
        lse = regard.Tensor(base + 2 * 8 * size, regard.F32, 3)
        lse.sizes[:3], lse.strides[:3] = [batch, heads, rows], [heads * rows, rows, 1]
        for name, array in values.items():
            for b in range(batch):
                machine.upload(place[name].data + 2 * b * apart, np.ascontiguousarray(array[b]),
                               stream)
        machine.wait(stream)
        attention = regard.Attention(place["q"], place["k"], place["v"], deterministic=1)
        run = regard.Run("cuda:mma", device=1, stream=stream)
        regard.check(regard.C.regard_forward(
            attention, regard.ForwardTensors(out=place["out"], lse=lse), run))
        tensors = regard.BackwardTensors(lse=lse, **{name: place[name] for name in names[3:]})
        regard.check(regard.C.regard_backward(attention, tensors, run))
        got = {}
        for name in ("out", "dq", "dk", "dv"):
            got[name] = np.empty_like(want[name])
            for b in range(batch):
                part = np.empty_like(got[name][b])
                machine.download(part, place[name].data + 2 * b * apart, stream)
                got[name][b] = part
        same_bits(got, want, list(got))
    finally:
        machine.free(base)
