"""Streams that are closed or full, --quiet and --json."""

import json
import re
import subprocess

import numpy as np
import pytest
from cli_support import CLI, fine, problem, run, safetensors_bytes

EXPLAIN = ["explain", "--q", "1x1x8x8"]


def shell(line, cwd=None):
    """Runs a line of sh in which $0 is the tool; returns status and stderr."""
    done = subprocess.run(["sh", "-c", line, CLI], capture_output=True, text=True, cwd=cwd,
                          timeout=60)
    return done.returncode, done.stderr


@pytest.fixture
def tensors(tmp_path):
    arrays = problem(shape=(1, 2, 16, 8), heads_kv=2, len_k=16, dim_v=8)
    del arrays["dout"]
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(arrays))
    return tmp_path


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_stderr_that_takes_nothing_changes_no_status(tensors, where):
    assert shell(f'"$0" attend nope.npy k.npy v.npy {where}')[0] == 2
    assert shell(f'"$0" explain {where}')[0] == 2
    # It says on stderr that there is no dout, and must not say it in a file that it opens.
    assert shell(f'"$0" attend in.safetensors --backward --out o.safetensors {where}',
                 tensors)[0] == 0
    fine("attend", "o.safetensors", cwd=_with_names(tensors))


def _with_names(folder):
    """Makes o.safetensors readable as q, k, v: it fails where text was written into it."""
    raw = (folder / "o.safetensors").read_bytes()
    for name, other in [(b'"dq"', b'"q" '), (b'"dk"', b'"k" '), (b'"dv"', b'"v" ')]:
        raw = raw.replace(name, other)
    (folder / "o.safetensors").write_bytes(raw)
    return folder


@pytest.mark.parametrize("command", ["info", "info --json", "check --problems 1", "--help",
                                     "explain --q 1x1x8x8", "completion bash", "manual"])
@pytest.mark.parametrize("where", [">&-", ">/dev/full"])
def test_results_that_stdout_does_not_take_are_a_failure(command, where):
    status, message = shell(f'"$0" {command} {where}')
    assert status == 1 and "stdout: cannot be written: " in message


def test_a_reader_that_leaves_ends_the_tool_by_its_signal():
    done = subprocess.run(["bash", "-c", '"$0" info | true; echo "${PIPESTATUS[0]}"', CLI],
                          capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() in ("0", "141") and "cannot be written" not in done.stderr


def test_quiet_leaves_out_notes_but_no_error(tensors):
    command = ["attend", "in.safetensors", "--backward"]
    assert "note: " in run(*command, cwd=tensors).stderr
    for line in ([*command, "--quiet"], ["--quiet", *command]):
        done = run(*line, cwd=tensors)
        assert done.returncode == 0 and done.stderr == "" and "forward" in done.stdout
    assert "regard: " in run("attend", "nope.safetensors", "--quiet").stderr


# ------------------------------------------------------------------------------------------- JSON


def test_info_as_json():
    fields = json.loads(fine("info", "--json"))
    assert set(fields) == {"version", "cpu", "threads", "isa", "caches", "gpu", "backends"}
    assert set(fields["caches"]) == {"l1", "l2", "l3"}
    assert {"devices", "has_driver", "driver", "has_compiler", "compiler",
            "cache"} <= set(fields["gpu"])
    named = {b["name"]: b for b in fields["backends"]}
    assert named["reference"]["available"] is True and set(named["reference"]) == {
        "name", "available", "note"}
    text = fine("info")
    assert fields["cpu"] in text and all(name in text for name in named)


def test_attend_as_json(tensors):
    options = ["--backward", "--compare", "--explain", "--out", "o.safetensors", "--quiet"]
    fields = json.loads(fine("attend", "in.safetensors", *options, "--json", cwd=tensors))
    assert set(fields) == {"q", "k", "v", "passes", "comparison", "wrote"}
    assert fields["q"] == {"type": "f32", "sizes": [1, 2, 16, 8]}
    assert [p["pass"] for p in fields["passes"]] == ["forward", "backward"]
    for one in fields["passes"]:
        assert set(one) == {"pass", "backend", "kernel", "ms", "gflops", "flops", "workspace",
                            "text"}
        assert one["ms"] > 0 and abs(one["gflops"] * one["ms"] * 1e6 / one["flops"] - 1) < 1e-9
    comparison = fields["comparison"]
    assert comparison["unfused_fits"] is True and comparison["unfused_both_ms"] > 0
    assert [e["output"] for e in comparison["errors"]] == ["out", "lse", "dq", "dk", "dv"]
    assert all(0 < e["norm"] < 1e-5 and 0 < e["unfused_norm"] < 1e-5 for e in comparison["errors"])
    assert fields["wrote"] == {"path": "o.safetensors", "tensors": ["out", "lse", "dq", "dk", "dv"]}
    plain = json.loads(fine("attend", "in.safetensors", "--json", cwd=tensors))
    assert set(plain) == {"q", "k", "v", "passes"} and "text" not in plain["passes"][0]


def test_check_as_json():
    fields = json.loads(fine("check", "--problems", 20, "--seed", 3, "--json"))
    assert set(fields) == {"backend", "seed", "passed", "failed", "left_out", "failures", "worst"}
    assert (fields["seed"], fields["passed"], fields["failed"]) == (3, 20, 0)
    assert fields["failures"] == [] and fields["worst"][0]["output"] == "out"
    assert 0 < fields["worst"][0]["ratio"] < 1


def keys_in(value):
    if isinstance(value, dict):
        return set(value).union(*map(keys_in, value.values()))
    return set().union(*map(keys_in, value)) if isinstance(value, list) else set()


def test_the_manual_names_every_key(tensors):
    page = re.search(r"^\.SH JSON\n(.*?)^\.SH ", fine("manual"), re.M | re.S)[1]
    named = set(re.findall(r"\w+", page))
    for command in (["info"], [*EXPLAIN], ["check", "--problems", 3], [
            "attend", "in.safetensors", "--compare", "--explain", "--backward", "--quiet", "--out",
            "o.safetensors"]):
        keys = keys_in(json.loads(fine(*command, "--json", cwd=tensors)))
        assert keys and keys <= named, keys - named


def test_numbers_that_are_not_finite_are_null(tmp_path):
    q = np.full((1, 1, 4, 8), np.inf, np.float32)
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", q)
    text = fine("attend", "q.npy", "k.npy", "v.npy", "--compare", "--json", cwd=tmp_path)
    json.loads(text, parse_constant=lambda word: pytest.fail(word))
