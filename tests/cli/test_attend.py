"""`regard attend` against whole-matrix float64 attention, for every kind of file and layout."""

import re
import sys

import numpy as np
import pytest
from cli_support import (ROOT, assert_close, attention, fine, problem, read_safetensors, refused,
                         run, safetensors_bytes)

sys.path.insert(0, str(ROOT / "tests/python"))
import oracle  # noqa: E402

TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5, np.float16: 6e-3}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_attend_safetensors(tmp_path, dtype):
    arrays = problem(dtype)
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(arrays))
    fine("attend", "in.safetensors", "--causal", "--backward", "--out", "out.safetensors",
         cwd=tmp_path)
    got = read_safetensors(tmp_path / "out.safetensors")
    assert set(got) == {"out", "lse", "dq", "dk", "dv"}
    assert_close(got, attention(**arrays, causal="bottom-right"), TOLERANCE[dtype])
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []


def test_attend_npy_with_everything(tmp_path):
    arrays = problem()
    rng = np.random.default_rng(5)
    bias = rng.standard_normal((4, 1, 41)).astype(np.float16)
    mask = rng.random((2, 1, 33, 41)) < 0.7
    mask[0, 0, 3] = False
    sink = rng.standard_normal(4).astype(np.float32)
    for name, array in {**arrays, "bias": bias, "mask": mask, "sink": sink}.items():
        np.save(tmp_path / f"{name}.npy", array)
    options = ["--bias", "bias.npy", "--mask", "mask.npy", "--sink", "sink.npy", "--dout",
               "dout.npy", "--window", "20,5", "--softcap", "4", "--scale", "0.3"]
    fine("attend", "q.npy", "k.npy", "v.npy", *options, "--backward", "--out", "results",
         cwd=tmp_path)
    got = {p.stem: np.load(p) for p in (tmp_path / "results").iterdir()}
    want = attention(**arrays, bias=bias, mask=mask, sink=sink, window=(20, 5), softcap=4,
                     scale=0.3)
    assert got.pop("dbias").dtype == np.float16
    want.pop("dbias")
    assert_close(got, want, 2e-5)
    assert np.all(got["out"][0, :, 3] == 0)


def test_attend_layouts_and_ranks_agree(tmp_path):
    arrays = problem(shape=(1, 2, 17, 8), heads_kv=2, len_k=17, dim_v=8)
    want = attention(arrays["q"], arrays["k"], arrays["v"], causal="top-left")
    for rank, layout in [(4, "bhsd"), (4, "bshd"), (3, "bhsd"), (3, "bshd")]:
        for name in "qkv":
            array = arrays[name] if layout == "bhsd" else arrays[name].swapaxes(1, 2)
            np.save(tmp_path / f"{name}.npy", np.ascontiguousarray(array.reshape(array.shape[4 - rank:])))
        fine("attend", "q.npy", "k.npy", "v.npy", "--causal=top-left", "--layout", layout, "--out",
             "results", cwd=tmp_path)
        out = np.load(tmp_path / "results/out.npy")
        assert out.ndim == rank
        out = out.reshape((1,) * (4 - rank) + out.shape)
        out = out if layout == "bhsd" else out.swapaxes(1, 2)
        assert_close({"out": out}, {"out": want["out"]}, 2e-5)
        assert np.load(tmp_path / "results/lse.npy").ndim == rank - 1


def test_attend_packed(tmp_path):
    rng = np.random.default_rng(3)
    begins_q, begins_k = np.array([0, 5, 5, 14]), np.array([0, 7, 9, 20])
    q, k = rng.standard_normal((14, 2, 8)), rng.standard_normal((20, 1, 8))
    v = rng.standard_normal((20, 1, 8))
    for name, array in {"q": q, "k": k, "v": v, "cq": begins_q, "ck": begins_k}.items():
        np.save(tmp_path / f"{name}.npy", array)
    fine("attend", "q.npy", "k.npy", "v.npy", "--cu-seqlens-q", "cq.npy", "--cu-seqlens-k",
         "ck.npy", "--causal", "--out", "results", cwd=tmp_path)
    out = np.load(tmp_path / "results/out.npy")
    for b in range(3):
        rows, keys = slice(*begins_q[b:b + 2]), slice(*begins_k[b:b + 2])
        want = attention(*(x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])),
                         causal="bottom-right")["out"]
        assert np.allclose(out[rows], want[0].swapaxes(0, 1), atol=1e-12)


def test_attend_bf16_and_compare(tmp_path):
    arrays = problem()
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(arrays))
    text = fine("attend", "in.safetensors", "--type", "bf16", "--backward", "--compare",
                "--explain", "--repeat", 2, "--out", "out.safetensors", cwd=tmp_path)
    assert "errors against float64" in text and "unfused" in text and "workspace" in text
    rows = re.findall(r"^(out|lse|dq|dk|dv) +(\S+) +(\S+) +(\S+) +(\S+)$", text, re.M)
    assert [row[0] for row in rows] == ["out", "lse", "dq", "dk", "dv"]
    for row in rows:
        assert float(row[1]) < 1e-2, row
    got = read_safetensors(tmp_path / "out.safetensors")
    assert_close(got, attention(**arrays), 0.05)
    message = refused("attend", "in.safetensors", "--type", "bf16", "--out", "folder", cwd=tmp_path)
    assert "bf16" in message and ".safetensors" in message


def spans(rng, shape, end):
    return np.sort(rng.integers(0, end + 1, (*shape, 2)), axis=-1)


def extra_tensors():
    """All tensors that `regard attend` has options for, except dout, of types that it takes."""
    rng = np.random.default_rng(7)
    return {
        "bias": rng.standard_normal((1, 4, 1, 41)).astype(np.float32),
        "mask": rng.random((2, 1, 33, 41)) < 0.8,
        "row_spans": spans(rng, (2, 1, 33), 41).astype(np.int32),
        "key_spans": spans(rng, (1, 4, 41), 33),
        "sink": rng.standard_normal(4).astype(np.float32),
        "alibi_slopes": rng.random((2, 4)).astype(np.float32),
        "dlse": rng.standard_normal((2, 4, 33)).astype(np.float32),
        "cu_seqlens_q": np.array([0, 15, 33], np.int32),
        "cu_seqlens_k": np.array([0, 19, 41]),
        "seqused_q": np.array([9, 15], np.int32),
        "seqused_k": np.array([19, 17]),
        "q_positions": np.array([[8], [20]], np.int32),
    }


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
@pytest.mark.parametrize("name", [*extra_tensors(), "everything"])
def test_attend_with_each_tensor(tmp_path, name, kind):
    given = problem()
    packed = name.startswith("cu_seqlens")
    extras = extra_tensors()
    if name == "everything":
        used = [one for one in extras if not one.startswith("cu_seqlens")]
    else:
        used = ["cu_seqlens_q", "cu_seqlens_k"] if packed else [name]
    if packed:
        given = {one: array[0].swapaxes(0, 1).copy() for one, array in given.items()}
    given |= {one: extras[one] for one in used}
    files = ["in.safetensors"]
    if kind == "safetensors":
        (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(given))
    else:
        files = ["q.npy", "k.npy", "v.npy"]
        for one, array in given.items():
            np.save(tmp_path / f"{one}.npy", array)
            if one not in ("q", "k", "v"):
                files += ["--" + one.replace("_", "-"), f"{one}.npy"]
    fine("attend", *files, "--causal=top-left", "--backward", "--out", "out.safetensors",
         cwd=tmp_path)
    lengths = {"max_seqlen_q": 18, "max_seqlen_k": 22} if packed else {}
    want = oracle.attention(**given, **lengths, causal="top_left")
    if "seqused_q" in given:
        want["lse"][0, :, 9:] = want["lse"][1, :, 15:] = -np.inf  # which the library does not write
    assert_close(read_safetensors(tmp_path / "out.safetensors"), want, 2e-5)


def test_attend_says_that_dout_is_ones(tmp_path):
    arrays = problem()
    del arrays["dout"]
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(arrays))
    done = run("attend", "in.safetensors", "--backward", "--out", "o.safetensors", cwd=tmp_path)
    assert done.returncode == 0 and "ones" in done.stderr
    want = attention(**arrays, dout=np.ones((2, 4, 33, 16)))
    assert_close(read_safetensors(tmp_path / "o.safetensors"), want, 2e-5)


def test_attend_mentions_what_it_ignores(tmp_path):
    arrays = {**problem(), "biass": np.zeros(3, np.float32)}
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(arrays))
    done = run("attend", "in.safetensors", cwd=tmp_path)
    assert done.returncode == 0 and "not used: biass" in done.stderr
