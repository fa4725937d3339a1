"""Bad input: the status, the argument and the value that the message names; nothing is written."""

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from selection import host_backends
from solve import normal

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 5, 7, 8, 6
WHOLE = (B, HQ, SQ, SK)


def arguments():
    """A valid call: attention's fields, outputs, and backward's."""
    q, out = normal(B, HQ, SQ, D, type="f32"), normal(B, HQ, SQ, DV, type="f32")
    fields = {"q": q, "k": normal(B, HKV, SK, D, type="f32"),
              "v": normal(B, HKV, SK, DV, type="f32"), "bias": normal(1, HQ, 1, SK, type="f32"),
              "sink": np.zeros(HQ, np.float32)}
    gradients = {"d" + name: x.copy() for name, x in fields.items()}
    return fields, {"out": out, "lse": np.zeros((B, HQ, SQ), np.float32)}, gradients | {
        "dout": out.copy(), "dlse": np.zeros((B, HQ, SQ), np.float32)}


def packed_arguments():
    fields = {"q": normal(9, HQ, D), "k": normal(12, HKV, D), "v": normal(12, HKV, DV),
              "cu_seqlens_q": np.array([0, 4, 9], np.int32), "max_seqlen_q": 5,
              "cu_seqlens_k": np.array([0, 7, 12], np.int32), "max_seqlen_k": 7}
    return fields, {"out": normal(9, HQ, DV), "lse": np.zeros((HQ, 9))}


def expect(call, argument, *words, status="invalid_argument", watched=()):
    before = [array.tobytes() for array in watched]
    with pytest.raises(regard.RegardError) as caught:
        call()
    error = caught.value
    assert (error.status, error.argument) == (status, argument), str(error)
    assert str(error).startswith(f"{argument} = {error.value}: "), str(error)
    for word in words:
        assert word in str(error), str(error)
    assert [array.tobytes() for array in watched] == before, "something was written"


def overlapping(*shape):
    return np.lib.stride_tricks.as_strided(np.zeros(4096, np.float32), shape, (4,) * len(shape))


def f32(*shape):
    return np.zeros(shape, np.float32)


def i32(*shape):
    return np.zeros(shape, np.int32)


def without_data(array):
    """The array's tensor with a null pointer."""
    result = regard.tensor(array)
    result.data = None
    return result


def unaligned(array):
    room = np.zeros(array.nbytes + 1, np.uint8)
    return room[1:].view(array.dtype).reshape(array.shape)


def changed(tensor, **fields):
    result = regard.tensor(tensor)
    for name, value in fields.items():
        if name in ("sizes", "strides"):
            getattr(result, name)[value[0]] = value[1]
        else:
            setattr(result, name, value)
    return result


Q, K, V, OUT = f32(B, HQ, SQ, D), f32(B, HKV, SK, D), f32(B, HKV, SK, DV), f32(B, HQ, SQ, DV)
LSE = f32(B, HQ, SQ)

# What replaces fields of a valid attention; the argument that the error names; words of the text.
ATTENTION = {
    "q missing": ({"q": None}, "q", "must be given"),
    "k missing": ({"k": None}, "k", "must be given"),
    "v missing": ({"v": None}, "v", "must be given"),
    "q null": ({"q": without_data(Q)}, "q", "null"),
    "k null": ({"k": without_data(K)}, "k", "null"),
    "v null": ({"v": without_data(V)}, "v", "null"),
    "bias null": ({"bias": without_data(f32(SK))}, "bias", "null"),
    "sink null": ({"sink": without_data(f32(HQ))}, "sink", "null"),
    "q unaligned": ({"q": unaligned(Q)}, "q", "aligned"),
    "q of i32": ({"q": Q.astype(np.int32)}, "q", "i32 [2, 4, 5, 8]", "f64, f32, f16 or bf16"),
    "q of bool": ({"q": Q.astype(bool)}, "q", "bool [2, 4, 5, 8]"),
    "k of another type": ({"k": K.astype(np.float64)}, "k", "f64 [2, 2, 7, 8]", "q's type"),
    "v of another type": ({"v": V.astype(np.float16)}, "v", "f16 [2, 2, 7, 6]", "q's type"),
    "q of rank 3": ({"q": Q[0]}, "q", "[4, 5, 8]"),
    "q of rank 5": ({"q": changed(Q, rank=5)}, "q.rank", "5"),
    "q of rank -1": ({"q": changed(Q, rank=-1)}, "q.rank", "-1"),
    "q of a negative size": ({"q": changed(Q, sizes=(2, -5))}, "q", "-5", "negative"),
    "q of a huge size": ({"q": changed(Q, sizes=(2, 2**31))}, "q", "2147483648"),
    "q of an overflowing stride": ({"q": changed(Q, strides=(0, 2**62))}, "q", str(2**62)),
    "type 7": ({"q": changed(Q, type=7)}, "q.type", "7"),
    "type -1": ({"bias": changed(Q, type=-1)}, "bias.type", "-1"),
    "last stride 2": ({"k": f32(B, HKV, SK, 2 * D)[..., ::2]}, "k", "last stride"),
    "head sizes differ": ({"k": f32(B, HKV, SK, D + 1)}, "k", "head size"),
    "head size 0": ({"q": f32(B, HQ, SQ, 0), "k": f32(B, HKV, SK, 0)}, "q", "at least 1"),
    "value size 0": ({"v": f32(B, HKV, SK, 0)}, "v", "at least 1"),
    "no heads": ({"q": f32(B, 0, SQ, D)}, "q", "at least one head"),
    "no kv heads": ({"k": f32(B, 0, SK, D), "v": f32(B, 0, SK, DV)}, "k", "multiple"),
    "heads that do not divide": ({"k": f32(B, 3, SK, D), "v": f32(B, 3, SK, DV)}, "k", "multiple"),
    "v with other heads": ({"v": f32(B, HQ, SK, DV)}, "v", "heads"),
    "v with another length": ({"v": f32(B, HKV, SK + 1, DV)}, "v"),
    "k with another batch": ({"k": f32(3, HKV, SK, D)}, "k", "batch"),
    "bias of i32": ({"bias": np.zeros(SK, np.int32)}, "bias", "i32 [7]"),
    "bias too wide": ({"bias": f32(SK + 1)}, "bias", "[8]", "broadcast"),
    "bias with another head count": ({"bias": f32(1, HKV, SQ, SK)}, "bias", "broadcast"),
    "mask of f32": ({"mask": f32(*WHOLE)}, "mask", "bool"),
    "mask too long": ({"mask": np.ones((SQ + 1, SK), bool)}, "mask", "broadcast"),
    "row_spans of f32": ({"row_spans": f32(SQ, 2)}, "row_spans", "i32"),
    "row_spans of keys": ({"row_spans": i32(SK, 2)}, "row_spans", "broadcast"),
    "key_spans of rows": ({"key_spans": i32(SQ, 2)}, "key_spans", "broadcast"),
    "half a span": ({"row_spans": i32(SQ, 3)}, "row_spans", "1 to 8 spans"),
    "no span": ({"row_spans": i32(SQ, 0)}, "row_spans", "1 to 8 spans"),
    "nine spans": ({"key_spans": i32(SK, 18)}, "key_spans", "1 to 8 spans"),
    "spans of kv heads": ({"key_spans": i32(1, HKV, SK, 2)}, "key_spans", "broadcast"),
    "spans apart": ({"row_spans": i32(SQ, 4)[:, ::2]}, "row_spans", "last stride"),
    "alibi of f64": ({"alibi_slopes": np.zeros(HQ)}, "alibi_slopes", "f32"),
    "alibi of kv heads": ({"alibi_slopes": f32(HKV)}, "alibi_slopes", "4 heads"),
    "alibi of another batch": ({"alibi_slopes": f32(3, HQ)}, "alibi_slopes"),
    "alibi of rank 3": ({"alibi_slopes": f32(1, B, HQ)}, "alibi_slopes"),
    "sink of f64": ({"sink": np.zeros(HQ)}, "sink", "f32"),
    "sink of kv heads": ({"sink": f32(HKV)}, "sink", "4 heads"),
    "sink of rank 2": ({"sink": f32(B, HQ)}, "sink"),
    "scale nan": ({"scale": np.nan}, "scale", "nan", "finite"),
    "scale inf": ({"scale": np.inf}, "scale", "inf", "finite"),
    "softcap nan": ({"softcap": np.nan}, "softcap", "nan"),
    "softcap inf": ({"softcap": np.inf}, "softcap", "inf"),
    "softcap negative": ({"softcap": -1.5}, "softcap", "-1.5"),
    "dropout nan": ({"dropout": (np.nan, 0, 0)}, "dropout_p", "nan"),
    "dropout 1": ({"dropout": (1.0, 0, 0)}, "dropout_p", "= 1:"),
    "dropout negative": ({"dropout": (-0.25, 0, 0)}, "dropout_p", "-0.25"),
    "window left": ({"window": (-2, 0)}, "window_left", "-2"),
    "window right": ({"window": (0, -9)}, "window_right", "-9"),
    "causal": ({"causal": 3}, "causal", "3"),
    "precision": ({"precision": 3}, "precision", "3"),
    "max_seqlen_q": ({"max_seqlen_q": 5}, "max_seqlen_q", "5", "packed"),
    "max_seqlen_k": ({"max_seqlen_k": 7}, "max_seqlen_k", "7", "packed"),
    "seqused of i64": ({"seqused_q": f32(B)}, "seqused_q", "i32"),
    "seqused of another batch": ({"seqused_q": np.zeros(3, np.int32)}, "seqused_q", "2 elements"),
    "seqused null": ({"seqused_k": without_data(np.zeros(B, np.int32))}, "seqused_k", "null"),
    "seqused negative": ({"seqused_k": np.array([3, -1], np.int32)}, "seqused_k[1]", "-1"),
    "seqused too long": ({"seqused_q": np.array([6, 1], np.int32)}, "seqused_q[0]", "= 6:", "5"),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_bad_attention(name):
    replaced, argument, *words = ATTENTION[name]
    fields, outputs, gradients = arguments()
    attention = regard.Attention(**(fields | replaced))
    expect(lambda: regard.forward(attention, **outputs), argument, *words,
           watched=outputs.values())
    dout, dlse = gradients.pop("dout"), gradients.pop("dlse")
    expect(lambda: regard.backward(attention, **outputs, dout=dout, dlse=dlse, gradients=gradients),
           argument, *words, watched=gradients.values())
    if "null" in name or "unaligned" in name or name.startswith("seqused "):
        return  # shapes alone are looked at below
    for which in ("forward", "backward"):
        expect(lambda: regard.explain(attention, which), argument, *words)
        expect(lambda: regard.workspace(attention, which), argument, *words)


def i32(*values):
    return np.array(values, np.int32)


PACKED = {
    "k's alone": ({"cu_seqlens_q": None}, "cu_seqlens_q", "must be given"),
    "q's alone": ({"cu_seqlens_k": None}, "cu_seqlens_k", "must be given"),
    "of f32": ({"cu_seqlens_q": f32(3)}, "cu_seqlens_q", "i32"),
    "of rank 2": ({"cu_seqlens_q": i32([0, 4, 9])}, "cu_seqlens_q"),
    "empty": ({"cu_seqlens_q": i32(), "cu_seqlens_k": i32()}, "cu_seqlens_q"),
    "null": ({"cu_seqlens_q": without_data(i32(0, 4, 9))}, "cu_seqlens_q", "null"),
    "of another batch": ({"cu_seqlens_k": i32(0, 7, 9, 12)}, "cu_seqlens_k", "3 elements"),
    "strided": ({"cu_seqlens_q": i32(0, 0, 4, 4, 9, 9)[::2]}, "cu_seqlens_q", "stride"),
    "negative": ({"cu_seqlens_q": i32(-1, 4, 9)}, "cu_seqlens_q[0]", "-1"),
    "decreasing": ({"cu_seqlens_q": i32(0, 4, 3)}, "cu_seqlens_q[2]", "= 3:", "4"),
    "past the end": ({"cu_seqlens_k": i32(0, 6, 13)}, "cu_seqlens_k[2]", "= 13:", "12"),
    "over max_seqlen_q": ({"max_seqlen_q": 4}, "cu_seqlens_q[2]", "= 9:", "4"),
    "max_seqlen negative": ({"max_seqlen_k": -1}, "max_seqlen_k", "-1"),
    "max_seqlen over the rows": ({"max_seqlen_q": 10}, "max_seqlen_q", "10"),
    "q of rank 4": ({"q": np.zeros((1, 9, HQ, D))}, "q", "(total, heads, size)"),
    "used over its sequence": ({"seqused_q": i32(5, 1)}, "seqused_q[0]", "= 5:", "4"),
    "bias over max_seqlen": ({"bias": f32(5, 12)}, "bias", "broadcast"),
}


@pytest.mark.parametrize("name", PACKED)
def test_bad_packed(name):
    replaced, argument, *words = PACKED[name]
    fields, outputs = packed_arguments()
    regard.forward(regard.Attention(**fields), **outputs)
    attention = regard.Attention(**(fields | replaced))
    expect(lambda: regard.forward(attention, **outputs), argument, *words,
           watched=outputs.values())


OUTPUTS = {
    "out missing": ({"out": None}, "out", "must be given"),
    "out null": ({"out": without_data(OUT)}, "out", "null"),
    "out of f16": ({"out": OUT.astype(np.float16)}, "out", "must be f32"),
    "out as q": ({"out": f32(B, HQ, SQ, D)}, "out", "[2, 4, 5, 6]"),
    "out of rank 3": ({"out": OUT[0]}, "out"),
    "out overlaps": ({"out": overlapping(B, HQ, SQ, DV)}, "out", "overlap"),
    "out last stride": ({"out": f32(B, HQ, SQ, 2 * DV)[..., ::2]}, "out", "last stride"),
    "out broadcast": ({"out": np.broadcast_to(f32(SQ, DV), OUT.shape)}, "out", "overlap"),
    "out unaligned": ({"out": unaligned(OUT)}, "out", "aligned"),
    "lse null": ({"lse": without_data(LSE)}, "lse", "null"),
    "lse of f64": ({"lse": LSE.astype(np.float64)}, "lse", "f32"),
    "lse of another shape": ({"lse": f32(B, HQ, SQ + 1)}, "lse", "[2, 4, 5]"),
    "lse overlaps": ({"lse": overlapping(B, HQ, SQ)}, "lse", "overlap"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_bad_outputs(name):
    replaced, argument, *words = OUTPUTS[name]
    fields, outputs, _ = arguments()
    watched = list(outputs.values())
    expect(lambda: regard.forward(regard.Attention(**fields), **(outputs | replaced)), argument,
           *words, watched=watched)


BACKWARD = {
    "out missing": ({"out": None}, "out", "must be given"),
    "lse missing": ({"lse": None}, "lse", "must be given"),
    "dout missing": ({"dout": None}, "dout", "must be given"),
    "dout of f64": ({"dout": OUT.astype(np.float64)}, "dout", "f64", "must be f32"),
    "dout null": ({"dout": without_data(OUT)}, "dout", "null"),
    "dout as q": ({"dout": Q}, "dout", "[2, 4, 5, 6]"),
    "dlse of f64": ({"dlse": LSE.astype(np.float64)}, "dlse", "f32"),
    "dlse of another shape": ({"dlse": f32(HQ, SQ)}, "dlse"),
    "dq as out": ({"dq": OUT.copy()}, "dq", "[2, 4, 5, 8]"),
    "dk of query heads": ({"dk": f32(B, HQ, SK, D)}, "dk", "[2, 2, 7, 8]"),
    "dv of f16": ({"dv": V.astype(np.float16)}, "dv", "must be f32"),
    "dq null": ({"dq": without_data(Q)}, "dq", "null"),
    "dq overlaps": ({"dq": overlapping(B, HQ, SQ, D)}, "dq", "overlap"),
    "dk overlaps": ({"dk": overlapping(B, HKV, SK, D)}, "dk", "overlap"),
    "dbias unreduced": ({"dbias": f32(*WHOLE)}, "dbias", "[1, 4, 1, 7]"),
    "dbias of f16": ({"dbias": np.zeros((1, HQ, 1, SK), np.float16)}, "dbias", "bias's type"),
    "dbias overlaps": ({"dbias": overlapping(1, HQ, 1, SK)}, "dbias", "overlap"),
    "dsink of f64": ({"dsink": np.zeros(HQ)}, "dsink", "f32"),
    "dsink of kv heads": ({"dsink": f32(HKV)}, "dsink", "4 heads"),
    "dsink overlaps": ({"dsink": np.broadcast_to(f32(1), (HQ,))}, "dsink", "overlap"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_bad_backward(name):
    replaced, argument, *words = BACKWARD[name]
    fields, outputs, gradients = arguments()
    given = outputs | gradients
    watched = [given[key] for key in ("dq", "dk", "dv", "dbias", "dsink")]
    given |= replaced
    inputs = {key: given.pop(key) for key in ("out", "lse", "dout", "dlse")}
    expect(lambda: regard.backward(regard.Attention(**fields), **inputs, gradients=given),
           argument, *words, watched=watched)


@pytest.mark.parametrize("name, needs", [("dbias", "bias"), ("dsink", "sink")])
def test_gradient_of_what_is_not_there(name, needs):
    fields, outputs, gradients = arguments()
    fields.pop(needs)
    dout = gradients.pop("dout")
    expect(lambda: regard.backward(regard.Attention(**fields), **outputs, dout=dout,
                                   gradients={name: gradients[name]}), name, "needs a " + needs)


@pytest.mark.parametrize("output, other", [("dk", "k"), ("dq", "q"), ("dv", "dout"), ("dq", "dk"),
                                           ("dbias", "bias"), ("dsink", "sink"), ("dq", "lse")])
def test_an_output_on_top_of_another_tensor(output, other):
    fields, outputs, gradients = arguments()
    everything = fields | outputs | gradients
    shape = everything[output].shape
    shared = np.zeros(4096, np.float32)
    for name in (output, other):
        size = everything[name].size
        view = shared[:size].reshape(everything[name].shape)
        for group in (fields, outputs, gradients):
            if name in group:
                group[name] = view
    assert shape == (fields | outputs | gradients)[output].shape
    dout, dlse = gradients.pop("dout"), gradients.pop("dlse")
    with pytest.raises(regard.RegardError) as caught:
        regard.backward(regard.Attention(**fields), **outputs, dout=dout, dlse=dlse,
                        gradients=gradients)
    assert caught.value.argument in (output, other) and "memory" in str(caught.value)


RUNS = {
    "unknown backend": ({"backend": "abacus"}, "backend", "abacus"),
    "unknown isa": ({"backend": "cpu:mmx"}, "backend", "cpu:mmx"),
    "negative threads": ({"threads": -1}, "threads", "-1"),
    "device 3": ({"device": 3}, "device", "3"),
}


@pytest.mark.parametrize("name", RUNS)
def test_bad_run(name):
    replaced, argument, *words = RUNS[name]
    fields, outputs, gradients = arguments()
    attention = regard.Attention(**fields)
    with pytest.raises(regard.RegardError) as caught:
        regard.forward(attention, **outputs, **replaced)
    error = caught.value
    assert error.argument == argument and error.status != "internal", str(error)
    assert all(word in str(error) for word in words), str(error)
    try:  # an explanation may be refused, or say that this cannot run
        text, numbers = regard.explain(attention, "backward", **replaced)
    except regard.RegardError as refused:
        assert refused.argument == argument
    else:
        assert not numbers.supported, text


@pytest.mark.parametrize("device", ["cuda", "chip"])
def test_a_device_that_is_not_there_is_not_silently_the_cpu(device):
    fields, outputs, _ = arguments()
    before = outputs["out"].tobytes()
    with pytest.raises(regard.RegardError) as caught:
        regard.forward(regard.Attention(**fields), **outputs, device=regard.DEVICE[device],
                       device_index=99, device_name=b"sm_80")
    assert caught.value.status in ("unavailable", "unsupported", "invalid_argument")
    assert caught.value.argument.startswith("device"), str(caught.value)
    assert outputs["out"].tobytes() == before


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0, np.nan, np.inf])
def test_bad_probability(p):
    with pytest.raises(regard.RegardError) as caught:
        regard.dropout_probability(p)
    assert caught.value.status == "invalid_argument" and "p" in caught.value.argument


KEEP = {
    "missing": None, "of u8 type": f32(*WHOLE), "too small": np.zeros((B, HQ, SQ, SK - 1), bool),
    "of rank 3": np.zeros(WHOLE[1:], bool), "null": without_data(np.zeros(WHOLE, bool)),
    "overlapping": np.broadcast_to(np.zeros((1, HQ, SQ, SK), bool), WHOLE),
}


@pytest.mark.parametrize("name", KEEP)
def test_bad_keep(name):
    fields, _, _ = arguments()
    keep = KEEP[name]
    keep = regard.Tensor() if keep is None else keep
    keep = regard.tensor(keep) if isinstance(keep, np.ndarray) else keep
    attention = regard.Attention(**fields, dropout=(0.5, 0, 0))
    status = regard.C.regard_dropout_mask(attention, keep)
    assert regard.RegardError(status).status == "invalid_argument"
    assert regard.RegardError(status).argument == "keep"


def test_every_backend_has_a_name_and_a_note():
    names = regard.backends(available=False)
    assert len(names) == len(set(names)) and "reference" in names
    for index, _ in enumerate(names):
        assert regard.C.regard_backend_note(index)


def test_unavailable_backends_say_so():
    fields, outputs, _ = arguments()
    for name in set(regard.backends(available=False)) - set(regard.backends()):
        with pytest.raises(regard.RegardError) as caught:
            regard.forward(regard.Attention(**fields), **outputs, backend=name)
        assert caught.value.status == "unavailable" and caught.value.argument == "backend"


def test_explanations():
    case = cases.make(("grouped", "bottom_right"), "f32")
    for backend in host_backends():
        for which in ("forward", "backward"):
            text, numbers = regard.explain(case.attention(), which, backend=backend)
            assert text.endswith("\n") and numbers.supported == 1
            assert numbers.pairs == 2 * 4 * sum(min(39, i + 19) for i in range(21))
            dims = 2 * (16 + 16) if which == "forward" else 2 * (3 * 16 + 2 * 16)
            assert numbers.flops == dims * numbers.pairs
            assert numbers.workspace == regard.workspace(case.attention(), which, backend=backend)
