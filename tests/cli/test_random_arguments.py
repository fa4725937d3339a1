"""Random command lines: exit status 0, 1 or 2, in bounded time, whatever they say."""

import random
import re

from cli_support import fine, problem, run, safetensors_bytes

VALUES = ["", "0", "1", "-1", "2", "7", "nan", "inf", "-inf", "1e308", "-1e-300", "0x10", "1e18",
          "9223372036854775807", "99999999999999999999", "1x1x8x8", "2x4x16x8", "1x2x16x300",
          "1x1x65536x32768", "1x1x1x1", "0x0x0x0", "1x1x8x8:f32", "8x", "x", "f32", "f64", "f16",
          "bf16", "f32,bf16", "i32", "cpu", "cuda:0", "cuda:-1", "sm_90", "sm_", "cpu:avx2",
          "cpu:scalar", "reference", "cuda:mma", "top-left", "-1,0", "3,3", "3", "bhsd", "short",
          "forward", "in.safetensors", "q.npy", "results", ".", "/dev/null", "/dev/full",
          "no/such/file", "\u00e9", "%s%n", "--", "-", "=", "a b", "'", "bash"]
# What takes long by its nature, where there is a compiler.
LEFT_OUT = {"prebuild"}
BOUNDS = {"check": ["--problems", "2"]}


def options_of(command):
    text = fine(command, "--help")
    return re.findall(r"^  (--[a-z-]+)", text, re.M)


def random_line(rng, commands, options):
    command = rng.choice(commands)
    line = [command] if rng.random() < 0.95 else [rng.choice(VALUES)]
    line += BOUNDS.get(command, [])
    if command == "cache":
        line.append(rng.choice(["list", "clear", "verify"]))
    if command == "attend" and rng.random() < 0.8:
        line.append("in.safetensors")
    if command == "explain" and rng.random() < 0.8:
        line += ["--q", rng.choice(["1x1x8x8", "2x4x16x8"])]
    for _ in range(rng.randint(0, 5)):
        option = rng.choice(options[command])
        if option in BOUNDS.get(command, []):
            continue
        value = rng.choice(VALUES)
        line += rng.choice([[option], [option, value], [option + "=" + value], [value]])
    return line


def test_random_command_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE_DIR", str(tmp_path / "cache"))
    small = problem(shape=(1, 2, 8, 8), heads_kv=1, len_k=8, dim_v=8)
    (tmp_path / "in.safetensors").write_bytes(safetensors_bytes(small))
    commands = [c for c in re.findall(r"^  ([a-z]+) ", fine("--help"), re.M) if c not in LEFT_OUT]
    assert len(commands) >= 6
    options = {command: options_of(command) for command in commands}
    rng = random.Random(20)
    seen = set()
    for _ in range(250):
        line = random_line(rng, commands, options)
        done = run(*line, cwd=tmp_path, timeout=20)
        assert done.returncode in (0, 1, 2), (line, done.returncode, done.stderr)
        assert done.returncode == 0 or "regard: " in done.stderr, (line, done)
        seen.add(done.returncode)
    assert {0, 2} <= seen
