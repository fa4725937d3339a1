"""A problem cut in parts, with positions, and put together again: every term is the whole's."""

import numpy as np
import pytest

import regard_ctypes as regard

BLOCK = 128
ROWS = KEYS = 700  # the last block of rows is short
B, HEADS, HEADS_KV, D = 2, 4, 2, 16
DROPOUT = (0.3, 2**33 + 5, 77)
OPTIONS = {
    "causal": {"causal": "top_left"},
    "window": {"window": (150, 40)},
    "alibi": {"causal": "top_left", "alibi_slopes": np.float32([0.01, 0.02, 0.05, 0.1])},
    "dropout": {"dropout": DROPOUT, "window": (300, 10)},
    "bias and mask": {"bias": True, "mask": True, "causal": "top_left", "softcap": 2.0},
    "spans": {"row_spans": True, "key_spans": True, "alibi_slopes": np.float32([0.1, 0.05, 0.02, 0.01])},
}


def inputs(options):
    rng = np.random.default_rng(11)
    arrays = {"q": rng.standard_normal((B, HEADS, ROWS, D)),
              "k": rng.standard_normal((B, HEADS_KV, KEYS, D)),
              "v": rng.standard_normal((B, HEADS_KV, KEYS, D))}
    options = dict(options)
    if "bias" in options:
        options["bias"] = rng.standard_normal((B, 1, ROWS, KEYS))
        options["mask"] = rng.random((1, HEADS, ROWS, KEYS)) < 0.6
    if "row_spans" in options:
        begin = rng.integers(0, 300, (B, 1, ROWS, 1))
        options["row_spans"] = np.concatenate([begin, begin + 250], -1).astype(np.int32)
        begin = rng.integers(0, 300, (1, HEADS, KEYS, 1))
        options["key_spans"] = np.concatenate([begin, begin + 350], -1).astype(np.int32)
    return arrays, options


def parts():
    """Rows of three ranks in blocks, dealt to and fro, and keys in two pieces."""
    blocks = [[0, 5], [1, 3, 4], [2]]
    rows = [np.concatenate([np.arange(n * BLOCK, min((n + 1) * BLOCK, ROWS)) for n in own])
            for own in blocks]
    starts = [np.int32([n * BLOCK for n in own]) for own in blocks]
    return [(row, start, slice(*keys)) for row, start in zip(rows, starts)
            for keys in ((0, 224), (224, KEYS))]


def cut(arrays, options, rows, start, keys):
    """One part's call. Spans of rows hold the part's own keys, spans of keys its own rows."""
    own = dict(options)
    for name, index in (("bias", np.s_[:, :, rows, keys]), ("mask", np.s_[:, :, rows, keys]),
                        ("row_spans", np.s_[:, :, rows]), ("key_spans", np.s_[:, :, keys])):
        if name in own:
            own[name] = np.ascontiguousarray(own[name][index])
    if "row_spans" in own:
        own["row_spans"] = own["row_spans"] - np.int32(keys.start)
        own["key_spans"] = np.searchsorted(rows, own["key_spans"]).astype(np.int32)
    given = {"q": arrays["q"][:, :, rows], **{name: arrays[name][:, :, keys] for name in "kv"}}
    return regard.Attention(**{name: x.copy() for name, x in given.items()}, q_positions=start,
                            k_position=keys.start, **own)


def forward(attention, shape, backend):
    out, lse = np.empty((*shape, D)), np.empty(shape)
    regard.forward(attention, out, lse, backend=backend)
    return out, lse


def merge(one, two):
    with np.errstate(invalid="ignore", divide="ignore"):
        lse = np.logaddexp(one[1], two[1])
        factors = [np.where(np.isneginf(x[1]), 0, np.exp(x[1] - lse))[..., None] for x in (one, two)]
    return factors[0] * one[0] + factors[1] * two[0], lse


@pytest.mark.parametrize("name", OPTIONS)
def test_parts_are_the_whole(name, backend):
    arrays, options = inputs(OPTIONS[name])
    whole = regard.Attention(**arrays, **options)
    out, lse = forward(whole, (B, HEADS, ROWS), backend)
    dout = np.random.default_rng(3).standard_normal(out.shape)
    wanted = {name: np.empty_like(x) for name, x in zip(("dq", "dk", "dv"), arrays.values())}
    regard.backward(whole, out, lse, dout, gradients=wanted, backend=backend)
    if name == "causal":  # or the positions would not matter
        by_index = regard.Attention(**{name: x.copy() for name, x in arrays.items()}, causal="none")
        assert np.abs(forward(by_index, (B, HEADS, ROWS), backend)[0] - out).max() > 0.1

    found = {name: np.zeros_like(x) for name, x in wanted.items()}
    pieces = parts()
    for rows, start, _ in pieces[::2]:
        both = [keys for own, _, keys in pieces if own is rows]
        shape = (B, HEADS, len(rows))
        got = merge(*(forward(cut(arrays, options, rows, start, keys), shape, backend)
                      for keys in both))
        np.testing.assert_allclose(got[0], out[:, :, rows], rtol=0, atol=1e-13)
        np.testing.assert_allclose(got[1], lse[:, :, rows], rtol=1e-14, atol=1e-13)
        for keys in both:
            made = {"dq": np.empty_like(arrays["q"][:, :, rows]),
                    **{f"d{name}": np.empty_like(arrays[name][:, :, keys]) for name in "kv"}}
            regard.backward(cut(arrays, options, rows, start, keys),
                            *(np.ascontiguousarray(x[:, :, rows]) for x in (out, lse, dout)),
                            gradients=made, backend=backend)
            found["dq"][:, :, rows] += made["dq"]
            found["dk"][:, :, keys] += made["dk"]
            found["dv"][:, :, keys] += made["dv"]
    for gradient, want in wanted.items():
        np.testing.assert_allclose(found[gradient], want, rtol=0, atol=1e-12 * np.abs(want).max())


def test_dropout_masks_of_parts():
    """Of some rows, keys, batch entries and heads, bit for bit."""
    arrays, options = inputs(OPTIONS["dropout"])
    whole = np.zeros((B, HEADS, ROWS, KEYS), bool)
    regard.dropout_mask(regard.Attention(**arrays, **options), whole)
    for rows, start, keys in parts():
        part = np.zeros((1, 2, len(rows), keys.stop - keys.start), bool)
        attention = regard.Attention(
            arrays["q"][1:, 2:, rows].copy(), *(arrays[name][1:, 1:, keys].copy() for name in "kv"),
            q_positions=start, k_position=keys.start, batch_begin=1, head_begin=2, dropout=DROPOUT)
        regard.dropout_mask(attention, part)
        assert np.array_equal(part, whole[1:, 2:, rows, keys])


@pytest.mark.parametrize("argument, value, given", [
    ("q_positions", "i32", {"q_positions": np.int32([0, 128, 256])}),
    ("q_positions[1]", "127", {"q_positions": np.int32([0, 127])}),
    ("q_positions[0]", "-1", {"q_positions": np.int32([-1, 127])}),
    ("q_positions[1]", str(2**31 - 5), {"q_positions": np.int32([0, 2**31 - 5])}),
    ("q_positions[0, 1]", "100", {"q_positions": np.int32([[0, 100]])}),
    ("k_position", str(2**31 - 149), {"k_position": 2**31 - 149}),
    ("q_positions", "f32", {"q_positions": np.float32([0, 128])}),
    ("k_position", "-1", {"k_position": -1}),
    ("k_position", "33", {"k_position": 33, "dropout": DROPOUT}),
    ("batch_begin", str(2**31), {"batch_begin": 2**31}),
    ("head_begin", "-7", {"head_begin": -7}),
    ("causal", "bottom_right", {"k_position": 32, "causal": "bottom_right"}),
])
def test_refused(argument, value, given):
    q, k = np.zeros((1, 2, 200, 4)), np.zeros((1, 2, 150, 4))
    with pytest.raises(regard.RegardError) as caught:
        regard.forward(regard.Attention(q, k, k, **given), q.copy())
    assert caught.value.argument == argument and str(caught.value).startswith(f"{argument} = ")
    assert value in str(caught.value)
