"""regard.jax.attention and attention_backward against the oracle, in every feature and type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import DEVICES, close, normal, truth, wide_types

import regard
import regard.jax as rj


@pytest.fixture(params=DEVICES, autouse=True)
def device(request):
    with wide_types(request.param):
        yield request.param


def inputs(dtype=jnp.float64, layout="bhsd", len_q=9, len_k=11):
    """q, k, v, dout of two batch entries, four query heads on two."""
    shapes = [(2, 4, len_q, 8), (2, 2, len_k, 8), (2, 2, len_k, 6), (2, 4, len_q, 6)]
    if layout == "bshd":
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    return [normal(n, *shape, dtype=dtype) for n, shape in enumerate(shapes)]


SLOPES = np.float32([0.5, 0.25, 0.125, 0.0625])
SINK = np.float32([0.5, -1, 2, 0])
MASK = np.random.default_rng(8).random((2, 1, 9, 11)) < 0.6
MASK[0, 0, 3] = False  # a row that sees nothing
FEATURES = {
    "plain": {},
    "scale, softcap": {"scale": 0.7, "softcap": 3.0},
    "causal": {"causal": "top_left"},
    "window": {"causal": "bottom_right", "window": (4, -1)},
    "bias": {"bias": np.random.default_rng(5).standard_normal((4, 9, 11))},
    "broadcast bias": {"bias": np.random.default_rng(6).standard_normal((2, 1, 1, 11))},
    "bias of keys": {"bias": np.random.default_rng(7).standard_normal(11)},
    "mask": {"mask": MASK},
    "spans": {"row_spans": np.tile(np.int32([2, 7, 5, 10]), (9, 1)),
              "key_spans": np.tile(np.int32([1, 8]), (2, 1, 11, 1))},
    "alibi": {"alibi_slopes": SLOPES, "causal": "bottom_right"},
    "positions": {"q_positions": np.int32([[34], [30]]), "k_position": 32, "causal": "top_left",
                  "alibi_slopes": SLOPES},
    "sink": {"sink": SINK, "mask": MASK},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**64 - 7},
    "lengths": {"seqused_q": np.int32([9, 5]), "seqused_k": np.int32([4, 11])},
}


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_values_and_gradients_are_the_oracles(options):
    q, k, v, dout = inputs()
    arrays = {name: jnp.asarray(x) for name, x in options.items() if name in ("bias", "sink")}
    fixed = {name: x for name, x in options.items() if name not in arrays}
    dlse = normal(7, 2, 4, 9)
    if "sink" in options or "mask" in options:
        dlse = dlse.at[0, :, 3].set(0)

    def run(q, k, v, arrays):
        return rj.attention(q, k, v, return_lse=True, **arrays, **fixed)

    (out, lse), back = jax.vjp(run, q, k, v, arrays)
    real = truth(q, k, v, dout, dlse, **options)
    if "seqused_q" in options:  # the oracle's "not written"
        real["lse"][1, :, 5:] = -np.inf
    close(out, real["out"])
    close(lse, real["lse"])
    dq, dk, dv, darrays = back((dout, dlse))
    close(dq, real["dq"])
    close(dk, real["dk"])
    close(dv, real["dv"])
    for name, found in darrays.items():
        assert found.dtype == arrays[name].dtype
        close(found, real["d" + name].reshape(found.shape), 1e-6 if name == "sink" else 1e-12)
    found = rj.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(found, name), {"dq": dq, "dk": dk, "dv": dv}[name])
    assert (found.dbias is None) == ("bias" not in options)
    if "bias" in options:
        assert np.array_equal(found.dbias, darrays["bias"])  # in shape too
    assert (found.dsink is None) == ("sink" not in options)


def test_compiled_functions_return_gradients():
    q, k, v, dout = inputs()
    out, lse = rj.attention(q, k, v, return_lse=True)
    want = rj.attention_backward(dout, q, k, v, out, lse)
    found = jax.jit(rj.attention_backward)(dout, q, k, v, out, lse)
    assert isinstance(found, regard.Gradients) and found.dbias is None
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want)))
    assert len(jax.tree.leaves(found)) == 3


def test_layout_with_the_rows_before_the_heads():
    q, k, v, dout = inputs(layout="bshd", len_k=9)
    (out, lse), back = jax.vjp(
        lambda *x: rj.attention(*x, layout="bshd", causal=True, return_lse=True), q, k, v)
    real = truth(q, k, v, dout, layout="bshd", causal="bottom_right")
    close(out, real["out"])
    close(lse, real["lse"])
    for found, name in zip(back((dout, jnp.zeros_like(lse))), ("dq", "dk", "dv")):
        close(found, real[name])


def test_packed_sequences_and_what_lies_behind_them():
    q, k, v, dout = (normal(n, 12, heads, 8) for n, heads in enumerate((4, 2, 2, 4)))
    lengths = dict(cu_seqlens_q=np.int32([0, 3, 3, 10]), cu_seqlens_k=np.int32([0, 5, 6, 11]),
                   max_seqlen_q=7, max_seqlen_k=5)
    (out, lse), back = jax.vjp(
        lambda *x: rj.attention(*x, causal="bottom_right", return_lse=True, **lengths), q, k, v)
    real = truth(q, k, v, dout, causal="bottom_right", **lengths)
    real["lse"][:, 10:] = -np.inf
    close(out, real["out"])
    close(lse, real["lse"])
    for found, name in zip(back((dout, jnp.zeros_like(lse))), ("dq", "dk", "dv")):
        close(found, real[name])


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 2e-6), (jnp.float16, 4e-3),
                                              (jnp.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("out_type", [None, "float32"])
def test_types(dtype, tolerance, out_type):
    q, k, v, dout = inputs(dtype)
    (out, lse), back = jax.vjp(
        lambda *x: rj.attention(*x, out_type=out_type, return_lse=True), q, k, v)
    assert out.dtype == (out_type or dtype) and lse.dtype == jnp.float32
    dout = dout.astype(out.dtype)
    real = truth(q, k, v, dout)
    close(out, real["out"], tolerance)
    for found, x, name in zip(back((dout, jnp.zeros_like(lse))), (q, k, v), ("dq", "dk", "dv")):
        assert found.dtype == x.dtype
        close(found, real[name], 2 * tolerance)
    wide = rj.attention_backward(dout, q, k, v, out, lse, gradients=["dk"], gradient_type="float32")
    assert wide.dk.dtype == jnp.float32 and wide.dq is None
    close(wide.dk, real["dk"], 2 * tolerance)


def test_the_gradient_of_a_sink_keeps_its_type():
    q, k, v, dout = inputs(jnp.float16)
    out, lse = rj.attention(q, k, v, sink=SINK, return_lse=True)
    found = rj.attention_backward(dout, q, k, v, out, lse, sink=SINK, gradient_type="float16")
    assert found.dq.dtype == jnp.float16 and found.dsink.dtype == jnp.float32


def test_a_seed_as_int_as_array_and_as_key_drops_the_same_weights():
    q, k, v, _ = inputs()
    run = jax.jit(lambda seed: rj.attention(q, k, v, dropout_p=0.4, dropout_seed=seed))
    for seed in (0, 5, 2**31 + 3):
        fixed = rj.attention(q, k, v, dropout_p=0.4, dropout_seed=seed)
        close(fixed, truth(q, k, v, dropout_p=0.4, dropout_seed=seed)["out"])
        assert np.array_equal(run(jnp.uint32(seed)), fixed)
        assert np.array_equal(run(jnp.int64(seed)), fixed)
    assert run._cache_size() == 2  # one for each type, none for a value
    negative = rj.attention(q, k, v, dropout_p=0.4, dropout_seed=2**64 - 3)
    for one in (jnp.int8(-3), jnp.int32(-3), jnp.int64(-3)):
        assert np.array_equal(run(one), negative)
    key = jax.random.key(2**33 + 11)
    whole = int(jax.random.key_data(key)[0]) << 32 | int(jax.random.key_data(key)[1])
    fixed = rj.attention(q, k, v, dropout_p=0.4, dropout_seed=whole)
    assert np.array_equal(run(key), fixed)
    assert np.array_equal(run(jax.random.key_data(key)), fixed)


def test_gradients_with_a_seed_that_is_an_operand():
    q, k, v, dout = inputs()

    @jax.jit
    def gradients(seed):
        return jax.vjp(lambda *x: rj.attention(*x, dropout_p=0.4, dropout_seed=seed), q, k, v
                       )[1](dout)

    real = truth(q, k, v, dout, dropout_p=0.4, dropout_seed=9)
    for found, name in zip(gradients(jnp.int32(9)), ("dq", "dk", "dv")):
        close(found, real[name])


def test_empty_sizes():
    q, k, v, _ = inputs(len_q=3, len_k=0)
    out, lse = rj.attention(q, k, v, return_lse=True)
    assert np.array_equal(out, np.zeros((2, 4, 3, 6))) and np.all(np.asarray(lse) == -np.inf)
    q, k, v, _ = inputs(len_q=0, len_k=3)
    assert rj.attention(q, k, v).shape == (2, 4, 0, 6)
    dk = jax.grad(lambda k: rj.attention(q, k, v).sum())(k)
    assert np.array_equal(dk, np.zeros(k.shape))


def test_the_common_functions_take_jax_arrays():
    q, k, v, dout = inputs()
    out, lse = regard.attention(q, k, v, causal="top_left", return_lse=True)
    assert isinstance(out, jax.Array)
    found = regard.attention_backward(dout, q, k, v, out, lse, causal="top_left")
    close(found.dv, truth(q, k, v, dout, causal="top_left")["dv"])


def test_backends_agree():
    q, k, v, _ = inputs()
    on = jax.devices("cpu")[0]
    with jax.default_device(on):
        q, k, v = (jax.device_put(x, on) for x in (q, k, v))
        close(rj.attention(q, k, v, backend="reference", threads=2), rj.attention(q, k, v))


BAD = {
    "head size": (dict(k=np.zeros((2, 2, 11, 5))), "k = f64"),
    "heads": (dict(k=np.zeros((2, 3, 11, 8)), v=np.zeros((2, 3, 11, 8))), "heads"),
    "dimensions": (dict(q=np.zeros((2, 4, 9))), "q = an array of shape"),
    "type": (dict(q=np.zeros((2, 4, 9, 8), np.int8)), "q = int8"),
    "types": (dict(k=np.zeros((2, 2, 11, 8), np.float32)), "k = f32"),
    "a list": (dict(q=[[1.0]]), "q = a list"),
    "bias": (dict(bias=np.zeros((3, 1, 1, 1))), "bias = f64"),
    "mask": (dict(mask=np.zeros((9, 11))), "mask = float64"),
    "sink": (dict(sink=np.zeros(3, np.float32)), "sink = f32"),
    "lengths": (dict(seqused_k=np.int32([1, 2, 3])), "seqused_k = i32"),
    "causal": (dict(causal="left"), "causal = 'left'"),
    "causal True": (dict(causal=True), "causal = True"),
    "window": (dict(window=(1, 2, 3)), "window = "),
    "softcap": (dict(softcap=-1.0), "softcap = -1"),
    "dropout": (dict(dropout_p=1.5), "dropout"),
    "layout": (dict(layout="sbhd"), "layout = 'sbhd'"),
    "out type": (dict(out_type="float16"), "out_type = float16"),
    "traced number": (dict(scale=jnp.float32(1)), "scale = a JAX array"),
    "seed": (dict(dropout_p=0.1, dropout_seed=np.zeros(3)), "dropout_seed = an array"),
}


@pytest.mark.parametrize("change, text", BAD.values(), ids=BAD)
def test_what_is_known_when_traced_is_refused_when_traced(change, text):
    q, k, v, _ = inputs()
    arguments = {"q": q, "k": k, "v": v, **change}
    with pytest.raises(regard.InvalidArgument, match="^" + text.replace("(", r"\(") if " = " in text
                       else text):
        rj.attention(**arguments)
    if not isinstance(arguments["q"], list):
        with pytest.raises(regard.InvalidArgument):
            arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
            rest = {name: x for name, x in arguments.items() if name not in arrays}
            jax.eval_shape(lambda arrays: rj.attention(**arrays, **rest), arrays)


def test_arrays_of_numpy_that_jax_cannot_have_or_that_stand_next_to_traced_ones():
    with pytest.raises(regard.WrongType, match="^q = >f4 .*must have this machine's byte order"):
        rj.attention(np.ones((1, 2, 5, 8), ">f4"), *(jnp.ones((1, 2, 5, 8)),) * 2)
    with pytest.raises(regard.Unsupported, match="^k = a traced array of JAX: .*give q as an array"):
        jax.jit(lambda k: regard.attention(np.ones((1, 2, 5, 8), np.float32), k, k))(
            jnp.ones((1, 2, 5, 8)))


def test_what_only_values_tell_is_refused_when_run():
    q, k, v, _ = (normal(n, 8, 2, 8) for n in range(4))
    on = jax.devices("cpu")[0]  # a GPU's tables are not read by the host

    def run(ends):
        return rj.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=8,
                            max_seqlen_k=8)

    with jax.default_device(on):
        q, k, v = (jax.device_put(x, on) for x in (q, k, v))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"cu_seqlens_q\[1\] = 99: "):
            jax.block_until_ready(jax.jit(run)(np.int32([0, 99])))
        with pytest.raises(jax.errors.JaxRuntimeError, match="backend = cpu:none"):
            jax.block_until_ready(rj.attention(q[None], k[None], v[None], backend="cpu:none"))


@pytest.mark.parametrize("attributes", [
    {}, dict(operands="q k v"), dict(operands="q k", results="out lse"),
    dict(operands="q k", results="out", rows_first=np.int64(0)),
    dict(operands="q v", results="out", rows_first=np.float32(0))], ids=str)
def test_a_call_that_python_did_not_put_together_fails(attributes):
    q = jnp.zeros((1, 1, 2, 4))
    call = jax.ffi.ffi_call("regard_forward", jax.ShapeDtypeStruct(q.shape, q.dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the call has no such|must be"):
        jax.block_until_ready(call(q, q, **attributes))


@pytest.mark.parametrize("change, text", [
    (dict(lse=np.zeros((2, 4, 8))), "lse = f64"), (dict(dout=np.zeros((2, 4, 9, 5))), "dout = f64"),
    (dict(gradients=["dx"]), "gradients = 'dx'"), (dict(gradients="dbias"), "gradients = 'dbias'"),
    (dict(gradient_type="float16"), "gradient_type = float16")])
def test_bad_arguments_of_the_backward_pass(change, text):
    q, k, v, dout = inputs()
    out, lse = rj.attention(q, k, v, return_lse=True)
    arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, **change}
    with pytest.raises(regard.InvalidArgument, match="^" + text):
        rj.attention_backward(**arguments)
