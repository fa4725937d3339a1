#!/usr/bin/env python3
"""Changes one place of a kernel's text at a time, and says which changes no test notices.

  tools/mutate.py --seed 1 --count 50 --out build/mutation.md

The texts are those of src/cuda/kernels, which the emulated GPU compiles, and of src/semantics and
src/cpu/kernels, of which the CPU's scalar instruction set is compiled anew. A change is one
operator, comparison, constant or function. The tests are a few of tests/python that run the changed
kernel, and for the CPU the C++ suite of its kernels; where one of them fails the change is found. A
change that does not compile counts for nothing. What survives is either a blind spot of those tests
or no change of what is computed: only a reader can tell.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "build/release"
EMULATOR = RELEASE / "tests/cuda/libregard_emulator.so"
TEXTS = {"src/semantics": 1, "src/cuda/kernels": 3, "src/cpu/kernels": 1}  # and their shares
LEFT_OUT = ("ptx.cuh", "ptx_hopper.cuh", "isa_", "lanes_avx",
            "features.h")  # what is not compiled here
TIMEOUT = 600  # seconds of a mutant's tests: one that hangs is found
NO_TESTS = 5  # pytest's exit status where it has collected none

# What a pattern is replaced by. Patterns have spaces where clang-format puts them, which keeps
# comparisons apart from templates.
CHANGES = [
    (r" < ", [" <= "]), (r" <= ", [" < "]), (r" > ", [" >= "]), (r" >= ", [" > "]),
    (r" == ", [" != "]), (r" != ", [" == "]), (r" \+ ", [" - "]), (r" - ", [" + "]),
    (r" \* ", [" + "]), (r" / ", [" * "]), (r" % ", [" / "]), (r" && ", [" || "]),
    (r" \|\| ", [" && "]), (r" \+= ", [" -= "]), (r" -= ", [" += "]), (r"\btrue\b", ["false"]),
    (r"\bfalse\b", ["true"]), (r"\bsmaller\(", ["larger("]), (r"\blarger\(", ["smaller("]),
    (r"\bmax_of\(", ["min_of("]), (r"(?<![\w.])0(?![\w.])", ["1"]),
    (r"(?<![\w.])([1-9]\d*)(?![\w.])", ["{next}"]), (r"!(?=[\w(])", [""]),
    (r"\bsync_(?:block|warp)\(\);", [";"]),
]

# By the beginning of a changed file's path: which tests of tests/python. Those of the CPU and of
# what all backends share run on the scalar instruction set, the others on the emulated GPU.
FORWARD_WGMMA = "tiles_of_warpgroups or bias_by_tma or tiles_are_counted"
TILE_MAP = "test_the_same_as_the_matrix and (tree or documents) or nobody"
SIMT = "(alone or at_once) and simt or test_emulated_adversarial and simt"
EMULATED = {
    "src/cuda/kernels/tile/wgmma/forward/f32": "tiles_of_warpgroups and f32",
    "src/cuda/kernels/split_f32": "gradients_of_f32 or tiles_of_warpgroups and f32",
    "src/cuda/kernels/tile/wgmma/backward/f32": "gradients_of_f32",
    "src/cuda/kernels/tile/wgmma/forward": FORWARD_WGMMA,
    "src/cuda/kernels/forward_wgmma": FORWARD_WGMMA,
    "src/cuda/kernels/tile_map": TILE_MAP,
    "src/cuda/kernels/tile/tile_map": TILE_MAP,
    "src/cuda/kernels/tile/span_bits": TILE_MAP,
    "src/cuda/kernels/tile/wgmma/backward/dropout": "test_with_other_features",
    "src/cuda/kernels/tile/wgmma": "wide_heads or take_turns or bias_has_its_gradient",
    "src/cuda/kernels/backward_w": "wide_heads or take_turns",
    "src/cuda/kernels/copy_inputs": "copied or rows_that_end",
    "src/cuda/kernels/combine_dkv": "test_splits or hidden_nan",
    "src/cuda/kernels/combine": "test_few_rows",
    "src/cuda/kernels/tile/simt": SIMT,
    "src/cuda/kernels/forward_simt": SIMT,
    "src/cuda/kernels/gradients_simt": SIMT,
    "": "test_few_rows or (alone or at_once) and mma or test_emulated_adversarial and mma",
}
SCALAR_SOURCES = ["src/cpu/kernels/isa_scalar.cpp", "src/problem/describe.cpp", "src/rows/rows.cpp"]
SCALAR = ("scalar and "
          "(test_set_of_features or test_everything or rows_far or tenth or infinity or hidden)")


@dataclass
class Mutant:
    path: str  # below the project's folder
    line: int  # from 1
    column: int
    before: str
    after: str
    text: str  # the line as it was, without its margin
    outcome: str = ""
    seconds: float = 0.0


# ------------------------------------------------------------------------------------- what changes


def code_of(line: str) -> str:
    """The line with blanks for its comment and its strings; nothing of a line for the compiler."""
    if re.match(r"\s*(#|static_assert|//)", line):
        return ""
    line = re.sub(r'"[^"]*"', lambda found: " " * len(found[0]), line)
    return line.partition("//")[0]


def mutants_of(path: Path) -> list[Mutant]:
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = code_of(line)
        for pattern, results in CHANGES:
            for place in re.finditer(pattern, code):
                for result in results:
                    after = result.replace("{next}", str(int(place[0]) + 1)
                                           if "{next}" in result else "")
                    found.append(Mutant(str(path.relative_to(ROOT)), number, place.start(),
                                        place[0], after, line.strip()))
    return found


def draw(seed: int, count: int) -> list[Mutant]:
    """Folders by their shares, then each mutant of a folder alike."""
    rng = random.Random(seed)
    drawn = []
    for folder, share in TEXTS.items():
        texts = sorted(path for path in (ROOT / folder).rglob("*")
                       if path.suffix in (".h", ".hpp", ".cuh")
                       and not path.name.startswith(LEFT_OUT))
        every = [mutant for path in texts for mutant in mutants_of(path)]
        drawn += rng.sample(every, min(len(every), count * share // sum(TEXTS.values())))
    return drawn


# ------------------------------------------------------------------------------------- what is run


class Copy:
    """The project's texts in a scratch folder, one of them changed at a time."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "texts"
        self.objects = folder / "objects"
        self.objects.mkdir(parents=True)
        for part in ("src", "include", "tests/cuda/machine"):
            shutil.copytree(ROOT / part, self.root / part)

    def change(self, mutant: Mutant) -> None:
        path = self.root / mutant.path
        lines = path.read_text().splitlines(keepends=True)
        line = lines[mutant.line - 1]
        end = mutant.column + len(mutant.before)
        assert line[mutant.column : end] == mutant.before
        lines[mutant.line - 1] = line[: mutant.column] + mutant.after + line[end:]
        path.write_text("".join(lines))

    def restore(self, mutant: Mutant) -> None:
        shutil.copy(ROOT / mutant.path, self.root / mutant.path)

    def compile(self, source: str) -> Path | None:
        """None where the compiler refuses the text."""
        to = self.objects / (Path(source).name + ".o")
        command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-fvisibility=hidden",
                   f"-I{self.root}/src", f"-I{self.root}/include", "-c", str(self.root / source),
                   "-o", str(to)]
        return None if subprocess.run(command, capture_output=True).returncode else to

    def scalar_texts(self, objects: Path) -> dict[str, str]:
        """Of each object that SCALAR_SOURCES are in, its text here. The build may compile a folder as
        one text, which includes its files by their whole names."""
        texts = {name: name for name in SCALAR_SOURCES}
        for joint in objects.glob("Unity/*.cxx"):
            content = joint.read_text()
            held = [name for name in SCALAR_SOURCES if f'/{name}"' in content]
            for name in held:
                del texts[name]
            if held:
                here = re.sub(r'"/[^"]*/(src/[^"]+)"', rf'"{self.root}/\1"', content)
                (self.root / joint.name).write_text(here)
                texts[f"Unity/{joint.name}"] = joint.name
        return texts

    def scalar_objects(self) -> list[Path] | None:
        """The library's, SCALAR_SOURCES of the changed texts; None if they do not compile."""
        objects = RELEASE / "CMakeFiles/regard_objects.dir"
        texts = self.scalar_texts(objects)
        with ThreadPoolExecutor() as pool:
            changed = list(pool.map(self.compile, texts.values()))
        if None in changed:
            return None
        others = set(objects.rglob("*.o")) - {objects / f"{name}.o" for name in texts}
        return [*others, *changed]

    def link(self, name: str, *arguments: str | Path) -> Path:
        to = self.objects / name
        subprocess.run(["g++", "-pthread", *map(str, arguments), "-o", str(to), "-ldl"], check=True)
        return to


def passes_suite(copy: Copy, objects: list[Path]) -> bool:
    """Whether the C++ suite of the kernels passes, which splits keys too."""
    tests = RELEASE / "tests/CMakeFiles"
    own = [*tests.glob("regard_tests.dir/**/*.o"), *tests.glob("test_main.dir/**/*.o")]
    program = copy.link("regard_tests", *objects, *own)
    command = [str(program), "--test-suite=kernels", "--minimal", "--abort-after=1"]
    try:
        return subprocess.run(command, env={"REGARD_BACKEND": "cpu:scalar"}, capture_output=True,
                              timeout=TIMEOUT).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def judge(mutant: Mutant, copy: Copy, cache: Path) -> str:
    """"found", "survives", "hangs" (found too) or "does not compile"."""
    environment = dict(os.environ)
    if not mutant.path.startswith("src/cuda/"):
        objects = copy.scalar_objects()
        if objects is None:
            return "does not compile"
        if not passes_suite(copy, objects):
            return "found"
        library = copy.link("libregard.so", "-shared", *objects)
        environment |= {"REGARD_LIBRARY": str(library)}
        paths = [f"tests/python/test_{name}.py" for name in ("pairs", "edges", "adversarial")]
        selection = SCALAR
    else:
        environment |= {"REGARD_LIBRARY": str(EMULATOR), "REGARD_EMULATOR_SOURCE": str(copy.root),
                        "REGARD_EMULATOR_CACHE": str(cache)}
        paths = sorted(map(str, ROOT.glob("tests/python/test_emulated*.py")))
        selection = next(EMULATED[begin] for begin in EMULATED if mutant.path.startswith(begin))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider",
               "-n", "auto", "-m", "not exhaustive", "-k", selection, *paths]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that run the tests
            return "hangs"
    if re.search(r"\.cpp:\d+:\d+: error: |\.(?:cuh|h):\d+:\d+: error: ", output):
        return "does not compile"
    return {0: "survives", NO_TESTS: "no test"}.get(process.returncode, "found")


# ------------------------------------------------------------------------------------ what it says


def report(mutants: list[Mutant], seed: int) -> str:
    count = {outcome: sum(m.outcome == outcome for m in mutants)
             for outcome in ("found", "hangs", "survives", "does not compile", "no test")}
    found, judged = count["found"] + count["hangs"], sum(count.values())
    judged -= count["does not compile"] + count["no test"]
    share = 100 * found / max(judged, 1)
    lines = [f"Seed {seed}: of {len(mutants)} changes {count['does not compile']} do not compile; "
             f"of the other {judged} the tests find {found} ({share:.0f} %).", "",
             "| survivor | text | change |", "|---|---|---|"]
    for m in mutants:
        if m.outcome in ("survives", "no test"):
            text = m.text.replace("|", "\\|")
            change = f"`{m.before.strip()}` to `{m.after.strip() or ' '}`".replace("|", "\\|")
            lines.append(f"| {m.path}:{m.line} | `{text}` | {change} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="begin none after these")
    parser.add_argument("--out", type=Path, help="a file for the report, which is printed as well")
    given = parser.parse_args()
    mutants = [m for m in draw(given.seed, given.count) if given.only in m.path]
    random.Random(given.seed).shuffle(mutants)
    began, judged = time.monotonic(), []
    cache = ROOT / "build/mutants"
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for number, mutant in enumerate(mutants, 1):
            start = time.monotonic()
            if start - began > given.seconds:
                break
            copy.change(mutant)
            mutant.outcome = judge(mutant, copy, cache)
            copy.restore(mutant)
            judged.append(mutant)
            print(f"mutate: {number:>3} of {len(mutants)}  {mutant.outcome:<16} "
                  f"{time.monotonic() - start:6.1f} s  {mutant.path}:{mutant.line}  "
                  f"{mutant.before.strip()} to {mutant.after.strip() or 'nothing'}", flush=True)
    text = report(judged, given.seed)
    print("\n" + text, end="")
    if given.out:
        given.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
