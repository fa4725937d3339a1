#!/usr/bin/env python3
"""Runs `regard check` on each instruction set of this machine, one after the other; AVX-512
and AMX are emulated where the machine has none.

The last line of the output is "N passed, M failed"; each instruction set has a seed of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import backends
from testing.counters import count_check


def instruction_sets() -> list[tuple[str, Path]]:
    """Each with the library that has it."""
    real, emulated = backends.available(), backends.emulated_amx()
    found = [(name, backends.library()) for name in real]
    names = backends.available(of=emulated) if emulated.exists() else []
    return found + [(name, emulated) for name in names if name not in real]


def run(command: list[str], library: Path) -> tuple[int, str]:
    """The exit status, and what the command printed, which is shown as it comes."""
    lines = []
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each instruction set")
    parser.add_argument("--problems", type=int, help="so many for each, however long they take")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    length = ["--seconds", str(arguments.seconds)]
    if arguments.problems:
        length = ["--problems", str(arguments.problems)]
    tool = str(backends.ROOT / "build/release/cli/regard")
    passed = failed = 0
    for index, (name, library) in enumerate(instruction_sets()):
        print(f"\n== {name}", flush=True)
        seed = str(arguments.seed + index)
        command = [tool, "check", "--backend", name, *length, "--seed", seed]
        status, text = run(command, library)
        counts = count_check(text)
        passed += counts[0]
        failed += max(counts[1], int(status != 0))
    print(f"\n{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
