"""Problems by feature name: inputs, memory layouts, the oracle's answer and the library's.

A case is made of a set of features (the keys of FEATURES), a type and base sizes. make() draws its
inputs, rounds them to their types and lays them out; run() calls the library with outputs that were
filled with a sentinel; compare() is the rule of the chapter "Accuracy" in docs/semantics.md.
"""

import dataclasses
import functools
import zlib

import numpy as np

import guards
import oracle
import philox
import regard_ctypes as regard

FEATURES = {
    "plain": {},
    "top_left": {"causal": "top_left"},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"window": (9, 4)},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.4},
    "negative_scale": {"scale": -0.3},
    "zero_scale": {"scale": 0.0},
    "bias": {"bias": ("b", "h", "q", "k")},
    "bias_head": {"bias": (1, "h", "q", "k"), "bias_type": "f32"},
    "bias_shared": {"bias": (1, "h", "q", "k")},
    "bias_batch": {"bias": ("b", 1, "q", "k"), "bias_type": "bf16"},
    "bias_keys": {"bias": ("b", 1, 1, "k"), "bias_type": "f16"},
    "bias_queries": {"bias": (1, "h", "q", 1), "bias_type": "f64"},
    "bias_both": {"bias": ("q", "k")},
    "bias_one": {"bias": (1, 1, 1, 1), "bias_type": "f32"},
    "bias_infinite": {"bias": ("b", 1, "q", "k"), "bias_hides": True},
    "mask": {"mask": ("b", "h", "q", "k")},
    "mask_keys": {"mask": ("b", 1, 1, "k")},
    "row_span": {"row_spans": ("b", "h", "q"), "spans": 1},
    "row_spans": {"row_spans": ("b", 1, "q"), "spans": 3},
    "key_spans": {"key_spans": ("b", "h", "k"), "key_span_count": 2},
    "alibi": {"alibi": ("h",)},
    "alibi_batch": {"alibi": ("b", "h")},
    "sink": {"sink": True},
    "dropout": {"dropout": (0.3, 0x123456789ABCDEF0, 0xFEDCBA9876543210)},
    "packed": {"packed": True},
    "seqused": {"seqused": True},
    "positions": {"positions": True, "sizes": (150, 171)},
    "grouped": {"heads": (4, 2)},
    "value_size": {"dim_v": 24},
    "odd": {"sizes": (37, 67), "dim": 17},
    "dlse": {"dlse": True},
    "continued": {"continued": True},
    "delta": {"delta": True},
    "f32_outputs": {"f32_outputs": True},
    "accumulate": {"accumulate": True},
    "bshd": {"layout": "bshd"},
    "gaps": {"layout": "gaps"},
    "padded": {"layout": "padded"},
    "stride_0": {"layout": "stride_0"},
    "reversed": {"layout": "reversed"},
}
BASE = {"batch": 2, "heads": (2, 2), "sizes": (21, 39), "dim": 16, "dim_v": None, "layout": "bhsd"}
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}  # half an ulp of 1
TINY = {"f64": 1e-300, "f32": 1e-35, "bf16": 1e-35, "f16": 1e-35}  # what may underflow to 0
NAMES = {dtype: name for name, dtype in regard.DTYPES.items()}


REFUSED = [{"packed", "positions"}, {"bottom_right", "positions"}]


def compatible(*features):
    """Whether no two features set the same thing to different values, or are refused together."""
    if any(pair <= set(features) for pair in REFUSED):
        return False
    keys = [key for feature in features for key in FEATURES[feature]]
    return len(keys) == len(set(keys))


def sentinel(shape, dtype):
    """An array whose every element holds a NaN (or a true, or a huge length)."""
    if dtype == regard.BF16:
        return np.full(shape, (0x7FC1,), regard.BF16)
    return np.full(shape, {"b": True, "i": 2**31 - 1}.get(dtype.kind, np.nan), dtype)


def lay_out(array, layout, shared_batch=False):
    """A view equal to array whose memory is laid out as named; what lies between is sentinel."""
    array = np.asarray(array)
    if layout == "stride_0" and shared_batch:
        return np.broadcast_to(array[:1].copy(), array.shape)
    if layout == "bshd" and array.ndim == 4:
        return array.swapaxes(1, 2).copy().swapaxes(1, 2)
    if layout == "bshd" and array.ndim == 3:  # packed: heads outermost
        return array.swapaxes(0, 1).copy().swapaxes(0, 1)
    if layout == "reversed":  # negative strides in all but the last axis
        backwards = (np.s_[::-1],) * (array.ndim - 1)
        return array[backwards].copy()[backwards]
    if layout == "padded":  # rows of whole pieces of 16 bytes, which they do not fill
        columns = array.shape[-1]
        room = sentinel((*array.shape[:-1], (columns // 8 + 2) * 8), array.dtype)
        room[..., :columns] = array
        return room[..., :columns]
    if layout == "gaps":
        room = sentinel([size + 1 + axis for axis, size in enumerate(array.shape)], array.dtype)
        view = room[tuple(np.s_[1 : size + 1] for size in array.shape)]
        view[...] = array
        return view
    return array.copy()


@dataclasses.dataclass
class Case:
    type: str
    spec: dict
    inputs: dict   # name -> array as the library gets it
    values: dict   # the oracle's arguments, exact values of the same inputs
    options: dict  # regard_ctypes.Attention's other fields
    dout: np.ndarray
    dlse: np.ndarray | None
    start: dict = dataclasses.field(default_factory=dict)  # what gradients held that are added to
    is_sensitive: bool = False  # sensitivity.check() has passed

    def attention(self):
        return regard.Attention(**self.inputs, **self.options)

    def result_type(self, name):
        """Of a result in the types that run() gives them."""
        if name == "lse":
            return lse_type(self.type)
        if name == "dsink":
            return np.dtype(np.float32)
        if name == "out" and self.spec.get("continued"):
            return lse_type(self.type)
        if self.spec.get("f32_outputs") and self.type != "f32":
            return np.dtype(np.float32)
        return self.inputs["bias"].dtype if name == "dbias" else regard.DTYPES[self.type]

    @functools.cached_property
    def truth(self):
        return oracle.attention(**self.values)

    @functools.cached_property
    def unfused(self):
        """The plain computation in the case's own type, every intermediate rounded to it."""
        work = np.float64 if self.type == "f64" else np.float32
        dtype = regard.DTYPES[self.type]
        if self.type in ("f64", "f32"):
            return oracle.attention(**self.values, work=work)
        return oracle.attention(**self.values, work=work, rnd=lambda x: regard.load(
            regard.store(x, dtype)).astype(work))

    @functools.cached_property
    def size(self):
        """What each result is a sum of, in absolute values: the yardstick of cancellation."""
        head_type = SlopeMagnitudes if self.type == "f64" else Magnitudes
        return oracle.attention(**self.values, head_type=head_type)


class Magnitudes(oracle.Head):
    """The same sums over the absolute values of their terms."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        given = arguments[-2]
        self.out = self.zp @ np.abs(self.v)
        if given is not None:
            self.out = self.out + self.given_p * np.abs(given[0])

    def backward(self, dout, dlse):
        dout = np.abs(dout)
        delta = (dout * self.out).sum(axis=1) + np.abs(dlse)
        dp = dout @ np.abs(self.v.T)
        ds = self.p * ((dp if self.z is None else self.z * dp) + delta[:, None])
        dr = abs(self.scale) * (ds * self.slope if self.softcap > 0 else ds)
        dsink = None if self.sink_p is None else (self.sink_p * delta).sum()
        return dr @ np.abs(self.k), dr.T @ np.abs(self.q), self.zp.T @ dout, ds, dsink


class SlopeMagnitudes(Magnitudes):
    """For f64, in which the oracle's own slope under a softcap, 1 - tanh^2, loses what cancels."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.softcap > 0:
            self.slope = 2 - self.slope


def make(features, type, **base):
    """The case with these features; base overrides BASE. Every row of FEATURES may be combined."""
    spec = dict(BASE)
    for feature in features:
        spec |= FEATURES[feature]
    spec |= base
    rng = np.random.default_rng(zlib.crc32(repr((sorted(features), base)).encode()))
    batch, (heads, heads_kv), (rows, columns) = spec["batch"], spec["heads"], spec["sizes"]
    dim, dim_v, layout = spec["dim"], spec["dim_v"] or spec["dim"], spec["layout"]
    dtype = regard.DTYPES[type]
    inputs, values, options = {}, {"p": 0.0, "scale": spec.get("scale")}, {}

    def give(name, array, dtype=dtype, **how):
        stored = lay_out(regard.store(array, dtype), layout, **how)
        values[name] = regard.load(stored) if dtype.kind in "fV" else stored
        inputs[name] = stored

    if spec.get("packed"):
        # One sequence of full length, one without queries, one without keys, a short one.
        for side, length in (("q", rows), ("k", columns)):
            lengths = [length, 0 if side == "q" else 3, 5 if side == "q" else 0, length // 2]
            cu = np.concatenate([[0], np.cumsum(lengths)])
            give("cu_seqlens_" + side, cu, np.dtype(np.int32))
            options["max_seqlen_" + side] = values["max_seqlen_" + side] = length
        batch = 4
        used = {"q": [rows - 2, 0, 5, 3], "k": [columns - 3, 3, 0, columns // 2]}
        shape = {side: lambda h, d, side=side: (int(values["cu_seqlens_" + side][-1]), h, d)
                 for side in "qk"}
        lse_shape = heads, shape["q"](1, 1)[0]
    else:
        used = {"q": [rows - 4, rows, 0], "k": [columns, columns * 2 // 3, 7]}
        shape = {side: lambda h, d, s=length: (batch, h, s, d)
                 for side, length in (("q", rows), ("k", columns))}
        lse_shape = batch, heads, rows
    shared = not spec.get("packed")
    give("q", rng.standard_normal(shape["q"](heads, dim)))
    give("k", rng.standard_normal(shape["k"](heads_kv, dim)), shared_batch=shared)
    give("v", rng.standard_normal(shape["k"](heads_kv, dim_v)), shared_batch=shared)
    if spec.get("seqused"):
        give("seqused_q", np.resize(used["q"], batch), np.dtype(np.int32))
        give("seqused_k", np.resize(used["k"], batch), np.dtype(np.int32))

    def broadcast(pattern):
        letters = {"b": batch, "h": heads, "q": rows, "k": columns, 1: 1}
        return [letters[letter] for letter in pattern]

    if "bias" in spec:
        bias = rng.standard_normal(broadcast(spec["bias"]))
        if spec.get("bias_hides"):
            bias[rng.random(bias.shape) < 0.3] = -np.inf
            bias[..., 1, :] = -np.inf
        give("bias", bias, regard.DTYPES[spec.get("bias_type", type)])
    if "mask" in spec:
        give("mask", random_mask(rng, broadcast(spec["mask"])), np.dtype(bool))
    for name, count, side in (("row_spans", "spans", "q"), ("key_spans", "key_span_count", "k")):
        if name in spec:
            leading = broadcast(spec[name])
            if spec.get("packed"):
                leading = [leading[1], int(values["cu_seqlens_" + side][-1])]
            give(name, spans(rng, leading, spec[count], columns if side == "q" else rows),
                 np.dtype(np.int32))
    if "alibi" in spec:
        slopes = 2.0 ** -rng.integers(1, 7, broadcast(spec["alibi"]))
        give("alibi_slopes", slopes, np.dtype(np.float32))
    if "sink" in spec:
        give("sink", rng.standard_normal(heads), np.dtype(np.float32))
    positions = None
    if spec.get("positions"):
        first = rng.integers(0, 90, (batch, 1)) + 201 * np.arange(-(-rows // 128))
        give("q_positions", first, np.dtype(np.int32))
        positions = {"q_positions": first, "k_position": 64, "batch_begin": 3, "head_begin": 5}
        values["k_position"] = positions["k_position"]
        options |= {name: positions[name] for name in ("k_position", "batch_begin", "head_begin")}
    if "dropout" in spec:
        p, seed, offset = options["dropout"] = spec["dropout"]
        places = {} if positions is None else {
            "row_positions": oracle.row_positions(positions["q_positions"], batch, rows),
            **{name: positions[name] for name in ("k_position", "batch_begin", "head_begin")}}
        values |= {"p": philox.realised(p),
                   "keep": philox.keep_mask(p, seed, offset, batch, heads, rows, columns, **places)}
    for name in ("causal", "window", "softcap"):
        if name in spec:
            options[name] = values[name] = spec[name]
    if "scale" in spec:
        options["scale"] = spec["scale"]

    if spec.get("continued"):
        options["continue_from"] = 1
        values["given_out"] = rng.standard_normal(shape["q"](heads, dim_v)).astype(lse_type(type))
        values["given_lse"] = (3 + rng.standard_normal(lse_shape)).astype(lse_type(type))
        values["given_lse"][..., 2::5] = -np.inf  # also of a row that sees nothing
        values["given_lse"][..., 3::7] = 40

    wide = np.dtype(np.float32) if spec.get("f32_outputs") else dtype
    dout = lay_out(regard.store(rng.standard_normal(shape["q"](heads, dim_v)), wide), layout)
    values["dout"] = regard.load(dout)
    dlse = None
    if spec.get("dlse"):
        dlse = lay_out((32 * rng.standard_normal(lse_shape)).astype(lse_type(type)), layout)
        values["dlse"] = regard.load(dlse)
    return Case(type, spec, inputs, values, options, dout, dlse)


SHARED_FROM = 64  # rows from here on are alike, so that GPU tiles are hidden, full and partial


def random_mask(rng, shape):
    """Rows from SHARED_FROM on show, hide and mix whole blocks of keys; row 2 hides all keys."""
    mask = rng.random(shape) < 0.7
    block = 128 if shape[3] >= 256 else 64
    for n, shown in enumerate((True, False)):
        mask[:, :, SHARED_FROM:, n * block : (n + 1) * block] = shown
    if shape[2] > 1:
        mask[:, :, 2] = False
    return mask


def spans(rng, leading, count, length):
    """Random spans of indices below `length`: (*leading, 2 count). Some are empty, some overlap, some
    reach beyond both ends, and row 2 has none. Rows from SHARED_FROM on have those of the first."""
    middle = rng.integers(0, length, (*leading, count))
    reach = rng.integers(length // 4, length, (*leading, count))
    made = np.stack([middle - reach // 2, middle + reach // 2], axis=-1)
    if count > 1:
        made[..., -1, :] = rng.choice([[9, 3], [-7, -2], [2**31 - 5, 2**31 - 1]], (*leading,))
    made[..., 2, :, :] = [-2**31, -2**31]
    made[..., SHARED_FROM:, :, :] = made[..., SHARED_FROM : SHARED_FROM + 1, :, :]
    return made.reshape(*leading, 2 * count)


def lse_type(type):
    return np.dtype(np.float64 if type == "f64" else np.float32)


class Outputs(dict):
    """Named arrays in the case's layout, and what lay around their elements before a call: between
    them, and in bands before the first and behind the last."""

    def __init__(self):
        self.between = {}

    def add(self, name, shape, dtype, layout, start=None):
        content = sentinel(shape, dtype) if start is None else regard.store(start, dtype)
        array = lay_out(content, layout)
        self[name] = guards.guarded(array, room(array))
        self.between[name] = between(self[name])

    def keeps_between(self, name):
        return self.between[name] == between(self[name])


def between(array):
    """The bytes of the memory that array is a view of, with zeros for its own elements."""
    memory = room(array)
    copied = memory.copy()
    np.ndarray(array.shape, array.dtype, copied.data, array.ctypes.data - memory.ctypes.data,
               array.strides)[...] = 0
    return copied.tobytes()


def room(array):
    """The memory that array is a view of, as bytes."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def call(which, attention, *tensors, guard=False, **how):
    """regard.forward or regard.backward; guard: with a workspace between guard bands."""
    tensors, more = tensors[:-1], tensors[-1]
    if not guard:
        return getattr(regard, which)(attention, *tensors, **more, **how)
    room_given = guards.Workspace(regard.workspace(attention, which, **how))
    getattr(regard, which)(attention, *tensors, **more, **how, **room_given.arguments())
    return room_given.check(which)


def run(case, backend="", wanted=None, guard=False, **how):
    """Forward, then backward from the library's own out and lse. Returns its arrays by name."""
    layout, how = case.spec["layout"], how | {"backend": backend, "guard": guard}
    accumulate = bool(case.spec.get("accumulate"))
    rng = np.random.default_rng(5)
    results = Outputs()
    for name in ("out", "lse"):
        results.add(name, case.truth[name].shape, case.result_type(name), layout, held(case, name))
    for name in wanted or [name for name in case.truth if name not in ("out", "lse")]:
        shape = case.truth[name].shape
        results.add(name, shape, case.result_type(name), layout,
                    rng.standard_normal(shape) if accumulate else None)
    attention = case.attention()
    call("forward", attention, results["out"], results["lse"], {}, **how)
    case.start = {name: array.copy() for name, array in results.items()}
    gradients = {name: array for name, array in results.items() if name not in ("out", "lse")}
    inputs = [results["out"], results["lse"], case.dout, case.dlse]
    more = {"accumulate": accumulate, "gradients": gradients}
    if case.spec.get("delta"):
        more["delta"] = delta(case, results["out"])
        inputs[0] = inputs[3] = None
    call("backward", attention, *inputs, more, **how)
    return results


def held(case, name):
    """What out or lse holds before a call: a result over other keys, or None."""
    if not case.spec.get("continued"):
        return None
    return np.where(written(case, name), case.values["given_" + name], np.nan)


def delta(case, out):
    """dout . out - dlse of each row, as the library gets it."""
    products = np.einsum("...d,...d->...", case.values["dout"], np.where(
        written(case, "out"), regard.load(out), 0))
    found = products.T if case.spec.get("packed") else products
    found = found - case.values.get("dlse", 0)
    return lay_out(found.astype(lse_type(case.type)), case.spec["layout"])


def written(case, name):
    """Which elements of a result exist: rows of real sequences (all, for dbias and dsink)."""
    shape = case.truth[name].shape
    if name in ("dbias", "dsink"):
        return np.ones(shape, bool)
    side = "k" if name in ("dk", "dv") else "q"
    used = case.values.get("seqused_" + side)
    result = np.zeros(shape, bool)
    if case.spec.get("packed"):
        cu = case.values["cu_seqlens_" + side]
        for b in range(len(cu) - 1):
            stop = cu[b + 1] if used is None else cu[b] + used[b]
            result[(np.s_[:], np.s_[cu[b] : stop]) if name == "lse" else np.s_[cu[b] : stop]] = True
        return result
    for b in range(shape[0]):
        result[b, :, : shape[2] if used is None else used[b]] = True
    return result


def tolerance(case, name, dtype):
    """What a result of this type may be off, by rows: the rule of the chapter "Accuracy"."""
    want = case.truth[name]
    scores = 1 + np.abs(np.where(np.isfinite(case.truth["lse"]), case.truth["lse"], 0)).max(
        initial=0)
    # Scores and lse are f32 (f64 for f64): their rounding is an error of P in proportion.
    unit_score = UNIT["f64" if case.type == "f64" else "f32"]
    if name == "lse":
        return 64 * unit_score * scores
    unit = max(UNIT[case.type], UNIT[NAMES[dtype]])
    if case.type == "f64" and dtype == np.float64:
        unit *= 64  # the oracle's own sums are no better
    axis = -1 if want.ndim > 1 else None
    honest = np.where(written(case, name), np.abs(case.unfused[name].astype(np.float64) - want), 0)
    honest_rows = honest.max(axis=axis, keepdims=True, initial=0)
    honest_row = np.maximum(honest_rows, honest_rows.mean() if honest_rows.size else 0)
    size = case.size[name] + np.abs(want + added(case, name))
    floor = (4 * unit + (64 if case.type == "f64" else 1) * unit_score * scores) * size.max(
        axis=axis, keepdims=True, initial=0)
    return (2 if name == "out" else 3) * honest_row + floor + TINY[case.type]


def added(case, name):
    """What a gradient held that the call adds to; else 0."""
    if not case.spec.get("accumulate") or name in ("out", "lse") or name not in case.start:
        return 0
    return regard.load(case.start[name])


def compare(case, results):
    """Fails unless every result keeps the rule of the chapter "Accuracy"."""
    for name, array in results.items():
        if isinstance(results, Outputs):
            assert results.keeps_between(name), f"{name}: memory around its rows was written"
        where = written(case, name)
        start = added(case, name)
        got, want = regard.load(array), case.truth[name] + start
        outside = got[~where]
        kept = np.isnan(outside).all() if np.isscalar(start) else np.array_equal(
            outside, start[~where])
        assert kept, f"{name}: a row that is not real was written"
        limit = tolerance(case, name, array.dtype)
        if name == "lse":
            infinite = np.isinf(want)
            assert np.array_equal(got[where & infinite], want[where & infinite]), "lse: empty rows"
            where = where & ~infinite
        error = np.abs(got[where] - want[where])
        assert not np.isnan(error).any(), f"{name}: NaN"
        over = (error - np.broadcast_to(limit, want.shape)[where]).max(initial=-1)
        assert over <= 0, (
            f"{name}: error {error.max():.3g}, tolerance up to {np.max(limit):.3g}, "
            f"over by {over:.3g}")
