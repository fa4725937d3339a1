"""What --out names: links, FIFOs, stdout, nothing; and what a signal leaves."""

import os
import pathlib
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from cli_support import (CLI, attention, fine, problem, read_safetensors, refused, run,
                         safetensors_bytes)


@pytest.fixture
def tensors(tmp_path):
    arrays = problem(shape=(1, 2, 16, 8), heads_kv=2, len_k=16, dim_v=8)
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(arrays))
    del arrays["dout"]
    return tmp_path, attention(**arrays)["out"]


def holds(path, want):
    return np.allclose(read_safetensors(path)["out"], want, atol=1e-5)


def test_an_empty_name_is_refused(tensors):
    for arguments in (["attend", "in.safetensors", "--out", ""],
                      ["explain", "--q", ""]):
        assert "must not be empty" in refused(*arguments, cwd=tensors[0])


@pytest.mark.parametrize("exists", [True, False])
def test_links_are_followed(tensors, exists):
    folder, want = tensors
    (folder / "deep").mkdir()
    (folder / "deep/hop.safetensors").symlink_to("real.safetensors")
    (folder / "link.safetensors").symlink_to("deep/hop.safetensors")
    if exists:
        (folder / "deep/real.safetensors").write_bytes(b"old")
    fine("attend", "in.safetensors", "--out", "link.safetensors", cwd=folder)
    assert (folder / "link.safetensors").is_symlink()
    assert (folder / "deep/hop.safetensors").is_symlink()
    assert holds(folder / "deep/real.safetensors", want)


def link_loop(folder):
    (folder / "a.safetensors").symlink_to("b.safetensors")
    (folder / "b.safetensors").symlink_to("a.safetensors")
    return "a.safetensors", "links"


def link_to_nowhere(folder):
    (folder / "results").symlink_to("nowhere")
    return "results", "No such file"


def folder_instead_of_a_file(folder):
    (folder / "results/lse.npy").mkdir(parents=True)
    return "results", "results/lse.npy cannot be written: Is a directory"


def made(folder, out, says):
    """A file f and a folder d.safetensors, which --out cannot go through."""
    (folder / "f").write_text("in the way")
    (folder / "d.safetensors").mkdir()
    return out, says


IMPOSSIBLE = {
    "loop of links": link_loop,
    "link to nowhere": link_to_nowhere,
    "folder for a file": lambda folder: made(folder, "d.safetensors", "Is a directory"),
    "folder for a file of a folder": folder_instead_of_a_file,
    "no folder": lambda folder: made(folder, "no/x.safetensors", "No such file"),
    "below a file": lambda folder: made(folder, "f/x.safetensors", "Not a directory"),
    "folder below a file": lambda folder: made(folder, "f/x/y", "Not a directory"),
    "long name": lambda folder: made(folder, "x" * 240 + ".safetensors", "name too long"),
    "long folder": lambda folder: made(folder, "x" * 300, "name too long"),
    "input": lambda folder: made(folder, "in.safetensors", "would replace in.safetensors, which"),
    "input by a link": lambda folder: ((folder / "x.safetensors").symlink_to("in.safetensors"),
                                       made(folder, "x.safetensors", "which is read"))[1],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_written_is_refused_before_the_work(tensors, name):
    folder, _ = tensors
    before = (folder / "in.safetensors").read_bytes()
    out, says = IMPOSSIBLE[name](folder)
    done = run("attend", "in.safetensors", "--out", out, cwd=folder)
    assert done.returncode == 2 and done.stdout == "", (done.stdout, done.stderr)
    assert done.stderr.startswith(f"regard: --out = {out}: ") and says in done.stderr
    assert (folder / "in.safetensors").read_bytes() == before


def test_a_folder_of_inputs_is_not_written_over(tensors):
    folder, _ = tensors
    (folder / "results").mkdir()
    for name, array in problem(shape=(1, 2, 16, 8), heads_kv=2, len_k=16, dim_v=8).items():
        np.save(folder / f"results/{name if name != 'dout' else 'out'}.npy", array)
    files = [f"results/{name}.npy" for name in "qkv"]
    message = refused("attend", *files, "--dout", "results/out.npy", "--backward", "--out",
                      "results", cwd=folder)
    assert "--out = results: " in message and "would replace results/out.npy" in message
    fine("attend", *files, "--out", "results", cwd=folder)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode(tensors, mode):
    folder, want = tensors
    (folder / "x.safetensors").write_bytes(b"old")
    (folder / "x.safetensors").chmod(mode)
    fine("attend", "in.safetensors", "--out", "x.safetensors", cwd=folder)
    assert holds(folder / "x.safetensors", want)
    assert (folder / "x.safetensors").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("name", ["pipe", "pipe.safetensors"])
def test_a_fifo_is_written_through(tensors, name):
    folder, want = tensors
    os.mkfifo(folder / name)
    got = []
    reader = threading.Thread(target=lambda: got.append((folder / name).read_bytes()), daemon=True)
    reader.start()
    fine("attend", "in.safetensors", "--out", name, cwd=folder, timeout=30)
    reader.join(30)
    (folder / "got.safetensors").write_bytes(got[0])
    assert holds(folder / "got.safetensors", want) and (folder / name).is_fifo()


@pytest.mark.parametrize("redirection", ["| cat > got.safetensors", "> got.safetensors"])
def test_stdout_carries_the_tensors_alone(tensors, redirection):
    folder, want = tensors
    line = f'"$0" attend in.safetensors --out /dev/stdout {redirection}'
    done = subprocess.run(["sh", "-c", line, CLI], capture_output=True, text=True, cwd=folder,
                          check=True, timeout=60)
    assert holds(folder / "got.safetensors", want) and "GFLOP/s" in done.stderr
    quiet = subprocess.run([CLI, "attend", "in.safetensors", "--out", "/dev/stdout", "--quiet"],
                           capture_output=True, cwd=folder, check=True, timeout=60)
    assert quiet.stdout == (folder / "got.safetensors").read_bytes() and quiet.stderr == b""


def test_devices_are_written_through(tensors):
    fine("attend", "in.safetensors", "--out", "/dev/null", cwd=tensors[0])
    assert pathlib.Path("/dev/null").is_char_device()
    assert "No space left" in refused("attend", "in.safetensors", "--out", "/dev/full",
                                      cwd=tensors[0])


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heed_signals():
    """What the tests' own parent ignores (a shell's background job: SIGINT) children ignore too."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def stopped_while_writing(folder):
    """Starts the tool on results of 64 MB and stops it while the .part file is there."""
    for _ in range(20):
        tool = subprocess.Popen([CLI, "attend", "q.npy", "k.npy", "v.npy", "--out", "results"],
                                cwd=folder, stdout=subprocess.DEVNULL,
                                preexec_fn=heed_signals)
        while tool.poll() is None and not list(folder.glob("results/*.part")):
            time.sleep(0.001)
        tool.send_signal(signal.SIGSTOP)
        if tool.poll() is None and list(folder.glob("results/*.part")):
            return tool
        tool.send_signal(signal.SIGCONT)
        tool.wait()
    pytest.fail("the tool wrote too fast to be stopped")


def test_a_signal_while_writing_leaves_no_part_of_a_file(tmp_path):
    for name, shape in {"q": (65536, 1), "k": (1, 1), "v": (1, 256)}.items():
        np.save(tmp_path / f"{name}.npy", np.ones(shape, np.float32))
    for number in SIGNALS:
        tool = stopped_while_writing(tmp_path)
        tool.send_signal(number)
        tool.send_signal(signal.SIGCONT)
        assert tool.wait(30) == -number
        assert list(tmp_path.glob("results/*.part")) == [], number
        for done in tmp_path.glob("results/*.npy"):
            done.unlink()
