"""Commands around GPU kernels, all without a GPU: plans for chips, the cache, prebuild.

What compiles needs NVRTC (build/venv has it) and is skipped without.
"""

import functools
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from cli_support import CLI, ROOT

CHIPS = ["sm_50", "sm_60", "sm_61", "sm_70", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90",
         "sm_100", "sm_103", "sm_120", "sm_121"]
# A small kernel: compiled in well under a second.
COMPILE = ["explain", "--q", "2x4x64x16", "--type", "f16", "--device", "sm_80", "--compile"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("REGARD_CACHE_DIR", str(folder))
    monkeypatch.setenv("VIRTUAL_ENV", str(ROOT / "build/venv"))
    return folder


def run(*arguments, status=0, **environment):
    done = subprocess.run([CLI, *map(str, arguments)], capture_output=True, text=True, timeout=300,
                          errors="replace", env={**os.environ, **environment})
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stderr if status == 2 else done.stdout


@functools.lru_cache
def has_compiler():
    text = subprocess.run([CLI, "info"], capture_output=True, text=True, check=True,
                          env={**os.environ, "VIRTUAL_ENV": str(ROOT / "build/venv")}).stdout
    return bool(re.search(r"^compiler +nvrtc1\d\.\d+, /", text, re.M))


@pytest.fixture
def compiler():
    if not has_compiler():
        pytest.skip("no NVRTC")


def kernels_in(folder):
    return sorted(folder.glob("*.kernel"))


def has_gpu():
    return bool(re.search(r"^cuda:0 ", run("info"), re.M))


# ------------------------------------------------------------------------------ info and explain


def test_info_says_what_a_gpu_needs(cache):
    text = run("info")
    for line in ["GPUs|cuda:0", "driver", "compiler", "kernel cache", "cuda:mma", "cuda:simt"]:
        assert re.search(rf"^({line}) +\S", text, re.M), line
    assert f"{cache}: 0 kernels" in text
    assert not cache.exists(), "looking must not create anything"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("options", [
    ["--type", "f16", "--causal"],
    ["--type", "bf16", "--backward", "--bias", "1x4x64x64", "--sink"],
    ["--type", "f32", "--backward", "--dropout", "0.1"],
    ["--type", "f64", "--kv-heads", "2"],
])
def test_explain_for_every_chip(chip, options):
    options = ["explain", "--q", "2x4x64x32", "--device", chip, *options]
    fields = json.loads(run(*options, "--json"))
    assert fields["supported"] and fields["text"] == run(*options)
    capability = int(chip[3:])
    takes = {"f16": 75, "bf16": 80, "f32": 80, "f64": 10**6}[options[6]]
    best = "cuda:wgmma" if (chip, options[6]) == ("sm_90", "bf16") else "cuda:mma"
    assert fields["backend"] == (best if capability >= takes else "cuda:simt")
    forced = json.loads(run(*options, "--json", "--backend", "cuda:simt"))
    assert forced["backend"] == "cuda:simt" and forced["flops"] == fields["flops"]


REFUSED = {
    "unknown chip": (["explain", "--q", "1x1x8x8", "--device", "sm_42"], "sm_90"),
    "cpu's backend": (["explain", "--q", "1x1x8x8", "--device", "sm_90", "--backend", "cpu:avx2"],
                      "cpu:avx2"),
    "f64 by mma": (["explain", "--q", "1x1x8x8", "--type", "f64", "--device", "sm_90",
                    "--backend", "cuda:mma"], "no backend can run this"),
    "attend on a chip": (["check", "--device", "sm_80", "--problems", "1"], "cuda:0"),
    "bad device": (["check", "--device", "gpu"], "cuda:N"),
    "cache without a command": (["cache"], "subcommand"),
    "cache of nothing": (["cache", "burn"], "cache"),
    "prebuild for the CPU": (["prebuild", "--devices", "cpu"], "sm_80"),
    "prebuild for nothing": (["prebuild", "--devices", "sm_80,"], "--devices"),
    "prebuild for a device": (["prebuild", "--devices", "cuda:0"], "sm_80"),
    "known without check": (["prebuild", "--devices", "sm_80", "--known", "x"], "--check"),
    "known that is not there": (["prebuild", "--check", "--devices", "sm_80", "--known", "none.txt"],
                                "none.txt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, says = REFUSED[name]
    message = run(*arguments, status=2)
    assert message.startswith("regard: ") and says in message


def test_no_gpu_is_one_line():
    if has_gpu():
        pytest.skip("there is a GPU")
    message = run("check", "--device", "cuda:0", status=2)
    assert message.count("\n") == 1 and "driver" in message


def test_attend_names_what_is_missing(tmp_path):
    if has_gpu():
        pytest.skip("there is a GPU")
    import numpy as np
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", np.ones((1, 1, 4, 8), np.float32))
    files = [tmp_path / f"{name}.npy" for name in "qkv"]
    assert "driver" in run("attend", *files, "--device", "cuda:0", status=2)
    assert "sm_80" in run("attend", *files, "--device", "sm_80", status=2)


# ------------------------------------------------------------------------------------- the cache


def test_an_empty_cache(cache):
    assert "0 kernels" in run("cache", "list")
    assert "0 kernels" in run("cache", "verify")
    assert "0 files deleted" in run("cache", "clear")
    assert not cache.exists()


def test_nowhere_to_keep_kernels(monkeypatch):
    for name in ["REGARD_CACHE_DIR", "HOME", "XDG_CACHE_HOME"]:
        monkeypatch.delenv(name, raising=False)
    assert "REGARD_CACHE_DIR" in run("cache", "list", status=2)
    assert re.search(r"^kernel cache +none", run("info"), re.M)


def test_compiled_once_listed_and_cleared(compiler, cache):
    first = run(*COMPILE)
    assert re.search(r"\d+ registers|registers \d+", first)
    assert (cache.stat().st_mode & 0o777) == 0o700
    files = kernels_in(cache)
    assert files and all(f.stat().st_mode & 0o077 == 0 for f in cache.iterdir())
    times = {f: f.stat().st_mtime_ns for f in files}
    assert run(*COMPILE) == first
    assert {f: f.stat().st_mtime_ns for f in kernels_in(cache)} == times, "nothing is made anew"
    text = run("cache", "list")
    assert re.search(r"^sm_80 +nvrtc1\d\.\d+ +\d+ +\d+ +\d+ +[\d.]+ kB +forward mma level=80 f16 ",
                     text, re.M)
    assert f"{len(files)} kernels" in run("cache", "verify")
    assert f"{len(files)} files deleted" in run("cache", "clear")
    assert list(cache.iterdir()) == []


def test_text_of_other_kernels_is_another_kernel(compiler, cache, tmp_path):
    """REGARD_KERNEL_DIR: a changed text must not be served from the cache."""
    run(*COMPILE)
    count = len(kernels_in(cache))
    folder = tmp_path / "texts"
    shutil.copytree(ROOT / "src", folder / "src")
    shutil.copytree(ROOT / "include", folder / "include")
    with open(folder / "src/cuda/kernels/ptx.cuh", "a") as text:
        text.write("// changed\n")
    run(*COMPILE, REGARD_KERNEL_DIR=str(folder))
    assert len(kernels_in(cache)) == 2 * count


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def other_owner(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


def replaced(path, make):
    path.unlink()
    make(path)


HOSTILE = {
    "empty": lambda f: f.write_bytes(b""),
    "a byte": lambda f: f.write_bytes(b"R"),
    "header only": lambda f: f.write_bytes(f.read_bytes()[:72]),
    "cut": lambda f: f.write_bytes(f.read_bytes()[:-1]),
    "longer": lambda f: f.write_bytes(f.read_bytes() + b"x"),
    "other magic": lambda f: flip(f, 0),
    "other checksum": lambda f: flip(f, 10),
    "huge subject": lambda f: flip(f, 31),
    "huge image": lambda f: flip(f, 47),
    "other registers": lambda f: flip(f, 48),
    "other subject": lambda f: flip(f, 100),
    "other image": lambda f: flip(f, f.stat().st_size // 2),
    "last byte": lambda f: flip(f, f.stat().st_size - 1),
    "writable by others": lambda f: f.chmod(0o666),
    "of another user": other_owner,
    "a link": lambda f: (shutil.copy(f, f.parent.parent / "kept"), f.unlink(),
                         f.symlink_to(f.parent.parent / "kept")),
    "a dangling link": lambda f: replaced(f, lambda p: p.symlink_to("/nowhere")),
    "a pipe": lambda f: replaced(f, os.mkfifo),
    "a folder": lambda f: replaced(f, pathlib.Path.mkdir),
    "zeros": lambda f: f.write_bytes(bytes(f.stat().st_size)),
    "text": lambda f: f.write_text("not a kernel\n" * 1000),
}


@pytest.fixture(scope="module")
def good_cache(tmp_path_factory):
    if not has_compiler():
        pytest.skip("no NVRTC")
    folder = tmp_path_factory.mktemp("good") / "cache"
    text = run(*COMPILE, REGARD_CACHE_DIR=str(folder), VIRTUAL_ENV=str(ROOT / "build/venv"))
    return folder, text


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_named_and_never_used(name, good_cache, cache):
    good, text = good_cache
    shutil.copytree(good, cache)
    count = len(kernels_in(cache))
    bad = kernels_in(cache)[0]
    HOSTILE[name](bad)
    said = run("cache", "verify", status=1)
    assert bad.name in said and f"{count - 1} kernels" in said and "1 files are not used" in said
    assert f"{count - 1} kernels" in run("cache", "list")
    without = run(*COMPILE[:-1])
    assert without != text, "the kernel is not at hand"
    if name == "a folder":  # which stays where it is, so that no kernel can take its place
        assert re.search(r"^not kept +in .*: Is a directory; ", run(*COMPILE), re.M)
        return
    assert run(*COMPILE) == text
    assert f"{count} kernels" in run("cache", "verify")
    run("cache", "clear")
    assert list(cache.iterdir()) == []


def test_names_cannot_speak_to_the_terminal(cache):
    cache.mkdir(mode=0o700)
    (cache / "\x1b[31mred\x07.kernel").write_text("x")
    text = run("cache", "verify", status=1)
    assert "\x1b" not in text and "\x07" not in text and "red" in text


def test_other_files_of_the_folder_stay(cache):
    cache.mkdir(mode=0o700)
    (cache / "notes.txt").write_text("mine")
    (cache / ".0-nvrtc13.0.kernel.1.0.part").write_text("half")
    (cache / "old.kernel").write_text("x")
    assert "2 files deleted" in run("cache", "clear")
    assert [f.name for f in cache.iterdir()] == ["notes.txt"]


# -------------------------------------------------------------------------------- known spills

BAD_LISTS = ["no colons at all", "sm_80: forward mma", "sm_80 forward: mma: ",
             "gpu: forward: reason", ": forward: reason", "sm_80: , spill 3: reason",
             "sm_80: forward, spill: reason", "sm_80: forward, spill x: reason",
             "sm_80: forward, spill -1: reason", "sm_80: forward, registers 3: reason"]


@pytest.mark.parametrize("line", BAD_LISTS)
def test_a_bad_list_of_spills(line, tmp_path):
    path = tmp_path / "known.txt"
    path.write_text("# fine\nall: forward mma, spill 8, stack 4: because\n" + line + "\n")
    message = run("prebuild", "--check", "--devices", "sm_80", "--known", path, status=2)
    assert "known.txt:3" in message


def test_the_list_of_the_project_is_well_formed():
    message = run("prebuild", "--check", "--devices", "sm_42", "--known",
                  ROOT / "tools/known_spills.txt", status=2)
    assert "sm_42" in message and "known_spills" not in message


# ------------------------------------------------------------------------------ what ptxas notes

FAKE_COMPILER = pathlib.Path(CLI).resolve().parents[1] / "fake/nvrtc"  # of tests/cuda


@pytest.mark.exhaustive
@pytest.mark.skipif(not FAKE_COMPILER.exists(), reason="the fake compiler is not built")
def test_products_that_wait_for_each_other_fail_the_check(tmp_path):
    """The fake compiler's kernels all spill a little, which the list allows."""
    known = tmp_path / "known.txt"
    known.write_text("".join(f"all: {kernel}, spill 16, stack 8: the fake compiler's\n"
                             for kernel in ["mma", "simt", "wgmma"]))
    check = ["prebuild", "--check", "--devices", "sm_90", "--known", known]
    fake = {"LD_LIBRARY_PATH": str(FAKE_COMPILER)}
    text = run(*check, **fake)
    assert re.search(r"^[1-9]\d* passed, 0 failed$", text, re.M) and "Potential" not in text
    note = ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
            "serialized due to insufficient register resources for the wgmma pipeline\n")
    noted = fake | {"REGARD_FAKE_COMPILER_NOTE": note,
                    "REGARD_CACHE_DIR": str(tmp_path / "noted")}
    for attempt in ("compiled", "from the cache"):
        text = run(*check, status=1, **noted)
        assert "Products of warpgroups wait for each other" in text, attempt
        assert re.search(r"^  sm_90: forward wgmma ", text, re.M), attempt
        assert re.search(r"^0 passed, [1-9]\d* failed$", text, re.M), attempt
