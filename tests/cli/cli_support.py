"""Runs the tool, writes and reads its files, and says what attention must give.

The binary is the one that REGARD_CLI names (default: build/release/cli/regard).
"""

import json
import os
import pathlib
import struct
import subprocess

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLI = os.environ.get("REGARD_CLI", str(ROOT / "build/release/cli/regard"))


def run(*arguments, cwd=None, timeout=300):
    return subprocess.run([CLI, *map(str, arguments)], capture_output=True, text=True, cwd=cwd,
                          timeout=timeout, errors="replace")


def fine(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(*arguments, **options):
    """Runs what must be refused; returns the message, which is never empty."""
    done = run(*arguments, **options)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stderr.startswith("regard: ") or "\nregard: " in done.stderr, done.stderr
    return done.stderr


DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bool": "BOOL", "int32": "I32",
          "int64": "I64"}


def safetensors_bytes(arrays):
    header, data = {}, b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": DTYPES[str(array.dtype)], "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return with_header(json.dumps(header).encode(), data)


def with_header(text, data=b""):
    return struct.pack("<Q", len(text)) + text + data


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    names = {v: k for k, v in DTYPES.items()}
    arrays = {}
    for name, entry in json.loads(raw[8:8 + length]).items():
        begin, end = entry["data_offsets"]
        data = raw[8 + length + begin:8 + length + end]
        if entry["dtype"] == "BF16":
            wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            arrays[name] = wide.view(np.float32).reshape(entry["shape"])
        else:
            arrays[name] = np.frombuffer(data, names[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def attention(q, k, v, dout=None, causal=None, bias=None, mask=None, sink=None, window=(-1, -1),
              softcap=0.0, scale=None):
    """Float64 attention of (B, H, S, D) arrays, by whole matrices; returns a dict."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k_wide, v_wide = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * q @ k_wide.swapaxes(-1, -2)
    slope = np.ones_like(s)
    if softcap:
        t = np.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    if bias is not None:
        s = s + bias.astype(np.float64)
    rows, columns = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])[None, :]
    diagonal = rows + (0 if causal == "top-left" else s.shape[-1] - s.shape[-2])
    left, right = window
    right = 0 if causal else right
    visible = np.ones(s.shape, bool)
    if left >= 0:
        visible &= columns >= diagonal - left
    if right >= 0:
        visible &= columns <= diagonal + right
    if mask is not None:
        visible &= mask
    s = np.where(visible, s, -np.inf)
    everything = s
    if sink is not None:
        column = np.broadcast_to(sink.astype(np.float64)[None, :, None, None], s.shape[:3] + (1,))
        everything = np.concatenate([s, column], -1)
    top = everything.max(-1, keepdims=True, initial=-np.inf)
    safe = np.where(np.isinf(top), 0, top)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(everything - safe).sum(-1)) + safe[..., 0]
    p = np.where(visible, np.exp(s - np.where(np.isinf(lse), 0, lse)[..., None]), 0)
    out = p @ v_wide
    result = {"out": out, "lse": lse}
    if dout is None:
        return result
    dout = dout.astype(np.float64)
    delta = (dout * out).sum(-1, keepdims=True)
    ds = p * (dout @ v_wide.swapaxes(-1, -2) - delta)
    if bias is not None:
        dbias = ds
        for axis in range(4):
            full = (1,) * (4 - bias.ndim) + bias.shape
            if full[axis] == 1:
                dbias = dbias.sum(axis, keepdims=True)
        result["dbias"] = dbias.reshape(bias.shape)
    if sink is not None:
        share = np.exp(sink[None, :, None] - lse)
        result["dsink"] = -(share * delta[..., 0]).sum((0, 2))
    ds = ds * slope * scale
    fold = (q.shape[0], k.shape[1], group)
    result["dq"] = ds @ k_wide
    result["dk"] = (ds.swapaxes(-1, -2) @ q).reshape(*fold, *k.shape[2:]).sum(2)
    result["dv"] = (p.swapaxes(-1, -2) @ dout).reshape(*fold, *v.shape[2:]).sum(2)
    return result


def problem(dtype=np.float32, shape=(2, 4, 33, 24), heads_kv=2, len_k=41, dim_v=16, seed=1):
    rng = np.random.default_rng(seed)
    batch, heads, len_q, dim = shape
    draw = lambda *sizes: rng.standard_normal(sizes).astype(dtype)  # noqa: E731
    return {"q": draw(batch, heads, len_q, dim), "k": draw(batch, heads_kv, len_k, dim),
            "v": draw(batch, heads_kv, len_k, dim_v), "dout": draw(batch, heads, len_q, dim_v)}


def assert_close(got, want, tolerance):
    for name, wanted in want.items():
        assert got[name].shape == wanted.shape, name
        finite = np.isfinite(wanted)
        assert np.array_equal(np.isfinite(got[name]), finite), name
        error = np.abs(got[name].astype(np.float64)[finite] - wanted[finite])
        size = max(1.0, np.abs(wanted[finite]).max(initial=0))
        assert error.max(initial=0) <= tolerance * size, (name, error.max())
