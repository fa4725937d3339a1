"""JAX's transformations of regard.jax.attention: derivatives, vmap, scan, checkpoint, shard_map."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from jax_cases import DEVICES, close, normal, wide_types

import regard
import regard.jax as rj


@pytest.fixture(params=DEVICES, autouse=True)
def device(request):
    with wide_types(request.param):
        yield request.param


def inputs(*lead, batch=2):
    return [normal(n, *lead, batch, heads, length, 8)
            for n, (heads, length) in enumerate(((4, 5), (2, 7), (2, 7)))]


def test_derivatives_of_out_and_lse_by_differences():
    q, k, v = inputs()
    bias = normal(3, 4, 5, 7)

    def run(q, k, v, bias):
        return rj.attention(q, k, v, bias=bias, causal="bottom_right", softcap=5.0, dropout_p=0.2,
                            dropout_seed=3, return_lse=True)

    check_grads(run, (q, k, v, bias), order=1, modes=["rev"])
    check_grads(jax.jit(run), (q, k, v, bias), order=1, modes=["rev"])


def test_only_what_is_differentiated_is_computed():
    q, k, v = inputs()
    bias = normal(3, 2, 4, 5, 7)

    def loss(q, bias):
        return rj.attention(q, k, v, bias=bias, return_lse=True)[1].sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(q, bias))
    assert re.findall(r"'results', '(.*?)'", program) == ["out lse", "dq"]
    assert re.findall(r"'operands', '(.*?)'", program)[1].split().count("dlse") == 1
    assert "dlse" not in str(jax.make_jaxpr(jax.grad(lambda q: rj.attention(q, k, v).sum()))(q))
    close(jax.grad(loss)(q, bias), jax.grad(
        lambda q: jax.nn.logsumexp(scores(q, k) + bias, axis=-1).sum())(q))


@pytest.mark.exhaustive
def test_one_compiled_function_serves_every_set_of_gradients():
    arrays = dict(zip("qkv", inputs()), bias=normal(3, 2, 4, 5, 7))

    @jax.jit
    def found(arrays):
        return jnp.sin(rj.attention(**arrays)).sum()

    def real(arrays):
        weights = jax.nn.softmax(scores(arrays["q"], arrays["k"]) + arrays["bias"], axis=-1)
        return jnp.sin(weights @ jnp.repeat(arrays["v"], 2, axis=1)).sum()

    for names in ("q", "v", "q k", "bias", "q"):
        part = {name: arrays[name] for name in names.split()}
        for wrap in (lambda f: f, jax.jit):
            one, two = (wrap(jax.grad(lambda part: f({**arrays, **part})))(part)  # noqa: B023
                        for f in (found, real))
            for name in part:
                close(one[name], two[name])


def scores(q, k):
    return jnp.einsum("bhid,bhjd->bhij", q, jnp.repeat(k, 2, axis=1)) / np.sqrt(8)


def test_second_derivatives_are_refused():
    q, k, v = inputs()
    gradient = jax.grad(lambda q: rj.attention(q, k, v).sum())
    for twice in (lambda: jax.grad(lambda q: gradient(q).sum())(q),
                  lambda: jax.jvp(gradient, (q,), (q,))):
        with pytest.raises(regard.Unsupported, match="differentiated twice"):
            twice()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: rj.attention(q, k, v), (q,), (q,))


# Each: which arrays carry the mapped axis, options, and whether one call serves all.
MAPPED = {
    "everything": ("q k v", {}, True),
    "q alone": ("q", {}, True),
    "k and v": ("k v", {}, True),
    "bias": ("bias", dict(bias=(2, 4, 5, 7)), True),
    "a broadcast bias": ("q bias", dict(bias=(5, 7)), True),
    "an unmapped broadcast bias": ("q", dict(bias=(1, 1, 5, 7)), True),
    "slopes of heads": ("alibi_slopes", dict(alibi_slopes=(4,)), True),
    "slopes of batch and heads": ("q", dict(alibi_slopes=(2, 4)), True),
    "an unmapped sink": ("q k v", dict(sink=(4,)), True),
    "a sink": ("sink", dict(sink=(4,)), True),
    "a sink, a bias, slopes": ("q sink bias", dict(sink=(4,), bias=(1, 5, 7), alibi_slopes=(4,)),
                               True),
    "lengths": ("seqused_k", dict(seqused_k=(2,)), True),
    "lengths, sink": ("q seqused_k sink", dict(seqused_k=(2,), sink=(4,)), False),
    "mask": ("mask", dict(mask=(2, 1, 5, 7)), True),
    "spans": ("row_spans", dict(row_spans=(1, 4, 5, 6), key_spans=(7, 2)), True),
    "dropout": ("q k v", dict(dropout_p=0.4, dropout_seed=5), False),
    "seeds": ("dropout_seed", dict(dropout_p=0.4, dropout_seed=()), False),
}
TYPES = {"mask": np.bool_, "row_spans": np.int32, "key_spans": np.int32, "seqused_k": np.int32, "dropout_seed": np.uint32, "sink": np.float32,
         "alibi_slopes": np.float32}


CORE = {("bhsd", "everything"), ("bhsd", "lengths, sink"), ("bhsd", "mask"),
        ("bshd", "a sink, a bias, slopes")}


@pytest.mark.parametrize("layout, case", [
    pytest.param(*each, marks=() if each in CORE else pytest.mark.exhaustive)
    for each in [*(("bhsd", case) for case in MAPPED), ("bshd", "everything"),
                 ("bshd", "a sink, a bias, slopes")]])
def test_vmap_is_a_loop(layout, case):
    mapped, options, together = MAPPED[case]
    size, mapped = 2, mapped.split()
    random = np.random.default_rng(4)
    arrays = dict(zip("qkv", inputs()))
    fixed = {name: x for name, x in options.items() if not isinstance(x, tuple)}
    shapes = {name: shape for name, shape in options.items() if isinstance(shape, tuple)}
    for name, shape in {**{name: x.shape for name, x in arrays.items()}, **shapes}.items():
        shape = (size, *shape) if name in mapped else shape
        whole = name in ("seqused_k", "dropout_seed", "mask", "row_spans", "key_spans")
        x = random.integers(0, 7, shape) if whole else random.standard_normal(shape)
        arrays[name] = jnp.asarray(x, TYPES.get(name, np.float64))
    if layout == "bshd":
        arrays.update({name: jnp.swapaxes(arrays[name], -2, -3) for name in "qkv"})
    floats = [name for name, x in arrays.items() if x.dtype in (jnp.float64, jnp.float32)
              and name != "alibi_slopes"]

    def run(arrays):
        out, lse = rj.attention(**arrays, **fixed, layout=layout, causal="bottom_right",
                                return_lse=True)
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0).sum(), (out, lse)

    def gradients(arrays):
        return jax.grad(lambda x: run({**arrays, **x}), has_aux=True)(
            {name: arrays[name] for name in floats})

    axes = ({name: 0 if name in mapped else None for name in arrays},)
    found = jax.jit(jax.vmap(gradients, axes))(arrays)
    ones = [gradients({name: x[i] if name in mapped else x for name, x in arrays.items()})
            for i in range(size)]
    real = jax.tree.map(lambda *x: np.stack(x), *ones)
    for name, x in found[0].items():
        close(x, real[0][name], 1e-6 if name == "sink" else 1e-12)
    for x, y in zip(found[1], real[1]):
        close(x, y)
    program = str(jax.make_jaxpr(jax.vmap(gradients, axes))(arrays))
    assert ("scan[" not in program) == together


def test_grad_of_vmap_sums_over_what_is_shared():
    q, k, v = inputs(3)
    shared = k[0]

    def loss(run):
        return lambda k: jnp.sin(run(k)).sum()

    found = jax.grad(loss(lambda k: jax.vmap(rj.attention, (0, None, 0))(q, k, v)))(shared)
    real = jax.grad(loss(lambda k: jnp.stack([rj.attention(q[i], k, v[i]) for i in range(3)])))
    close(found, real(shared))


def test_vmap_of_vmap():
    q, k, v = inputs(2, 3)
    found = jax.vmap(jax.vmap(rj.attention, (0, None, 0)), (0, 0, None))(q, k[:, 0], v[0])
    for i in range(2):
        for j in range(3):
            close(found[i, j], rj.attention(q[i, j], k[i, 0], v[0, j]))


@pytest.mark.parametrize("lead", [(0,), (0, 2), (2, 0)])
def test_vmap_of_no_problems(lead):
    """Results have the shapes of one problem behind the axis of size 0."""
    q, k, v = inputs(*lead)
    shared, sink = inputs()[1], normal(3, 4, dtype=jnp.float32)

    def loss(q, k, v, sink):
        out, lse = rj.attention(q, k, v, sink=sink, return_lse=True)
        return jnp.sin(out).sum() + lse.sum(), (out, lse)

    run = jax.grad(loss, (0, 1, 3), has_aux=True)
    for _ in lead:
        run = jax.vmap(run, (0, None, 0, None))
    (dq, dk, dsink), (out, lse) = jax.jit(run)(q, shared, v, sink)
    assert out.shape == dq.shape == q.shape and lse.shape == q.shape[:-1]
    assert dk.shape == k.shape and dsink.shape == (*lead, 4)


def test_vmap_of_packed_sequences():
    q, k, v = (normal(n, 3, 8, heads, 8) for n, heads in enumerate((4, 2, 2)))
    ends = jnp.asarray([[0, 3, 8], [0, 0, 8], [0, 8, 8]], jnp.int32)

    def run(q, k, v, ends):
        return rj.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=8,
                            max_seqlen_k=8, causal=True)

    found = jax.jit(jax.vmap(run))(q, k, v, ends)
    for i in range(3):
        close(found[i], run(q[i], k[i], v[i], ends[i]))


def test_scan_and_checkpoint():
    q, k, v = inputs()
    weights = normal(5, 4, 8, 8)

    def layer(x, weight, attend):
        return x + attend(x @ weight, k, v), None

    def loss(weights, attend, around):
        step = around(lambda x, weight: layer(x, weight, attend))
        return jnp.sin(jax.lax.scan(step, q, weights)[0]).sum()

    def plain(q, k, v):
        return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(scores(q, k), axis=-1),
                          jnp.repeat(v, 2, axis=1))

    real = jax.grad(loss)(weights, plain, lambda step: step)
    for around in (lambda step: step, jax.checkpoint):
        close(jax.jit(jax.grad(loss), static_argnums=(1, 2))(weights, rj.attention, around), real,
              1e-11)


def test_half_precision_under_jit_keeps_its_types():
    for dtype in (jnp.bfloat16, jnp.float16):
        q, k, v = (x.astype(dtype) for x in inputs())
        out, gradients = jax.jit(jax.value_and_grad(
            lambda x: rj.attention(*x).astype(jnp.float32).sum()))((q, k, v))
        assert [x.dtype for x in gradients] == [dtype] * 3 and np.isfinite(out)


def test_parts_of_a_broadcast_bias_gradient_are_summed_in_float32():
    q = jax.random.normal(jax.random.key(0), (256, 1, 8, 8))
    dout = 2e-8 * q  # a part alone is below float16's range
    bias = jnp.zeros((1, 1, 8, 8), jnp.float16)
    gradient = jax.grad(lambda bias, q, dout: (rj.attention(q, q, q, bias=bias) * dout).sum())
    mapped = jax.vmap(gradient, in_axes=(None, 0, 0))(bias, q[None], dout[None])[0]
    assert mapped.dtype == bias.dtype
    exact = gradient(bias.astype(jnp.float32), q, dout)
    assert abs(mapped - exact).max() < 0.02 * abs(exact).max()


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import regard.jax as rj

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
random = np.random.default_rng(0)
q, k, v = (jnp.asarray(random.standard_normal((4, 2, 6, 8)), jnp.float32) for _ in range(3))
sink = jnp.asarray([0.5, -1.0])

def run(q, k, v, sink):
    return rj.attention(q, k, v, sink=sink, causal=True)

split = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P("data"),) * 3 + (P(),),
                              out_specs=P("data")))
loss = lambda f: lambda *x: jnp.sin(f(*x)).sum()
for found, real in zip((split(q, k, v, sink), *jax.grad(loss(split), (0, 1, 2, 3))(q, k, v, sink)),
                       (run(q, k, v, sink), *jax.grad(loss(run), (0, 1, 2, 3))(q, k, v, sink))):
    np.testing.assert_allclose(found, real, rtol=2e-5, atol=2e-6)
placed = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (q, k, v)]
np.testing.assert_allclose(jax.jit(run)(*placed, sink), run(q, k, v, sink), rtol=2e-5, atol=2e-6)

# Types name the axes of this mesh, as by default.
jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)))
typed = [jax.device_put(x, P("data")) for x in (q, k, v)]
assert jax.typeof(jax.jit(run)(*typed, sink)).sharding.spec[0] == "data"
found = jax.jit(jax.grad(loss(run), (0, 1, 2, 3)))(*typed, sink)
for one, real in zip(found, jax.grad(loss(run), (0, 1, 2, 3))(q, k, v, sink)):
    np.testing.assert_allclose(one, real, rtol=2e-5, atol=2e-6)
step = lambda carry, _: (run(carry, carry, carry, sink), None)
np.testing.assert_allclose(jax.jit(lambda x: jax.lax.scan(step, x, length=2)[0])(typed[0]),
                           step(step(q, 0)[0], 0)[0], rtol=2e-5, atol=2e-6)
print("agreed on", len(jax.devices()))
"""


@pytest.mark.exhaustive
def test_two_devices():
    if not hasattr(jax, "shard_map"):
        pytest.skip(f"JAX {jax.__version__} has no jax.shard_map")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu",
                   "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, text=True,
                          capture_output=True, timeout=120)
    assert done.stdout.strip() == "agreed on 2", done.stderr
