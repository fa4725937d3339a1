#!/usr/bin/env python3
"""Runs `regard check` on each instruction set of this machine, one after the other."""

from __future__ import annotations

import argparse
import subprocess
import sys

import backends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each instruction set")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tool = backends.ROOT / "build/release/cli/regard"
    failed = []
    for name in backends.available():
        print(f"\n== {name}", flush=True)
        command = [
            tool,
            "check",
            "--backend",
            name,
            "--seconds",
            arguments.seconds,
            "--seed",
            arguments.seed,
        ]
        if subprocess.run([str(part) for part in command]).returncode:
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall backends agree with float64")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
