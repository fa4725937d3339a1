"""Truncated, corrupt and hostile .npy and .safetensors files: a clear message, never a crash."""

import json
import random
import struct

import numpy as np
import pytest
from cli_support import fine, refused, run, with_header


def small_npy(version=(1, 0), descr="<f4", fortran="False", shape="(1, 1, 2, 4)", data=32,
              extra=""):
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, {extra}}}\n"
    length = struct.pack("<H" if version[0] == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text.encode("latin1") + b"\0" * data


def attend_npy(tmp_path, q, timeout=60):
    (tmp_path / "q.npy").write_bytes(q)
    (tmp_path / "k.npy").write_bytes(small_npy())
    return run("attend", "q.npy", "k.npy", "k.npy", cwd=tmp_path, timeout=timeout)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_versions(tmp_path, version):
    assert attend_npy(tmp_path, small_npy(version)).returncode == 0


HOSTILE_NPY = {
    "magic": (b"PK\x03\x04" + b"\0" * 100, "magic"),
    "empty": (b"", "too short"),
    "version": (small_npy((4, 0)), "version"),
    "minor version": (small_npy((1, 7)), "version"),
    "header length": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", "header length"),
    "descr missing": (b"\x93NUMPY\x01\x00\x03\x00{ }" + b"\0" * 8, "descr"),
    "big endian": (small_npy(descr=">f4"), "big endian"),
    "complex": (small_npy(descr="<c8", data=64), "descr"),
    "object": (small_npy(descr="|O"), "descr"),
    "fortran": (small_npy(fortran="True"), "fortran_order"),
    "fortran word": (small_npy(fortran="Maybe"), "fortran_order"),
    "negative": (small_npy(shape="(1, -1, 2, 4)"), "shape"),
    "overflow": (small_npy(shape="(4294967296, 4294967296, 2, 4)"),
                 "shape = 4294967296x4294967296x2x4: the sizes multiply"),
    "beyond 64 bits": (small_npy(shape="(99999999999999999999, 1, 2, 4)"), "shape"),
    "huge": (small_npy(shape="(1, 1000000, 1000000, 4)"), "shape"),
    "rank": (small_npy(shape="(1, 1, 1, 1, 8)"), "shape"),
    "short data": (small_npy(data=31), "shape"),
    "long data": (small_npy(data=33), "shape"),
    "twice": (small_npy(extra="'shape': (8,), "), "repeated"),
    "unknown key": (small_npy(extra="'order': 'C', "), "unknown"),
    "structured": (small_npy().replace(b"'<f4'", b"[1,2]"), "structured"),
    "zeros with huge head": (small_npy(shape="(1, 1, 0, 2147483647)", data=0), ""),
    "huge batch of nothing": (small_npy(shape="(9000000000000000000, 0, 3, 4)", data=0),
                              "shape = 9000000000000000000x0x3x4: the sizes multiply"),
}


@pytest.mark.parametrize("name", HOSTILE_NPY)
def test_hostile_npy(tmp_path, name):
    content, word = HOSTILE_NPY[name]
    done = attend_npy(tmp_path, content)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert word in done.stderr
    if word:
        assert "q.npy: " in done.stderr


def test_npy_truncated_anywhere(tmp_path):
    whole = small_npy()
    for size in range(len(whole)):
        done = attend_npy(tmp_path, whole[:size])
        assert done.returncode == 2 and "q.npy" in done.stderr, (size, done)


def test_npy_bit_flips(tmp_path):
    whole, rng = small_npy(), random.Random(1)
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        done = attend_npy(tmp_path, bytes(content))
        assert done.returncode in (0, 2), (bytes(content), done)
        assert done.returncode == 0 or "regard: " in done.stderr


def test_npy_integers_that_do_not_fit(tmp_path):
    arrays = {"q": np.zeros((4, 1, 8), np.float32), "cu": np.array([0, 1 << 40])}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    message = refused("attend", "q.npy", "q.npy", "q.npy", "--cu-seqlens-q", "cu.npy",
                      "--cu-seqlens-k", "cu.npy", cwd=tmp_path)
    assert "cu.npy" in message and "1099511627776" in message


CONTENTS = [("mask", np.int64, "bool"), ("mask", np.uint8, "bool"), ("mask", np.float32, "bool"),
            ("bias", bool, "float32"), ("q", np.int64, "float32"), ("q", np.uint16, "float32"),
            ("seqused_k", np.float32, "int32"), ("cu_seqlens_q", np.uint64, "int32"),
            ("q_positions", np.float32, "int32")]


@pytest.mark.parametrize(("tensor", "held", "wanted"), CONTENTS)
def test_a_file_of_the_wrong_type_names_it_and_the_way_out(tmp_path, tensor, held, wanted):
    """Its own type, not that to which it would be converted."""
    for name in ("q", "k", "v"):
        np.save(tmp_path / f"{name}.npy", np.zeros((1, 1, 4, 8), np.float32))
    np.save(tmp_path / f"{tensor}.npy", np.zeros((4, 4), held))
    extra = [] if tensor == "q" else ["--" + tensor.replace("_", "-"), f"{tensor}.npy"]
    message = refused("attend", "q.npy", "k.npy", "v.npy", *extra, cwd=tmp_path)
    assert f"{tensor}.npy: " in message and f"{tensor} holds {np.dtype(held)}," in message
    assert f"save {tensor}.astype(" in message and wanted in message


def test_a_mask_of_integers_in_safetensors_is_named(tmp_path):
    content = packed(three(mask=entry("I64", (1, 1, 2, 2), (96, 128))), 128)
    (tmp_path / "x.safetensors").write_bytes(content)
    message = refused("attend", "x.safetensors", cwd=tmp_path)
    assert "mask holds I64, but must hold bool: save mask.astype(bool)" in message


def entry(dtype="F32", shape=(1, 1, 2, 4), offsets=(0, 32)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def three(**changed):
    entries = {"q": entry(), "k": entry(offsets=(32, 64)), "v": entry(offsets=(64, 96))}
    entries.update(changed)
    return entries


def packed(entries, data=96):
    return with_header(json.dumps(entries).encode(), b"\0" * data)


HOSTILE_SAFETENSORS = {
    "empty": (b"", "too short"),
    "length": (struct.pack("<Q", 1 << 63) + b"{}", "header length"),
    "length beyond file": (struct.pack("<Q", 100) + b"{}", "header length"),
    "not json": (with_header(b"{]"), "JSON"),
    "not utf8": (with_header(b'{"\xff\xfe": 1}'), "header"),
    "list": (with_header(b"[1]"), "header"),
    "deep": (with_header(b'{"q":' + b"[" * 100000), "q"),
    "deep objects": (with_header(b'{"q":' * 50000), ""),
    "number": (with_header(b'{"q": 5}'), "number"),
    "null": (with_header(b'{"q": null}'), "null"),
    "missing": (packed({"q": entry()}, 32), "k: is missing"),
    "no dtype": (packed({"q": {"shape": [8], "data_offsets": [0, 32]}}, 32), "dtype"),
    "dtype number": (with_header(b'{"q": {"dtype": 4}}'), "dtype"),
    "dtype unknown": (packed(three(q=entry("F8_E4M3", (1, 1, 4, 8)))), "F8_E4M3"),
    "dtype u8": (packed(three(q=entry("U8", (1, 1, 4, 8)))), "U8"),
    "negative shape": (packed(three(q=entry(shape=(1, -1, 2, 4)))), "shape"),
    "negative offset": (packed(three(q=entry(offsets=(-1, 31)))), "data_offsets"),
    "fraction": (packed(three(q=entry(shape=(1.5, 1, 2, 4)))), "shape"),
    "shape overflow": (packed(three(q=entry(shape=(1 << 62, 1 << 62, 16, 4)))), "shape"),
    "shape too large": (packed(three(q=entry(shape=(1, 1, 2, 5)))), "shape"),
    "past the end": (packed(three(v=entry(offsets=(64, 1 << 60)))), "data_offsets"),
    "reversed": (packed(three(q=entry(offsets=(32, 0)))), "data_offsets"),
    "overlap": (packed(three(v=entry(offsets=(40, 72)))), "overlap"),
    "hole": (packed(three(v=entry(offsets=(80, 112))), 112), "hole"),
    "trailing": (packed(three(), 97), "data"),
    "rank": (packed(three(q=entry(shape=(1, 1, 1, 2, 4)))), "shape"),
    "twice": (with_header(b'{"q": {}, "q": {}}'), "twice"),
    "field twice": (with_header(b'{"q": {"dtype": "F32", "dtype": "F32"}}'), "twice"),
    "field unknown": (with_header(b'{"q": {"type": "F32"}}'), "unknown"),
    "metadata number": (with_header(b'{"__metadata__": {"a": 1}}'), ""),
}


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_safetensors(tmp_path, name):
    content, word = HOSTILE_SAFETENSORS[name]
    (tmp_path / "x.safetensors").write_bytes(content)
    message = refused("attend", "x.safetensors", cwd=tmp_path)
    assert "x.safetensors" in message and word in message


def test_safetensors_with_metadata_is_fine(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(packed({"__metadata__": {"a": "b"}, **three()}))
    fine("attend", "x.safetensors", cwd=tmp_path)


def test_safetensors_truncated_anywhere(tmp_path):
    whole = packed(three())
    for size in range(len(whole)):
        (tmp_path / "x.safetensors").write_bytes(whole[:size])
        assert "x.safetensors" in refused("attend", "x.safetensors", cwd=tmp_path)


def test_safetensors_bit_flips(tmp_path):
    whole, rng = packed(three()), random.Random(2)
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (tmp_path / "x.safetensors").write_bytes(content)
        done = run("attend", "x.safetensors", cwd=tmp_path, timeout=60)
        assert done.returncode in (0, 2), (bytes(content), done)


@pytest.mark.parametrize("file", ["missing.safetensors", ".", "/dev/zero", "q.txt"])
def test_files_that_are_none(tmp_path, file):
    refused("attend", file, cwd=tmp_path)
    refused("attend", file, file, file, cwd=tmp_path)


def test_nothing_is_written_on_failure(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(packed(three()))
    refused("attend", "x.safetensors", "--out", "no/such/folder/x.safetensors", cwd=tmp_path)
    refused("attend", "x.safetensors", "--out", "x.safetensors/inside", cwd=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
