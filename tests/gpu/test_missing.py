"""What is said where the driver, the GPU or the compiler is missing, and what the cache is for.

Each case is a process of its own. A library is hidden by a dlopen that does not find it.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import device
import driver

pytestmark = pytest.mark.skipif("device.is_host()", reason="needs a GPU")
HERE = pathlib.Path(__file__).resolve().parent
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
void* dlopen(const char* name, int flags) {
  static void* (*real)(const char*, int);
  const char* hidden = getenv("HIDDEN_LIBRARY");
  if (name && hidden && strstr(name, hidden)) return NULL;
  if (!real) real = (void* (*)(const char*, int))dlsym(RTLD_NEXT, "dlopen");
  return real(name, flags);
}
"""
# Prints "status | argument | text", or "ok", of a forward pass of a tiny problem.
PROGRAM = """
import sys
sys.path[:0] = {folders!r}
import numpy as np
import device, driver
import regard_ctypes as regard
x = np.ones((1, 1, 4, 16), np.float16)
try:
    device.STATE.driver = driver.Driver()
except driver.CudaError:
    device.STATE.driver = driver.HostDriver()
    def run_fields(backend="", **fields):
        return {{"backend": backend, "device": 1}}
    device.run_fields = run_fields
try:
    out = np.zeros_like(x)
    device.forward(regard.Attention(x, x, x), out, backend="cuda:mma")
    print("ok" if (out == 1).all() else "wrong")
except regard.RegardError as error:
    print(error.status, "|", error.argument, "|", error)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("no C compiler to hide libraries with")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c",
                    "-ldl"], check=True)
    return folder / "shim.so"


def said(cache, shim=None, hidden="", **environment):
    program = PROGRAM.format(folders=[str(HERE), str(HERE.parent / "python")])
    variables = os.environ | {"REGARD_CACHE_DIR": str(cache)} | environment
    if hidden:
        variables |= {"LD_PRELOAD": str(shim), "HIDDEN_LIBRARY": hidden}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True,
                          text=True, timeout=50)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_without_a_driver(shim, tmp_path):
    text = said(tmp_path, shim, "libcuda.so")
    assert text.startswith("unavailable | device |"), text
    assert "libcuda" in text


def test_without_a_gpu(tmp_path):
    text = said(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert text.startswith("unavailable | device |"), text


def test_without_a_compiler(shim, tmp_path):
    text = said(tmp_path, shim, "libnvrtc")
    assert text.startswith("unavailable | kernel |"), text
    assert "NVRTC" in text or "nvrtc" in text
    assert "pip install" in text  # how to get it


def test_with_a_filled_cache_no_compiler_is_needed(shim, tmp_path):
    assert said(tmp_path) == "ok"
    assert list(tmp_path.rglob("*.kernel"))
    assert said(tmp_path, shim, "libnvrtc") == "ok"


@pytest.mark.parametrize("damage", ["truncated", "empty", "one byte", "garbage"])
def test_a_damaged_cache_is_filled_anew(damage, tmp_path):
    assert said(tmp_path) == "ok"
    for path in list(tmp_path.rglob("*.kernel")):
        content = bytearray(path.read_bytes())
        if damage == "one byte":
            content[len(content) // 2] ^= 0x10
        else:
            content = {"truncated": content[: len(content) // 2], "empty": b"",
                       "garbage": b"\x00" * len(content)}[damage]
        path.write_bytes(content)
    assert said(tmp_path) == "ok"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert said(tmp_path / "file") == "ok"


assert driver.Driver
