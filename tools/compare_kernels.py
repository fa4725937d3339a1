#!/usr/bin/env python3
"""Compares the machine code of kernels between two states of the source.

  cmake --build build/release --target kernel_images
  build/release/tests/kernel_images build/images/before sm_80,sm_90       (each state has its own)
  build/release/tests/kernel_images build/images/before sm_90 Family::wgmma       (some of them)
  tools/compare_kernels.py build/images/before build/images/after

Both folders come from kernel_images, which writes the kernels of representative_problems() in the
order of the launches. Names do not count: code, constants and resources are compared. The exit
status is 0 only if all of them are the same byte for byte. (pip install pyelftools)
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile

# Code, parameters, constants and shared memory. (Where unused constants of the texts lie is not.)
COMPARED = (".text", ".nv.constant0", ".nv.constant2", ".nv.constant3", ".nv.shared")
INSTRUCTION = 16  # bytes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--sass", action="store_true",
                        help="print how the instructions differ (needs cuobjdump)")
    return parser.parse_args()


def parts(path: Path) -> dict[str, bytes]:
    """What is compared of a cubin, by section; of the code also how many registers it takes."""
    found = {}
    with path.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            if section.name.startswith(COMPARED):
                found[section.name] = section.data() or bytes(section.data_size)
            if section.name.startswith(".text"):
                found["registers"] = bytes([section["sh_info"] >> 24])
    return found


def instructions(path: Path) -> list[str]:
    command = [shutil.which("cuobjdump") or "cuobjdump", "--dump-sass", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def difference(before: Path, after: Path) -> str:
    """Why two images are not the same; "" if they are."""
    if before.read_bytes() == after.read_bytes():
        return ""
    old, new = parts(before), parts(after)
    said = []
    for name in sorted({*old, *new}):
        a, b = old.get(name, b""), new.get(name, b"")
        if a == b:
            continue
        if name == "registers":
            said.append(f"registers {a[0]} -> {b[0]}")
        elif name.startswith(".text") and len(a) == len(b):
            steps = range(0, len(a), INSTRUCTION)
            count = sum(a[n:n + INSTRUCTION] != b[n:n + INSTRUCTION] for n in steps)
            said.append(f"{count} of {len(steps)} instructions")
        else:
            said.append(f"{name}: {len(a)} -> {len(b)} bytes")
    return ", ".join(said)


def main() -> int:
    given = arguments()
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*.cubin")}
             for folder in (given.before, given.after)]
    if not names[0]:
        sys.exit(f"{given.before} holds no kernels")
    same, changed = 0, []
    for name in sorted(names[0] & names[1]):
        why = difference(given.before / name, given.after / name)
        if why:
            changed.append(f"{name}: {why}\n    "
                           + (given.after / name).with_suffix(".txt").read_text().strip())
            if given.sass:
                changed += difflib.unified_diff(instructions(given.before / name),
                                                instructions(given.after / name), n=1, lineterm="")
        else:
            same += 1
    for name in sorted(names[0] ^ names[1]):
        changed.append(f"{name}: only in {given.before if name in names[0] else given.after}")
    print("\n".join(changed))
    print(f"{same} the same, {len(changed)} changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
