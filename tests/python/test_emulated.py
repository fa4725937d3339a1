"""The GPU's kernels on the emulated machine (tests/cuda/machine/README.md), against the oracle.

Needs REGARD_LIBRARY to name libregard_emulator.so. Kernels are compiled when they are first used, and
kept in REGARD_EMULATOR_CACHE.
"""

import functools
import itertools

import numpy as np
import pytest

import cases
import regard_ctypes as regard
from solve import close, normal, problem, solve, with_values
from selection import mostly_exhaustive, one_in

pytestmark = pytest.mark.skipif("emulated:mma" not in regard.backends(),
                                reason="REGARD_LIBRARY is not the emulator's")

TYPES = ["f16", "bf16", "f32", "f64"]
FAMILIES = ["mma", "simt", "wgmma"]
SHAPES = [{}, {"sizes": (70, 133), "dim": 40}, {"sizes": (40, 90), "dim": 128}]
ORDERS = ["mixed", "backward", "forward"]
EVERYTHING = ("bias_head", "sink", "grouped", "bottom_right", "window", "softcap", "scale", "mask",
              "alibi_batch", "dropout", "seqused", "value_size", "odd", "dlse", "gaps")


TYPES_OF = {"mma": ["f16", "bf16", "f32"], "simt": TYPES, "wgmma": ["f16", "bf16", "f32"]}


def runs(family, type):
    return type in TYPES_OF[family]


def is_copied(features):
    """What TMA cannot load; packed k and v are not broadcast over a batch."""
    return {"gaps", "reversed"} & set(features) or (
        "odd" in features and "padded" not in features) or (
        "stride_0" in features and "packed" not in features)


@functools.lru_cache(maxsize=8)
def made(features, type, shape):
    base = {} if "odd" in features else SHAPES[shape]
    if "value_size" in features:
        base = {name: value for name, value in base.items() if name != "dim"}
    return cases.make(features, type, **base)


def judge(case, backend, deterministic=False, **how):
    case.options["deterministic"] = int(deterministic)
    cases.compare(case, cases.run(case, backend, **how))


def each(*families):
    return pytest.mark.parametrize("type, family", [
        (type, family) for type in TYPES for family in families if runs(family, type)])


def refused(case, backend):
    """The reason why a backend does not take the forward pass; "" where it does."""
    results = cases.Outputs()
    results.add("out", case.dout.shape, case.dout.dtype, case.spec["layout"])
    try:
        regard.workspace(case.attention(), "forward", backend=backend)
        regard.forward(case.attention(), results["out"], backend=backend)
    except regard.RegardError as error:
        assert (error.argument, error.status) == ("backend", "unavailable"), str(error)
        return str(error)
    return ""


@pytest.mark.parametrize("wanted, type, family", one_in(12, (
    (wanted, type, family) for type in TYPES for family in ("mma", "simt") if runs(family, type)
    for wanted in ("dq", "dk", "dv", "dbias", "dsink"))))
def test_one_gradient_alone(wanted, type, family):
    case = made(("bias_head", "sink", "grouped", "bottom_right"), type, 0)
    judge(case, f"emulated:{family}", wanted=[wanted])


@pytest.mark.parametrize("type, family", one_in(2, (
    (type, family) for type in TYPES for family in ("mma", "simt") if runs(family, type))))
@pytest.mark.parametrize("deterministic", mostly_exhaustive([False, True], False))
def test_everything_at_once(deterministic, type, family):
    judge(made(EVERYTHING, type, 0), f"emulated:{family}+mixed", deterministic)


# ------------------------------------------------------------------------------------ few rows

# Decoding with each line of the table, with and without splits, which a cluster, the last block or
# combine merges; one tile of rows and two; heads that share keys in one tile, with the terms that
# tell them apart.
FEW_ROWS = [  # type, features, (Hq, Hkv), (Sq, Sk), D, Dv
    ("bf16", (), (2, 2), (1, 900), 128, 128),
    ("f16", ("sink", "dlse"), (4, 1), (4, 800), 128, 72),
    ("bf16", ("bottom_right", "window"), (6, 2), (5, 700), 64, 64),
    ("f16", ("alibi_batch", "mask", "softcap"), (6, 2), (3, 500), 96, 40),
    ("bf16", ("packed", "bottom_right"), (4, 2), (9, 300), 256, 136),
    ("f16", ("seqused", "dropout"), (4, 2), (6, 600), 48, 128),
    ("bf16", ("bias_head", "scale"), (4, 1), (4, 400), 128, 128),
    ("f16", ("bias_infinite", "mask_keys"), (2, 1), (8, 333), 256, 256),
    ("bf16", ("odd", "gaps", "f32_outputs"), (4, 1), (3, 500), 40, 24),
    ("bf16", ("sink",), (2, 1), (3, 700), 72, 72),
    ("f32", ("sink",), (2, 2), (1, 900), 128, 72),
    ("f32", ("packed", "bias_head", "dropout"), (4, 2), (9, 300), 40, 64),
    ("f16", ("sink", "dropout", "bottom_right"), (2, 1), (2, 6000), 64, 72),
    ("bf16", ("seqused", "mask", "alibi"), (6, 2), (5, 700), 64, 64)]


@pytest.mark.parametrize("type, features, heads, sizes, dim, dim_v", one_in(4, FEW_ROWS), ids=str)
@pytest.mark.parametrize("chip", mostly_exhaustive(["sm_90", "sm_86"], "sm_90"))
def test_few_rows(type, features, heads, sizes, dim, dim_v, chip):
    case = cases.make(features, type, sizes=sizes, heads=heads, dim=dim, dim_v=dim_v)
    judge_forward(case, f"emulated:mma+{chip}+mixed+{dim}")


# -------------------------------------------------------------------------- the wgmma kernel's own

WGMMA = "emulated:wgmma+sm_90"


def judge_forward(case, backend):
    results = cases.Outputs()
    wide = np.dtype(np.float32) if case.spec.get("f32_outputs") else case.dout.dtype
    results.add("out", case.dout.shape, wide, case.spec["layout"])
    results.add("lse", case.truth["lse"].shape, np.dtype(np.float32), case.spec["layout"])
    regard.forward(case.attention(), results["out"], results["lse"], backend=backend)
    cases.compare(case, results)


# One for each line of its table of tiles, with tails of rows, keys and columns.
TILES = [  # type, features, (Sq, Sk), D, Dv
    ("bf16", ("top_left",), (391, 300), 64, 64),
    ("f16", ("grouped", "dropout", "sink"), (129, 257), 48, 56),
    ("f16", ("packed", "bottom_right"), (193, 200), 64, 64),
    ("bf16", ("bottom_right", "window", "f32_outputs"), (130, 400), 72, 128),
    ("f16", ("seqused",), (65, 300), 192, 128),
    ("bf16", (), (64, 193), 136, 168),
    ("f16", ("softcap",), (63, 200), 256, 40),
    ("bf16", ("alibi", "bshd"), (70, 130), 256, 200),
    # Tiles of bias and mask next to them; where there is no room, or rows are not aligned, none.
    ("bf16", ("bias", "mask", "dropout"), (150, 304), 64, 64),
    ("f16", ("bias_infinite", "seqused", "top_left"), (200, 296), 128, 128),
    ("f16", ("bias_head", "mask_keys"), (70, 320), 256, 256),
    ("bf16", ("bias_head", "mask", "packed"), (70, 333), 64, 64),
    # f32, with any strides.
    ("f32", ("top_left", "gaps"), (191, 300), 64, 64),
    ("f32", ("grouped", "dropout", "sink", "reversed"), (129, 257), 48, 56),
    ("f32", ("packed", "bottom_right"), (193, 200), 128, 96),
    ("f32", ("bottom_right", "window"), (130, 400), 40, 128),
    ("f32", ("seqused", "softcap"), (65, 300), 128, 16),
    ("f32", ("alibi", "bshd", "stride_0"), (70, 130), 17, 33),
    ("f32", ("bias", "mask"), (150, 304), 128, 128),
    ("f32", ("bias_infinite", "seqused", "top_left"), (140, 296), 64, 64)]


@pytest.mark.parametrize("type, features, sizes, dim, dim_v", one_in(6, TILES), ids=str)
def test_tiles_of_warpgroups(type, features, sizes, dim, dim_v):
    base = {"heads": (2, 2)} if "grouped" not in features else {}
    case = cases.make(features, type, sizes=sizes, dim=dim, dim_v=dim_v, batch=2, **base)
    judge_forward(case, WGMMA + "+mixed+" + str(dim))


# Those that the model of their time chooses among.
MODELLED = [  # tiling, type, features, (Sq, Sk), D, Dv
    ("rows=192,keys=80,stages=4", "bf16", ("packed",), (391, 150), 64, 64),
    ("rows=192,keys=112,stages=3", "f16", ("window", "bshd"), (200, 230), 48, 40),
    ("rows=192,keys=96,stages=3", "bf16", ("bottom_right",), (193, 280), 64, 56),
    ("rows=128,keys=48,stages=4", "f16", ("bottom_right", "sink"), (140, 136), 128, 128),
    ("rows=128,keys=80,stages=3", "bf16", ("seqused", "alibi"), (150, 150), 96, 80),
    ("rows=128,keys=96,stages=3", "f16", (), (130, 280), 112, 128),
    ("rows=128,keys=48,stages=3", "bf16", ("packed", "top_left"), (140, 140), 192, 144),
    ("rows=128,keys=64,stages=3", "f16", ("f32_outputs",), (130, 330), 160, 160),
    ("rows=128,keys=48,stages=3", "f16", ("gaps",), (130, 200), 256, 208)]


@pytest.mark.parametrize("tiling, type, features, sizes, dim, dim_v", one_in(4, MODELLED), ids=str)
def test_modelled_tiles(tiling, type, features, sizes, dim, dim_v):
    case = cases.make(features, type, sizes=sizes, dim=dim, dim_v=dim_v, batch=2, heads=(2, 1))
    judge_forward(case, f"emulated:wgmma@{tiling}+sm_90+mixed+{dim}")


# More tiles than multiprocessors, so that blocks go on from one to the next past keys that only some
# of a tile's warpgroups see.
@pytest.mark.parametrize("order", mostly_exhaustive(ORDERS, "mixed"))
@pytest.mark.parametrize("features, sizes, tiling", one_in(3, [
    (("bottom_right", "window"), (200, 270), "rows=256,keys=64,stages=2"),
    (("top_left",), (256, 256), "rows=256,keys=64,stages=4"),
    (("top_left",), (128, 128), "rows=128,keys=32,stages=2")]), ids=str)
def test_keys_that_some_warpgroups_pass(features, sizes, tiling, order):
    case = cases.make(features, "bf16", sizes=sizes, dim=16, dim_v=16, batch=10, heads=(15, 15))
    judge_forward(case, f"emulated:wgmma@{tiling}+sm_90+{order}")


# Tiles of keys that take turns: of two tiles of rows, some of which not all of them see.
TURNS = [  # type, features, (Sq, Sk), D, Dv
    ("bf16", (), (330, 400), 128, 128),
    ("f16", ("top_left",), (520, 530), 64, 64),
    ("bf16", ("top_left",), (300, 700), 128, 96),
    ("f16", ("bottom_right", "grouped"), (600, 300), 128, 128),
    ("bf16", ("window", "bottom_right"), (450, 700), 64, 128),
    ("f16", ("window", "top_left"), (700, 450), 128, 64),
    ("bf16", ("packed", "bottom_right", "grouped"), (400, 500), 64, 64),
    ("f16", ("seqused", "top_left", "dropout"), (400, 500), 128, 128),
    ("bf16", ("positions", "top_left", "alibi"), (400, 700), 256, 256),
    ("bf16", ("softcap", "bottom_right", "dropout"), (140, 300), 128, 120),
    ("bf16", ("window",), (450, 390), 192, 160)]


@pytest.mark.parametrize("type, features, sizes, dim, dim_v", one_in(10, TURNS, 6), ids=str)
def test_key_tiles_take_turns(type, features, sizes, dim, dim_v):
    case = cases.make(features, type, sizes=sizes, dim=dim, dim_v=dim_v)
    judge(case, WGMMA + "+mixed+" + str(dim), deterministic=True)


@pytest.mark.filterwarnings("ignore")  # of NaN
@pytest.mark.parametrize("name", mostly_exhaustive(["q", "dout"], "q"))
@pytest.mark.parametrize("family, type, dim", one_in(3, [
    ("wgmma", "bf16", 64), ("wgmma", "f32", 64), ("wgmma", "bf16", 192), ("mma", "bf16", 64),
    ("wgmma", "f32", 128), ("mma", "f32", 64)]))
def test_a_gradient_is_added_once(family, type, dim, name):
    """A hidden NaN of q may reach dk of a key alone, one of dout dv: the other is there already."""
    given = problem(1, 1, 1, 70, 70, dim, type=type)
    given[name] = with_values(given[name], np.s_[:, :, 10], np.nan)
    got, want = (
        solve(**given, backend=backend, causal="top_left", accumulate=True,
              into={"d" + x: with_values(given[x], np.s_[:], 1) for x in "qkv"})
        for backend in (f"emulated:{family}+sm_90+mixed", "emulated:simt"))
    for gradient in ("dq", "dk", "dv"):
        assert np.isfinite(regard.load(want[gradient][:, :, 11:])).all()
        close(got[gradient], want[gradient], gradient)


@pytest.mark.parametrize("shift, stays", [(8, True), (4, False)])
def test_where_rows_must_begin(shift, stays):
    """Data a piece of 16 bytes further is fine; half a piece is refused, and mma's by default."""
    case = cases.make(("bottom_right",), "bf16", sizes=(70, 90), dim=64)
    room = cases.sentinel((case.inputs["k"].size + 64,), regard.BF16)
    start = (-room.ctypes.data // 2) % 8 + shift
    view = room[start : start + case.inputs["k"].size].reshape(case.inputs["k"].shape)
    view[...] = case.inputs["k"]
    case.inputs["k"] = view
    assert ("TMA cannot load" in refused(case, WGMMA)) != stays
    judge_forward(case, "emulated+sm_90" if not stays else WGMMA)


@pytest.mark.parametrize("features, dim, dim_v", [
    (("padded",), 26, 26), (("padded", "packed"), 20, 127), (("padded", "seqused"), 64, 15)], ids=str)
def test_rows_that_end_within_sixteen_bytes(features, dim, dim_v):
    """TMA writes sixteen bytes at a time: what follows a row must stay as it is."""
    judge(cases.make(features, "f16", sizes=(70, 90), dim=dim, dim_v=dim_v), WGMMA + "+mixed")


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_rows_of_other_sequences_are_not_felt(type):
    """Tiles reach over the ends of sequences: what is behind them must change no bit."""
    begins_q, begins_k = [0, 70, 70, 233, 260, 270], [0, 300, 303, 703, 703, 710]
    tables = {"cu_seqlens_q": np.array(begins_q[:-1], np.int32), "max_seqlen_q": 163,
              "cu_seqlens_k": np.array(begins_k[:-1], np.int32), "max_seqlen_k": 400}
    given = {"q": normal(270, 2, 64, type=type), "k": normal(710, 2, 64, type=type, seed=1),
             "v": normal(710, 2, 64, type=type, seed=2)}
    want = solve(**given, backend=WGMMA, **tables)
    for spoilt in (2, 3, 4):  # 4: the rows behind the last sequence
        part_q, part_k = (np.s_[begins[spoilt] : begins[spoilt + 1]]
                          for begins in (begins_q, begins_k))
        for query in (np.nan, 3e4):
            got = solve(q=with_values(given["q"], part_q, query), backend=WGMMA,
                        k=with_values(given["k"], part_k, np.nan),
                        v=with_values(given["v"], part_k, np.nan), **tables)
            for axis, name in enumerate(("out", "lse")):
                others = [np.delete(results[name], part_q, axis) for results in (got, want)]
                assert others[0].tobytes() == others[1].tobytes(), (name, spoilt, query)


# How Hopper's backward kernel makes dbias: clusters of 2, 3, 4, 6 and 8 batch entries that store it,
# clusters that add their sums, tiles that nothing sees, f32 sums where heads or the batch share it,
# and a bias of one row; with and without a warpgroup for it.
DBIASES = [  # type, features, B, (Sq, Sk), D, what else
    ("bf16", ("bias_shared",), 2, (150, 200), 64, {}),
    ("f16", ("bias_shared", "top_left", "deterministic"), 3, (130, 264), 128,
     {"bias_type": "bf16"}),
    ("bf16", ("bias_shared", "window", "grouped"), 4, (200, 328), 64, {"bias_type": "f32"}),
    ("f16", ("bias_shared", "dropout"), 8, (70, 136), 64, {}),
    ("bf16", ("bias_shared",), 6, (70, 200), 128, {}),
    ("bf16", ("bias_shared", "top_left"), 8, (130, 136), 128, {}),
    ("f16", ("bias_shared",), 9, (70, 136), 64, {}),
    ("bf16", ("bias_both", "mask"), 4, (100, 152), 64, {}),
    ("bf16", ("bias_shared", "accumulate", "bottom_right"), 2, (100, 133), 40, {}),
    ("f16", ("bias", "top_left", "alibi"), 2, (150, 133), 128, {"bias_type": "bf16"}),
    ("bf16", ("bias_shared", "seqused"), 2, (150, 200), 64, {}),
    ("f16", ("bias_shared", "packed", "dropout"), 2, (100, 136), 64, {}),
    ("bf16", ("bias_infinite", "grouped"), 2, (130, 264), 96, {}),
    ("f16", ("bias_shared", "dropout", "top_left"), 4, (130, 264), 96, {}),
    ("f16", ("bias_keys", "bottom_right"), 2, (150, 200), 64, {})]


@pytest.mark.parametrize("type, features, batch, sizes, dim, more", one_in(6, DBIASES), ids=str)
def test_the_bias_has_its_gradient_from_warpgroups(type, features, batch, sizes, dim, more):
    deterministic = "deterministic" in features
    features = tuple(feature for feature in features if feature != "deterministic")
    case = cases.make(features, type, batch=batch, sizes=sizes, dim=dim, **more)
    wanted = [name for name in case.truth if name not in ("out", "lse")]
    judge(case, f"{WGMMA}+mixed+{batch}", deterministic, wanted=wanted)


# A row keeps the reference of its first block of keys while sums stay below 2^40 (bf16) or 2^14
# (f16) of it; else the block is computed again. These are scores over groups of keys, in steps
# around those bounds and far beyond, each row its own.
STEPS = [-1e4, -300, -28, -27.5, -10, -9.5, 0, 0, 9.5, 9.75, 10, 27.5, 27.75, 28, 300, 1e4]


def runaway(rng, shape):
    kind = rng.integers(4)
    if kind == 0:  # whatever comes
        return rng.choice(STEPS, shape)
    if kind == 1:  # ever larger, from the last block to the first: in every block of keys
        return np.cumsum(np.abs(rng.choice(STEPS[2:-1], shape)), axis=-1)[..., ::-1]
    if kind == 2:  # ever smaller
        return np.cumsum(np.abs(rng.choice(STEPS[2:-1], shape)), axis=-1)
    return np.repeat(rng.choice([-5e4, 0, 5e4], shape[:-1] + (1,)), shape[-1], -1)  # large, even


def with_scores(case, levels, group):
    """q and k such that a score is the level of its row and group of keys, plus a little."""
    groups = levels.shape[-1]
    rng = np.random.default_rng(groups)
    q, k = (rng.standard_normal(case.inputs[name].shape) / 8 for name in "qk")
    q[..., :groups] = levels
    k[..., :groups] = np.arange(k.shape[2])[:, None] // group == np.arange(groups)
    for name, array in (("q", q), ("k", k)):
        case.inputs[name] = regard.store(array, case.inputs[name].dtype)
        case.values[name] = regard.load(case.inputs[name])
    case.options["scale"] = case.values["scale"] = 1.0


@pytest.mark.filterwarnings("ignore:overflow")  # gradients, which are not asked for
@pytest.mark.parametrize("features, type", one_in(6, itertools.product(
    [(), ("bottom_right", "window"), ("mask",), ("alibi", "sink"), ("bias",),
     ("softcap", "dropout")], ["f16", "bf16", "f32"])), ids=str)
@pytest.mark.parametrize("turn", mostly_exhaustive(range(8), 1))
def test_rising_scores(turn, features, type):
    rng = np.random.default_rng([turn, len(features), TYPES.index(type)])
    more = {"window": (400, 30)} if "window" in features else {}
    more |= {"softcap": 1e4} if "softcap" in features else {}
    group = [16, 43, 128][turn % 3]
    case = cases.make(features, type, batch=1, sizes=(140, 600), dim=64, **more)
    if type == "bf16" and turn % 2:
        case.values["v"] = case.values["v"] * 2.0**75
        case.inputs["v"] = regard.store(case.values["v"], case.inputs["v"].dtype)
    with_scores(case, runaway(rng, (1, 2, 140, -(-600 // group))), group)
    judge_forward(case, WGMMA + "+mixed+" + str(turn))


@pytest.mark.parametrize("bias", mostly_exhaustive(["f16", "bf16", "f32"], "f32"))
@pytest.mark.parametrize("type, features", one_in(2, itertools.product(
    ["f16", "bf16"], [("bias",), ("bias_infinite", "top_left"), ("bias", "mask")])), ids=str)
@pytest.mark.parametrize("turn", mostly_exhaustive(range(4), 0))
def test_rising_scores_with_a_bias(turn, features, type, bias):
    """The block that is computed again needs the bias whose place the next one's has taken."""
    kind = TYPES.index(type) + TYPES.index(bias) + len(features)
    turn = (turn + kind) % 4
    rng = np.random.default_rng([turn, kind])
    # Rows of 600 keys come as TMA tiles (f32: by bulk copies; of 604 keys: by the lanes); others are
    # read where they are.
    keys = [600, 604, 603][turn % 3]
    case = cases.make(features, type, batch=1, sizes=(140, keys), dim=64, bias_type=bias)
    levels = runaway(rng, (1, 1, 140, -(-keys // 43))).clip(-6e4, 6e4).repeat(43, -1)
    values = case.values["bias"] + levels[..., :keys]
    case.inputs["bias"] = regard.store(values, regard.DTYPES[bias])
    case.values["bias"] = regard.load(case.inputs["bias"])
    judge_forward(case, WGMMA + "+mixed+" + str(turn))


@pytest.mark.filterwarnings("ignore")  # gradients, which are not asked for
@pytest.mark.parametrize("features, name, sizes", one_in(9, itertools.product(
    [(), ("top_left",), ("packed",)], "qkv", [(-6, 6), (-37, -30), (-44, -20), (8, 12)])), ids=str)
def test_f32_of_any_size(features, name, sizes):
    """Rows of f32 from denormal to huge next to one another: each as exact as if it were alone."""
    low, high = sizes
    # Logits of some ten to the power of half of the range, whatever their size.
    scale = 1.0 if name == "v" else 0.2 * 10.0 ** -((low + high) / 2)
    case = cases.make(features, "f32", batch=1, sizes=(140, 200), dim=32, scale=scale)
    values = case.values[name]
    rng = np.random.default_rng([abs(high), "qkv".index(name), len(features)])
    factors = 10.0 ** rng.uniform(low, high, values.shape[:-1] + (1,))
    case.inputs[name] = regard.store(values * factors, case.inputs[name].dtype)
    case.values[name] = regard.load(case.inputs[name])
    judge_forward(case, WGMMA + "+mixed")


@pytest.mark.parametrize("name, spoilt", one_in(3, itertools.product(
    "qkv", [np.nan, np.inf, -np.inf, 3e38])))
def test_f32_that_is_not_finite(name, spoilt):
    """What one row holds is not felt by rows that do not see it."""
    given = {n: normal(1, 2, 150, 64, type="f32", seed=i) for i, n in enumerate("qkv")}
    want = solve(**given, backend="emulated:simt", causal="top_left")
    given[name] = with_values(given[name], np.s_[:, :, 77], spoilt)
    results = []
    for backend in (WGMMA, "emulated:simt"):
        got = solve(**given, backend=backend, causal="top_left")
        rows = np.s_[:, :, [i for i in range(150) if i < 77 or (name == "q" and i > 77)]]
        error = np.abs(got["out"][rows] - want["out"][rows]).max()
        assert error < 2e-6, (backend, error)
        results.append(got["out"])
    # Rows that see it: the same of them are not finite, the others are as exact.
    finite = np.isfinite(results[0])
    assert np.array_equal(finite, np.isfinite(results[1]))
    size = np.abs(results[1][finite]).max(initial=1)
    assert np.abs(results[0][finite] - results[1][finite]).max(initial=0) < 4e-6 * size


@pytest.mark.parametrize("scale", [1.3e-6, 7.9e-5])
def test_f32_of_tiny_queries_and_huge_keys(scale):
    """No factor on the way from products to logits is rounded as a denormal."""
    given = {"q": normal(1, 1, 70, 128, type="f32") * np.float32(2.0 ** -114),
             "k": normal(1, 1, 90, 128, type="f32", seed=1) * np.float32(2.0 ** 124),
             "v": normal(1, 1, 90, 128, type="f32", seed=2)}
    got, want = (solve(**given, backend=name, scale=scale) for name in (WGMMA, "emulated:simt"))
    assert np.abs(got["out"] - want["out"]).max() < 1e-5


@pytest.mark.parametrize("heads, sizes", [((8, 1), (2, 6000)), ((1, 1), (64, 3000))], ids=str)
def test_scores_that_are_not_numbers(heads, sizes):
    """A NaN in a query reaches its own row's results, however its keys are split; and no other's."""
    given = {"q": normal(1, heads[0], sizes[0], 64, type="f16"),
             "k": normal(1, heads[1], sizes[1], 64, type="f16", seed=1),
             "v": normal(1, heads[1], sizes[1], 64, type="f16", seed=2)}
    given["q"][0, 0, 1, 5] = np.nan
    got = solve(**given, backend="emulated:mma+sm_90")
    for name in ("out", "lse"):
        spoilt = np.isnan(np.asarray(got[name], np.float64))
        assert spoilt[0, 0, 1].all(), name
        spoilt[0, 0, 1] = False
        assert not spoilt.any(), name


@pytest.mark.parametrize("bits", [0x7fffffff, 0x7f800001, 0xffffffff], ids=hex)
@pytest.mark.parametrize("precision", [0, 1])
def test_no_nan_of_f32_is_lost(bits, precision):
    """Rounding to TF32 carries into the sign of some, and the tensor cores read no low bits of others."""
    given = {name: normal(1, 1, 40, 64, type="f32", seed=n) for n, name in enumerate("qkv")}
    given["q"][0, 0, 1, 5] = np.uint32(bits).view(np.float32)
    got = solve(**given, backend="emulated:mma+sm_80", precision=precision)
    spoilt = np.isnan(got["out"]).all(axis=-1)[0, 0]
    assert spoilt[1] and spoilt.sum() == 1
