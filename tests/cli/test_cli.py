"""Usage, help, info, explain and check of the tool: output, messages, exit statuses."""

import json
import re

import pytest
from cli_support import fine, run


@pytest.mark.parametrize("command", ["info", "explain", "attend", "check", "cache",
                                     "prebuild"])
def test_help_fits_a_screen_and_shows_an_example(command):
    text = fine(command, "--help")
    assert "Example: regard " + command in text
    lines = text.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 100


def test_version_and_general_help():
    assert fine("--version").startswith("regard ")
    assert "Exit status" in fine("--help")


Q = ["explain", "--q", "2x4x64x32"]
BAD_USAGE = {
    "nothing": [],
    "unknown command": ["attention"],
    "unknown option": [*Q, "--casual"],
    "no q": ["explain"],
    "q rank": ["explain", "--q", "2x4x64"],
    "q text": ["explain", "--q", "2x4x64xx"],
    "q negative": ["explain", "--q", "2x-4x64x32"],
    "q overflow": ["explain", "--q", "2x99999999999999999999x64x32"],
    "kv heads": [*Q, "--kv-heads", "3"],
    "kv heads zero": [*Q, "--kv-heads", "0"],
    "kv len text": [*Q, "--kv-len", "12k"],
    "type": [*Q, "--type", "float32"],
    "type int": [*Q, "--type", "i32"],
    "causal": [*Q, "--causal=left"],
    "window": [*Q, "--window", "3"],
    "window text": [*Q, "--window", "3,b"],
    "window below": [*Q, "--window", "-2,0"],
    "scale": [*Q, "--scale", "x"],
    "scale nan": [*Q, "--scale", "nan"],
    "softcap": [*Q, "--softcap", "-1"],
    "dropout": [*Q, "--dropout", "1"],
    "dropout negative": [*Q, "--dropout", "-0.1"],
    "seed negative": [*Q, "--dropout", "0.1", "--seed", "-1"],
    "seed of 65 bits": [*Q, "--dropout", "0.1", "--seed", str(2**64)],
    "offset negative": [*Q, "--dropout", "0.1", "--offset", "-1"],
    "bias shape": [*Q, "--bias", "1x3x64x64"],
    "bias type": [*Q, "--bias", "1x1x64x64:i32"],
    "mask type": [*Q, "--mask", "1x1x64x64:f32"],
    "device": [*Q, "--device", "gpu"],
    "device index": [*Q, "--device", "cuda:x"],
    "backend": [*Q, "--backend", "cpu:mmx"],
    "threads": [*Q, "--threads", "0"],
    "positional": [*Q, "more"],
    "attend no file": ["attend"],
    "attend two files": ["attend", "a.npy", "b.npy"],
    "attend layout": ["attend", "a.safetensors", "--layout", "sbhd"],
    "check backend": ["check", "--backend", "nope", "--problems", "1"],
    "check problems": ["check", "--problems", "-1"],
    "check no problems": ["check", "--problems", "0"],
    "check seed": ["check", "--seed", "x"],
    "check seed negative": ["check", "--seed", "-1", "--problems", "1"],
    "check problem and problems": ["check", "--problem", "5", "--problems", "3"],
    "check type": ["check", "--type", "f8", "--problems", "1"],
}


UNKNOWN_WORDS = [
    (["bogus"], "bogus: is no command of `regard`; its commands are info, explain, "),
    (["--bogus", "info"], "--bogus"),
    (["--bogus"], "--bogus: is no option of `regard`"),
    (["cache", "bogus"], "bogus: is no command of `regard cache`; its commands are list, clear"),
    (["cache", "--bogus"], "--bogus: is no option of `regard cache`"),
    (["explain", "--bogus", "3"], "--bogus: is no option of `regard explain`"),
    (["explain", "bogus"], "bogus: is not expected by `regard explain`"),
    (["\x1b[31mbogus"], "?[31mbogus: is no command"),
    ([*Q, "\x1b[31mbogus\u009b"], "?[31mbogus?"),
    ([*Q, "--device", "sm_\x1b[31m"], "sm_?[31m"),
]


@pytest.mark.parametrize(("arguments", "says"), UNKNOWN_WORDS)
def test_an_unknown_word_is_named(arguments, says):
    done = run(*arguments)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "\x1b" not in done.stderr and "\u009b" not in done.stderr


@pytest.mark.parametrize("name", BAD_USAGE)
def test_bad_usage(name):
    done = run(*BAD_USAGE[name])
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "regard: " in done.stderr
    assert done.stdout == "" or name == "backend"  # explain's answer says why there is none


# ----------------------------------------------------------------------- info, explain, check


def test_info_lists_backends():
    text = fine("info")
    assert re.search(r"^reference +yes ", text, re.M) and "cores" in text


EXPLAINED = [
    ["--type", "bf16", "--causal"],
    ["--type", "f64", "--causal=top-left", "--backward"],
    ["--type", "f16", "--window", "-1,16", "--bias", "1x1x64x64:f32", "--backward"],
    ["--kv-heads", "2", "--kv-len", "100", "--dim-v", "48", "--mask", "2x1x1x100"],
    ["--softcap", "30", "--scale", "0.1", "--alibi", "--sink", "--dropout", "0.1", "--seed", "3"],
    ["--backend", "reference", "--threads", "2"],
]


@pytest.mark.parametrize("options", EXPLAINED)
def test_explain(options):
    assert len(fine(*Q, *options).splitlines()) >= 3
    fields = json.loads(fine(*Q, *options, "--json"))
    assert set(fields) == {"supported", "backend", "kernel", "text", "workspace", "pairs", "flops"}
    assert fields["supported"] is True and fields["text"] == fine(*Q, *options)


def test_explain_counts_pairs_and_operations():
    full = json.loads(fine(*Q, "--json"))
    assert full["pairs"] == 2 * 4 * 64 * 64 and full["flops"] == full["pairs"] * 2 * (32 + 32)
    causal = json.loads(fine(*Q, "--causal", "--backward", "--json"))
    assert causal["pairs"] == 2 * 4 * 64 * 65 / 2
    assert causal["flops"] == causal["pairs"] * 2 * (3 * 32 + 2 * 32)


def test_check_passes_and_repeats_itself():
    first, second = (fine("check", "--problems", 40, "--seed", 11) for _ in range(2))
    assert first == second
    assert first.splitlines()[-1] == "40 passed, 0 failed"
    assert "seed 11" in first
    one = fine("check", "--seed", 11, "--problem", 7)
    assert "problem 7: " in one and one.splitlines()[-1] == "1 passed, 0 failed"


def test_check_stops_after_its_seconds():
    last = fine("check", "--seconds", 1, "--backend", "reference").splitlines()[-1]
    assert re.fullmatch(r"\d+ passed, 0 failed", last)


def test_a_check_of_nothing_fails():
    for more in ([], ["--json"]):
        done = run("check", "--seconds", "1e-9", *more)
        assert done.returncode == 1 and "--seconds = 1e-09: " in done.stderr


def test_seconds_that_never_pass_are_refused():
    for seconds in ("nan", "inf", "0"):
        assert run("check", "--seconds", seconds, timeout=10).returncode == 2
