#!/usr/bin/env python3
"""Checks layers, the length of files and functions, suites of tests, and what objects export.

    tools/check_structure.py [--library libregard.so] [--objects isa_avx2.cpp.o ...] [--sanitized]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
MAX_FUNCTION = 60  # lines, of the library, the tool and the binding
FOLDERS = ["src", "include", "cli", "bench", "examples", "python", "tests", "tools"]
CODE = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".py", ".sh"}

# Folder: what its files may include with quotes - folders (with a slash) or single files.
LAYERS = {
    "include/regard": ["regard/"],
    "src/semantics": ["semantics/"],
    "src/problem": ["problem/", "semantics/", "regard/"],
    "src/plan": ["plan/", "problem/", "semantics/", "regard/"],
    "src/plan/cpu": ["plan/cpu/", "plan/count.h", "plan/explain_rows.hpp", "problem/", "semantics/",
                     "regard/"],
    "src/plan/cpu/kernel": ["plan/cpu/kernel/", "plan/count.h", "semantics/", "regard/type.hpp"],
    "src/plan/cuda": ["plan/cuda/", "plan/count.h", "plan/explain_rows.hpp", "problem/",
                      "semantics/", "regard/"],
    "src/plan/cuda/kernel": ["plan/cuda/kernel/", "problem/problem.h", "semantics/",
                             "regard/type.hpp"],
    "src/distributed": ["distributed/", "threads/", "rows/element.hpp", "cuda/driver.hpp",
                        "cuda/planning.hpp", "cuda/reachable.hpp", "cuda/shared_library.hpp",
                        "cuda/side_stream.hpp",
                        "cuda/workspace.hpp", "cuda/write_rows.hpp", "plan/count.h",
                        "problem/error_text.hpp", "problem/overlap.hpp",
                        "problem/given_memory.hpp", "problem/host_workspace.hpp", "problem/refuse.hpp",
                        "semantics/positions.h",
                        "regard/"],
    "src/rows": ["rows/", "problem/", "semantics/", "regard/"],
    "src/system": ["system/"],
    "src/threads": ["threads/", "system/", "problem/refuse.hpp", "regard/"],
    "src/reference": ["reference/", "rows/", "threads/", "plan/", "problem/", "semantics/",
                      "regard/"],
    "src/cpu": ["cpu/", "rows/", "threads/", "system/", "plan/", "problem/", "semantics/",
                "regard/"],
    "src/cpu/kernels": ["cpu/kernels/", "plan/cpu/kernel/", "problem/problem.h", "semantics/",
                        "regard/type.hpp"],
    "src/cuda": ["cuda/", "system/", "plan/", "problem/", "semantics/", "regard/"],
    "src/cuda/kernels": ["cuda/kernels/", "plan/cuda/kernel/", "problem/problem.h", "semantics/",
                         "regard/type.hpp"],
}  # fmt: skip
SYSTEM_HEADERS = {
    "src/semantics": set(),
    "src/cpu/kernels": {"arm_neon.h", "immintrin.h", "stdint.h", "sched.h"},
    "src/cuda/kernels": set(),
}
PROCESSOR_HEADER = re.compile(r"(\w*mmintrin|x86intrin|cpuid|arm_\w+)\.h")
PROCESSOR_FILES = ("src/cpu/kernels/", "src/cpu/processor_", "tests/")
EVERYTHING = {"src/api.cpp", "src/c_api.cpp", "src/c_layout.hpp"}
PUBLIC_ONLY = ("cli", "bench", "examples", "python")
INTERNAL = re.compile(
    r"(semantics|problem|plan|rows|threads|reference|distributed|cpu|cuda|system|src)/")

# The tool prints in one place, where no failure of a stream throws.
PRINTING = ("cli/output/output.cpp", re.compile(r"\b(stdout|stderr|fmt::print|std::c(out|err)|printf)\b"))

# A decimal number is text with a point, whatever the process's locale: problem/refuse.hpp's.
OF_LOCALE = re.compile(r"printf\([^;]*%[\d.*]*l?[aefg]|\bstrtod\b|\bsto[df]\b|\bstringstream\b", re.I)

RUNTIME = re.compile(r"(libc|libm|libdl|libstdc\+\+|libc\+\+|libgcc_s|libpthread|ld-linux-[\w-]+)\.so\.\d")
# Not a type, not an initialiser; and not the list of all that the Python module has.
FUNCTION = re.compile(r"\s*(?!(typedef|namespace|enum|extern|NB_MODULE)\b)[^=(]*\(")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def files() -> list[Path]:
    found = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*"))]
    return [p for p in found if p.is_file() and p.suffix in CODE and "__pycache__" not in p.parts]


def layer_of(name: str) -> str | None:
    fitting = [layer for layer in LAYERS if name.startswith(layer + "/")]
    return max(fitting, key=len, default=None)


def include_problems(name: str, text: str) -> list[str]:
    layer = layer_of(name)
    problems = []
    for kind, header in INCLUDE.findall(text):
        if kind == "<" and layer in SYSTEM_HEADERS and header not in SYSTEM_HEADERS[layer]:
            problems.append(f"{name}: {layer} may not include <{header}>")
        if PROCESSOR_HEADER.fullmatch(header) and not name.startswith(PROCESSOR_FILES):
            problems.append(f"{name}: <{header}> is for one kind of processor")
        if kind == '"' and layer:
            allowed = LAYERS[layer]
            if not any(header.startswith(a) if a.endswith("/") else header == a for a in allowed):
                problems.append(f'{name}: {layer} may not include "{header}"')
        if name.startswith(PUBLIC_ONLY) and (INTERNAL.match(header) or ".." in header):
            problems.append(f"{name}: only public headers may be included here, not {header}")
    if name.startswith("src/") and layer is None and name not in EVERYTHING:
        problems.append(f"{name}: belongs to no layer")
    return problems


def text_problems(name: str, text: str) -> list[str]:
    problems = []
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        problems.append(f"{name}: has {len(lines)} lines, more than {MAX_LINES}")
    for number, line in enumerate(lines, 1):
        # What Python scripts draw and print may be typeset.
        if not name.endswith(".py") and not line.isascii():
            problems.append(f"{name}:{number}: not ASCII")
    return problems


def function_problems(name: str, text: str) -> list[str]:
    """Of C++ as clang-format lays it out: functions end where their indentation returns."""
    if not name.startswith(("src/", "include/", "cli/", "python/binding/")):
        return []
    lines, problems = text.splitlines(), []
    for number, line in enumerate(lines):
        indent = re.match(r" *", line)[0]
        if not line.endswith("{") or len(indent) > 2:
            continue
        begin = number
        while (begin > 0 and lines[begin - 1] and lines[begin - 1][-1] not in ";}{:/"
               and not lines[begin - 1].lstrip().startswith("//")):
            begin -= 1
        head = " ".join(lines[begin:number + 1])
        if not FUNCTION.match(head):
            continue
        end = next((n for n in range(number + 1, len(lines)) if lines[n].startswith(indent + "}")),
                   len(lines))
        if end - number + 1 > MAX_FUNCTION:
            problems.append(f"{name}:{number + 1}: a function of {end - number + 1} lines, more "
                            f"than {MAX_FUNCTION}")
    return problems


def test_problems(name: str, text: str) -> list[str]:
    """CTest runs the tests by suite: one outside of any would never run."""
    test = text.find("\nTEST_CASE(")
    suites = [text.find("\nTEST_SUITE_BEGIN("), text.find("\nTEST_SUITE(")]
    begin = min((at for at in suites if at >= 0), default=len(text))
    return [f"{name}: a test before the first suite"] if 0 <= test < begin else []


def printing_problems(name: str, text: str) -> list[str]:
    if name.startswith("src/") and (found := OF_LOCALE.search(text)):
        return [f"{name}: {found[0]!r} depends on the locale"]
    where, printing = PRINTING
    if not name.startswith("cli/") or name == where:
        return []
    code = re.sub(r"//.*|\"(\\.|[^\"\\])*\"", "", text)
    found = printing.search(code)
    return [f"{name}: names {found[0]}, which only {where} may"] if found else []


def object_problems(objects: list[str]) -> list[str]:
    """No weak symbol leaves an object that was compiled for one instruction set."""
    problems = []
    kernels = [o for o in objects if Path(o).name.startswith("isa_")]
    if objects and not kernels:
        problems.append("no object of an instruction set among those given")
    for path in kernels:
        output = subprocess.run(["nm", "-C", path], check=True, capture_output=True, text=True)
        for line in output.stdout.splitlines():
            found = re.match(r"[0-9a-f]+ ([WVu]) (.*)", line)
            if found:
                problems.append(f"{Path(path).name}: weak symbol {found[2]}")
    return problems


def library_problems(library: str) -> list[str]:
    output = subprocess.run(["readelf", "-dW", library], check=True, capture_output=True, text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output.stdout)
    problems = [f"{Path(library).name}: needs {n}" for n in needed if not RUNTIME.fullmatch(n)]
    if not re.search(r"\(FLAGS_1\).*\bNODELETE\b", output.stdout):
        problems.append(f"{Path(library).name}: dlclose may unmap it (no NODELETE flag)")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="the shared library")
    parser.add_argument("--objects", nargs="*", default=[], help="the library's objects")
    parser.add_argument("--sanitized", action="store_true", help="built with sanitizers")
    arguments = parser.parse_args()
    problems: list[str] = []
    count = 0
    for path in files():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        problems += text_problems(name, text)
        if path.suffix not in {".py", ".sh"}:
            problems += include_problems(name, text)
            problems += printing_problems(name, text)
            problems += test_problems(name, text)
            problems += function_problems(name, text)
        count += 1
    if not arguments.sanitized:
        problems += object_problems(arguments.objects)
        problems += library_problems(arguments.library) if arguments.library else []
    for problem in problems:
        print(problem)
    print(f"{count} files, {len(arguments.objects)} objects: {len(problems)} problems")
    return 1 if problems or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
