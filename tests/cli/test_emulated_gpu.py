"""attend and check with --device cuda:0, on the emulated GPU of tests/cuda."""

import json
import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from cli_support import CLI, ROOT, assert_close, attention, problem, read_safetensors, safetensors_bytes

BUILD = pathlib.Path(CLI).resolve().parents[1]
LIBRARIES = BUILD / "emulated_gpu"

pytestmark = pytest.mark.skipif(not LIBRARIES.exists(), reason="the emulated GPU is not built")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def run(cache, tmp_path):
    def run(*arguments, status=0, **environment):
        environment = {"REGARD_CACHE_DIR": str(cache), "LD_LIBRARY_PATH": str(LIBRARIES),
                       "REGARD_EMULATOR_CACHE": str(BUILD / "emulated_kernels"), **environment}
        done = subprocess.run([CLI, *map(str, arguments)], capture_output=True, text=True,
                              timeout=300, env={**os.environ, **environment}, cwd=tmp_path)
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        return {0: done.stdout, 1: done, 2: done.stderr}[status]

    return run


def test_info(run):
    text = run("info")
    assert "cuda:0        emulated sm_86: sm_86, " in text and "driver        for CUDA " in text


@pytest.mark.parametrize("dtype, tolerance", [(np.float16, 3e-3), (np.float32, 1e-5),
                                              (np.float64, 1e-12)])
def test_attend(run, tmp_path, dtype, tolerance):
    given = problem(dtype, shape=(1, 4, 33, 24), len_k=41)
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(given))
    text = run("attend", "in.safetensors", "--causal", "--backward", "--device", "cuda:0",
               "--out", "out.safetensors", "--repeat", 2, "--compare")
    assert ("cuda:simt" if dtype == np.float64 else "cuda:mma") in text
    got = read_safetensors(tmp_path / "out.safetensors")
    assert_close(got, attention(**given, causal="bottom-right"), tolerance)


def test_attend_packed(run, tmp_path):
    rng = np.random.default_rng(3)
    draw = lambda heads: rng.standard_normal((50, heads, 16)).astype(np.float16)  # noqa: E731
    begins = np.array([0, 17, 17, 50], np.int32)
    given = {"q": draw(4), "k": draw(2), "v": draw(2)}
    tables = {"cu_seqlens_q": begins, "cu_seqlens_k": begins}
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(given))
    for name, values in tables.items():
        np.save(tmp_path / f"{name}.npy", values)
    run("attend", "in.safetensors", "--cu-seqlens-q", "cu_seqlens_q.npy", "--cu-seqlens-k",
        "cu_seqlens_k.npy", "--device", "cuda:0", "--out", "out.safetensors")
    out = read_safetensors(tmp_path / "out.safetensors")["out"]
    for begin, end in [(0, 17), (17, 50)]:
        part = {name: rows[begin:end].swapaxes(0, 1)[None] for name, rows in given.items()}
        want = attention(**part)["out"][0].swapaxes(0, 1)
        assert np.abs(out[begin:end] - want).max() < 3e-3


def test_check_and_the_cache_it_leaves(run, tmp_path):
    check = ["check", "--device", "cuda:0", "--problems", 2, "--seed", 5, "--max-len", 40]
    first = run(*check)
    assert first.splitlines()[-1] == "2 passed, 0 failed" and " on cuda:0 against float64" in first
    # All kernels are there now, and none elsewhere.
    assert run(*check, "--forbid-compiling") == first
    message = run(*check, "--forbid-compiling", status=2, REGARD_CACHE_DIR=str(tmp_path / "none"))
    assert message.startswith("regard: kernel = ") and "compiling is switched off" in message


def test_check_leaves_out_what_a_family_does_not_take(run):
    text = run("check", "--device", "cuda:0", "--backend", "cuda:mma", "--type", "f64",
               "--problems", 3)
    assert "3 left out, the first because" in text
    assert text.splitlines()[-1] == "0 passed, 0 failed"


def test_a_device_that_is_not_there(run):
    assert "cuda:7" in run("check", "--device", "cuda:7", status=2)


def changed_texts(folder, name, old, new):
    """A copy of the kernels' texts with one place changed, as an environment variable."""
    for part in ["src", "include"]:
        shutil.copytree(ROOT / part, folder / "texts" / part)
    text = folder / "texts/src" / name
    assert text.read_text().count(old) == 1
    text.write_text(text.read_text().replace(old, new))
    return {"REGARD_KERNEL_DIR": str(folder / "texts")}


def test_check_lists_its_failures_as_json(run, tmp_path):
    """dk is 2 % too large."""
    wrong = changed_texts(tmp_path, "cuda/kernels/gradients_simt.cuh",
                          "\n    set_all<kConfig>(factor, Real(p.score.scale))",
                          "\n    set_all<kConfig>(factor, Real(1.02 * p.score.scale))")
    check = ["check", "--device", "cuda:0", "--backend", "cuda:simt", "--seed", 4, "--type", "f32",
             "--max-len", 30]
    done = run(*check, "--problem", 5, "--json", status=1, **wrong)
    [failure] = json.loads(done.stdout)["failures"]
    assert set(failure) == {"problem", "description", "complaints", "repeat"}
    assert failure["problem"] == 5 and failure["description"].startswith("f32 B")
    assert [complaint.partition("[")[0] for complaint in failure["complaints"]] == ["dk"]
    again = run(*failure["repeat"].split()[1:], status=1, **wrong)
    assert failure["complaints"][0] in again.stdout and "0 passed, 1 failed" in again.stdout
    assert "1 passed, 0 failed" in run(*check, "--problem", 5)


@pytest.mark.parametrize("statement, says", [
    ("if (thread_index() == 0) sync_block();", "is at sync_block"),  # a fault of the GPU
    ("this is no statement;", "failed for sm_86"),  # of the library
])
def test_what_the_user_did_not_do_wrong_has_exit_status_1(run, tmp_path, statement, says):
    begin = "void forward_simt(const KernelParams& params) {"
    wrong = changed_texts(tmp_path, "cuda/kernels/forward_simt.cuh", begin, begin + statement)
    given = problem(np.float16, shape=(1, 2, 16, 16), heads_kv=2, len_k=16)
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(given))
    done = run("attend", "in.safetensors", "--device", "cuda:0", "--backend", "cuda:simt",
               status=1, **wrong)
    assert "\nregard: " in "\n" + done.stderr and says in done.stderr
    check = run("check", "--device", "cuda:0", "--backend", "cuda:simt", "--problems", 3,
                "--type", "f16", status=1, **wrong)
    assert says in check.stdout + check.stderr


def test_recorded_calls_compile_ahead(run, tmp_path):
    """Random problems of all kinds find their kernels after a prebuild of what they recorded. Here
    the driver only pretends to run them: the results are wrong (status 1), and a kernel that is
    missing is an error (status 2)."""
    fake = {"LD_LIBRARY_PATH": f"{BUILD}/fake/driver:{BUILD}/fake/nvrtc"}
    problems = ["check", "--device", "cuda:0", "--problems", 30, "--seed", 31]
    run(*problems, status=1, REGARD_RECORD="calls.jsonl", **fake)
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert {call["chip"] for call in calls} == {"sm_90"}
    assert {call["pass"] for call in calls} == {"forward", "backward"}
    assert 0 < len(calls) < 60
    fake["REGARD_CACHE_DIR"] = str(tmp_path / "ahead")
    assert "sm_90" in run("prebuild", "--recorded", "calls.jsonl", **fake)
    run(*problems, "--forbid-compiling", status=1, **fake)
    (tmp_path / "one.jsonl").write_text(json.dumps(calls[0]))
    fake["REGARD_CACHE_DIR"] = str(tmp_path / "one")
    run("prebuild", "--recorded", "one.jsonl", **fake)
    message = run(*problems, "--forbid-compiling", status=2, **fake)
    assert "is not among the cached kernels" in message


def test_a_record_that_cannot_be_written(run, tmp_path):
    done = run("check", "--device", "cuda:0", "--problems", 2, status=1, REGARD_RECORD=tmp_path,
               REGARD_CACHE_DIR=str(tmp_path / "kernels"),
               LD_LIBRARY_PATH=f"{BUILD}/fake/driver:{BUILD}/fake/nvrtc")
    fault = f'regard: REGARD_RECORD = "{tmp_path}": cannot be written: Is a directory'
    assert done.stderr.count(fault) == 1


TENSOR = {"type": "f16", "sizes": [1, 1, 8, 8], "strides": [64, 64, 8, 1], "offset": 0}
CALL = {"chip": "sm_86", "pass": "forward", **{name: TENSOR for name in ("q", "k", "v", "out")}}


def test_a_recorded_call_that_gradients_follow(run, tmp_path):
    """Its kernels are those that the call compiles, also the ones for gradients."""
    long = TENSOR | {"sizes": [1, 1, 200, 8], "strides": [1600, 1600, 8, 1]}
    call = CALL | {"k": long, "v": long, "gradients_follow": True, "causal": "bottom_right"}
    (tmp_path / "calls.jsonl").write_text(json.dumps(call))
    fake = {"LD_LIBRARY_PATH": f"{BUILD}/fake/driver:{BUILD}/fake/nvrtc"}
    listed = run("prebuild", "--recorded", "calls.jsonl", "--verbose", **fake)
    assert all(kernel in listed for kernel in ("forward mma", "delta", "backward mma", "finish"))


@pytest.mark.parametrize("line, fault", [
    ("nonsense", "is no recorded call: "), ("[]", "is no recorded call: "),
    (CALL | {"shift": 1}, 'the field "shift" is not known'),
    (CALL | {"causal": "left"}, '"left" is not known'),
    (CALL | {"q": TENSOR | {"strides": [1]}}, "sizes and strides must be as many"),
    (CALL | {"q": TENSOR | {"type": "f8"}}, '"f8" is not known'),
    (CALL | {"softcap": -1}, "softcap = -1: must be finite and not negative"),
    (CALL | {"chip": "sm_42"}, "sm_42: is no known chip"),
    (CALL | {"chip": "sm_\x1b[31m"}, "sm_?[31m: is no known chip"),
])
def test_a_line_that_is_no_call(run, tmp_path, line, fault):
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "calls.jsonl").write_text(f"{json.dumps(CALL)}\n\n{text}\n")
    message = run("prebuild", "--recorded", "calls.jsonl", status=2)
    assert "calls.jsonl:3: " in message and fault in message
