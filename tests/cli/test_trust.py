"""Where the tool looks for NVRTC, and which files it opens.

The fake compiler of tests/cuda stands in for NVRTC: `regard info` names the file that was opened.
"""

import os
import pathlib
import re
import shutil
import subprocess

import pytest
from cli_support import CLI

BUILD = pathlib.Path(CLI).resolve().parents[1]
FAKE = BUILD / "fake/nvrtc/libnvrtc.so.13"
PACKAGES = "lib/python3.11/site-packages"

pytestmark = pytest.mark.skipif(not FAKE.exists(), reason="the fake compiler is not built")


def info(program=CLI, cwd=None, **environment):
    """What `regard info` says of the compiler, and of what the search did not trust."""
    text = subprocess.run([program, "info"], capture_output=True, text=True, check=True, cwd=cwd,
                          env={"HOME": "/nowhere", **environment}, timeout=60).stdout
    [compiler] = re.findall(r"^compiler +(.*)$", text, re.M)
    return compiler, re.findall(r"^not trusted +(.*)$", text, re.M)


@pytest.fixture(autouse=True)
def machine_without_compiler():
    if not info()[0].startswith("none: "):
        pytest.skip("an NVRTC is installed where every program finds it")


def plant(folder):
    """An NVRTC in this folder, which others may not write."""
    folder.mkdir(parents=True, mode=0o755)
    path = folder / "libnvrtc.so.13"
    shutil.copy(FAKE, path)
    path.chmod(0o755)
    return path


def plant_in_python(prefix):
    return plant(prefix / PACKAGES / "nvidia/cu13/lib")


def copy_of_tool(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.copy(CLI, folder / "prog")


# ------------------------------------------------------------------------------ where it is found


def test_known_places(tmp_path):
    """Toolkits come before Python's packages, and these before the program's own prefix."""
    toolkit = plant(tmp_path / "cuda/lib64")
    venv = plant_in_python(tmp_path / "venv")
    prefix = plant_in_python(tmp_path)
    program = copy_of_tool(tmp_path / "bin")
    cuda = {"CUDA_HOME": str(tmp_path / "cuda")}
    python = {"VIRTUAL_ENV": str(tmp_path / "venv")}
    for expected, environment in [(toolkit, cuda | python), (venv, python), (prefix, {})]:
        assert info(program, **environment) == (f"nvrtc13.9, {expected}", [])


def test_packages_of_a_loaded_library(tmp_path):
    venv = plant_in_python(tmp_path)
    loaded = tmp_path / PACKAGES / "loaded.so"
    shutil.copy(BUILD / "fake/driver/libcuda.so.1", loaded)
    assert info(LD_PRELOAD=str(loaded)) == (f"nvrtc13.9, {venv}", [])


def test_a_link_is_followed(tmp_path):
    real = plant(tmp_path / "cuda-13.9/lib64")
    (tmp_path / "cuda").symlink_to("cuda-13.9")
    assert info(CUDA_HOME=str(tmp_path / "cuda"))[0] == f"nvrtc13.9, {real}"


# -------------------------------------------------------------------------- where it is not looked


def test_grandparent_of_a_program_that_is_not_in_bin(tmp_path):
    plant_in_python(tmp_path)
    assert info(copy_of_tool(tmp_path / "job.x1")) == info()


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize("value", [".", "venv", "./venv", "../{}/venv"])
def test_relative_folders_of_the_environment(tmp_path, name, value):
    for prefix in [tmp_path, tmp_path / "venv"]:
        plant_in_python(prefix)
        plant(prefix / "lib64")
    value = value.format(tmp_path.name)
    compiler, untrusted = info(cwd=tmp_path, **{name: value})
    assert untrusted == [f'{name} = "{value}" is not used: it is not an absolute path']
    assert compiler.startswith("none: ") and untrusted[0] in compiler


def test_packages_of_a_library_loaded_by_a_relative_path(tmp_path):
    plant(tmp_path / "site-packages/nvidia/cu13/lib")
    shutil.copy(BUILD / "fake/driver/libcuda.so.1", tmp_path / "site-packages/loaded.so")
    environment = {"LD_PRELOAD": "./site-packages/loaded.so"}
    assert info(cwd=tmp_path, **environment)[0].startswith("none: ")


# --------------------------------------------------------------------------- what is not trusted


def other_owner(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


def other_group(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files to any group")
    os.chown(path, -1, 65534)
    path.chmod(0o775)


def builtins_for_all(library):
    path = library.parent / "libnvrtc-builtins.so.13.9"
    shutil.copy(FAKE, path)
    path.chmod(0o757)


UNTRUSTED = {
    "a file that all may write": (lambda f: f.chmod(0o757), "can be written by others (mode 0757)"),
    "a file of a group": (other_group, "can be written by others (mode 0775)"),
    "a file of another user": (other_owner, "belongs to another user (uid 65534)"),
    "a folder that all may write": (lambda f: f.parent.chmod(0o777), "lib64, which can be written"),
    "a folder above": (lambda f: f.parents[1].chmod(0o777), "cuda, which can be written by others"),
    "a folder of another user": (lambda f: other_owner(f.parents[1]), "which belongs to another"),
    "built-ins that all may write": (builtins_for_all, "libnvrtc-builtins.so.13.9 is not used"),
}


@pytest.mark.parametrize("name", UNTRUSTED)
def test_what_others_may_have_written_is_named_and_not_opened(tmp_path, name):
    spoil, says = UNTRUSTED[name]
    library = plant(tmp_path / "cuda/lib64")
    assert info(CUDA_HOME=str(tmp_path / "cuda"))[0] == f"nvrtc13.9, {library}"
    spoil(library)
    compiler, [untrusted] = info(CUDA_HOME=str(tmp_path / "cuda"))
    assert untrusted.startswith(str(library.parent)) and says in untrusted
    assert compiler.startswith("none: ") and untrusted in compiler and "pip install" in compiler
    # Another one is taken, and the first is still named.
    venv = plant_in_python(tmp_path / "venv")
    assert info(CUDA_HOME=str(tmp_path / "cuda"), VIRTUAL_ENV=str(tmp_path / "venv")) == (
        f"nvrtc13.9, {venv}", [untrusted])


def test_names_of_folders_cannot_speak_to_the_terminal(tmp_path):
    library = plant(tmp_path / "\x1b[31mred\x07/lib64")
    library.chmod(0o777)
    compiler, [untrusted] = info(CUDA_HOME=str(library.parents[1]))
    assert "?[31mred?" in untrusted and "\x1b" not in compiler + untrusted
    for cache in (tmp_path / "\x1b[31mnew", library.parent, tmp_path / "\u00e9\x7f"):
        done = subprocess.run([CLI, "info"], capture_output=True, text=True, check=True,
                              env={"REGARD_CACHE_DIR": str(cache)}, timeout=60)
        shown = str(cache).translate(dict.fromkeys([0x1b, 0x07, 0x7f], "?"))
        assert shown in done.stdout and not set("\x1b\x07\x7f") & set(done.stdout)


@pytest.mark.parametrize("spoil", [lambda path: path.chmod(0o666), other_owner])
def test_a_kernel_text_that_others_may_have_written(tmp_path, spoil):
    library = plant(tmp_path / "cuda/lib64")
    text = tmp_path / "cuda/kernels/forward_mma.cuh"
    text.parent.mkdir()
    text.write_text("// another text\n")
    explain = [CLI, "explain", "--q", "2x4x64x16", "--type", "f16", "--device", "sm_80"]
    environment = {"REGARD_KERNEL_DIR": str(tmp_path), "CUDA_HOME": str(library.parents[1])}
    spoil(text)
    done = subprocess.run(explain, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2 and f"{text} is not used: it " in done.stderr


def test_a_folder_of_kernel_texts_that_is_none(tmp_path):
    """A folder may lack texts, but must be there."""
    library = plant(tmp_path / "cuda/lib64")
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "empty").mkdir()
    explain = [CLI, "explain", "--q", "2x4x64x16", "--type", "f16", "--device", "sm_80"]
    for name, status in [("none", 2), ("file", 2), ("empty", 0)]:
        for folder in (name, tmp_path / name):
            environment = {"REGARD_KERNEL_DIR": str(folder), "CUDA_HOME": str(library.parents[1])}
            done = subprocess.run(explain, capture_output=True, text=True, env=environment,
                                  cwd=tmp_path, timeout=60)
            assert done.returncode == status, (folder, done.stderr)
            says = f"REGARD_KERNEL_DIR = {tmp_path / name}: there is no such folder"
            assert (says in done.stderr) == (status == 2)
