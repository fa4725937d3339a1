"""A cache that keeps nothing says so; processes that fill one share the work.

The fake compiler of tests/cuda takes 50 ms a kernel.
"""

import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess

import pytest
from cli_support import CLI

FAKE = pathlib.Path(CLI).resolve().parents[1] / "fake/nvrtc"
PREBUILD = ["prebuild", "--devices", "sm_80"]
COMPILE = ["explain", "--q", "2x4x200x16", "--type", "f16", "--device", "sm_80", "--compile"]

pytestmark = pytest.mark.skipif(not FAKE.exists(), reason="the fake compiler is not built")


def environment(cache=None, **more):
    named = {} if cache is None else {"REGARD_CACHE_DIR": str(cache)}
    return {"HOME": "/nowhere", "LD_LIBRARY_PATH": str(FAKE), **named, **more}


def run(*arguments, status=0, preexec_fn=None, **more):
    done = subprocess.run([CLI, *arguments], capture_output=True, text=True, timeout=300,
                          env=environment(**more), preexec_fn=preexec_fn)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def open_to_all(folder):
    folder.mkdir()
    folder.chmod(0o777)
    return folder, "can be written by others (mode 0777)"


def open_to_a_group(folder):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to any group")
    folder.mkdir()
    os.chown(folder, -1, 65534)
    folder.chmod(0o775)
    return folder, "can be written by others (mode 0775)"


def of_another_user(folder):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    return folder, "belongs to another user (uid 65534)"


def below_a_folder_open_to_all(folder):
    open_to_all(folder)
    (folder / "cache").mkdir(mode=0o700)
    return folder / "cache", f"{folder}, which can be written by others"


def a_file(folder):
    folder.write_text("in the way")
    return folder, "is no folder"


def below_a_file(folder):
    folder.write_text("in the way")
    return folder / "cache", f"cannot be made: {folder} is no folder"


USELESS = [open_to_all, open_to_a_group, of_another_user, below_a_folder_open_to_all, a_file,
           below_a_file]


@pytest.mark.parametrize("make", USELESS)
def test_a_folder_that_is_of_no_use_is_named(tmp_path, make):
    folder, reason = make(tmp_path / "cache")
    for command, status in [(PREBUILD, 1), (["cache", "list"], 1), (["cache", "verify"], 1),
                            (["info"], 0), (COMPILE, 0)]:
        text = run(*command, status=status, cache=folder)
        assert str(folder) in text and reason in text, command
    for action in ("list", "verify"):
        done = subprocess.run([CLI, "cache", action], capture_output=True, text=True,
                              env=environment(folder), timeout=60)
        assert done.stdout == "" and done.stderr.startswith("regard: ") and reason in done.stderr
    done = subprocess.run([CLI, "cache", "list", "--json"], capture_output=True, text=True,
                          env=environment(folder), timeout=60)
    fields = json.loads(done.stdout)
    assert done.returncode == 1 and done.stderr == "" and fields["folder"] == str(folder)
    assert reason in fields["fault"] and fields["kernels"] == []
    log = run(*COMPILE, "--causal", "--backward", cache=folder, REGARD_LOG="stderr")
    assert log.count("kernels are not kept: ") == 1 < log.count(" compiled in ")


def test_a_folder_that_cannot_be_made(tmp_path):
    """Not even by root: /proc has no place for folders."""
    text = run(*PREBUILD, status=1, HOME="/proc")
    assert "kernels cannot be kept: /proc/.cache/regard cannot be made: " in text
    assert "NOT KEPT: " not in text, "it finds out before it compiles"


def test_a_full_disk(tmp_path):
    """A limit on the size of files fails as a full disk does: while the file is written."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    cache = tmp_path / "cache"
    text = run(*PREBUILD, status=1, cache=cache, preexec_fn=limit)
    assert re.search(rf"^NOT KEPT: \d+ kernels; in {cache} no file can be written: ", text, re.M)
    assert not list(cache.glob("*.kernel")) and not list(cache.glob("*.part"))
    # Whoever only asks whether kernels compile needs no cache.
    assert "NOT KEPT" not in run(*PREBUILD, "--check", status=1, cache=cache, preexec_fn=limit)


def test_a_umask_that_lets_the_group_write(tmp_path):
    """Folders of a user with umask 002 are writable by the user's private group, which is fine."""
    if os.geteuid() != 0:
        pytest.skip("only root's group is known to be private")
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o775)
    assert "NOT KEPT" not in run(*COMPILE, cache=cache)
    assert re.search(r"^[1-9]\d* kernels in ", run("cache", "verify", cache=cache), re.M)


@pytest.mark.parametrize("command", [COMPILE, PREBUILD])
def test_a_folder_of_our_own_choice_is_narrowed(tmp_path, command):
    cache = tmp_path / ".cache/regard"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert "can be written by others" in run("info", HOME=str(tmp_path))
    run(*command, HOME=str(tmp_path))
    assert cache.stat().st_mode & 0o777 == 0o700
    assert re.search(r"^[1-9]\d* kernels in ", run("cache", "verify", HOME=str(tmp_path)), re.M)


def test_a_kernel_under_another_name(tmp_path):
    cache = tmp_path / "cache"
    run(*COMPILE, cache=cache)
    good = next(cache.glob("*.kernel"))
    shutil.copy(good, cache / good.name.replace("nvrtc13.9", "nvrtc13.8"))
    text = run("cache", "verify", status=1, cache=cache)
    assert "nvrtc13.8.kernel is of another kernel than its name says" in text
    assert "1 files are not used" in text


def test_list_as_json(tmp_path):
    cache = tmp_path / "cache"
    run(*COMPILE, cache=cache)
    (cache / "other.kernel").write_text("x")
    fields = json.loads(run("cache", "list", "--json", cache=cache))
    assert fields["folder"] == str(cache) and fields["fault"] == ""
    [used] = [kernel for kernel in fields["kernels"] if not kernel["fault"]]
    assert used["chip"] == "sm_80" and used["compiler"] == "nvrtc13.9" and used["registers"] == 168
    assert (used["spill_bytes"], used["stack_bytes"], used["shared_bytes"]) == (16, 8, 1024)
    assert 0 < used["bytes"] < pathlib.Path(used["file"]).stat().st_size and "f16" in used["config"]
    assert [k["file"] for k in fields["kernels"] if k["fault"]] == [str(cache / "other.kernel")]
    page = re.search(r"cache list\\fR\n(.*?)^\.", run("manual"), re.M | re.S)[1]
    assert all(key in page for key in used)


def test_processes_share_the_work(tmp_path):
    count = tmp_path / "count"
    variables = environment(tmp_path / "cache", REGARD_FAKE_COMPILATIONS=str(count))
    children = [subprocess.Popen([CLI, *PREBUILD], env=variables, stdout=subprocess.PIPE,
                                 text=True) for _ in range(16)]
    texts = [child.communicate(timeout=300)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 16
    [kernels] = {re.search(r"^sm_80 +(\d+) ", text, re.M)[1] for text in texts}
    assert count.stat().st_size == int(kernels)
    listed = run("cache", "list", cache=tmp_path / "cache")
    assert f"{kernels} kernels, " in listed
