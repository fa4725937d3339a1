"""Compiles the public headers under every standard that they promise, with warnings as errors.

    check_headers.py INCLUDE COMPILER...

INCLUDE is the folder that holds regard/; COMPILERs that are not there are left out, and named.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

WARNINGS = [
    "-Wall", "-Wextra", "-pedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wcast-qual",
    "-Wundef", "-Werror",
]
C_STANDARDS = ["c99", "c11", "c17", "c2x"]
CPP_STANDARDS = ["c++20", "c++2b"]
CPP_HEADERS = [
    "regard.hpp", "cuda.hpp", "distributed.hpp", "mask.hpp", "tensor.hpp", "type.hpp", "error.hpp",
]
USE_OF_C = """
static regard_attention attention = REGARD_ATTENTION_INIT;
static regard_run run = REGARD_RUN_INIT;
int use(void);
int use(void) { return (int)attention.size + run.threads; }
"""
NEEDS_CPP20 = "the C++ API needs C++20"


def compile_text(compiler: str, include: str, standard: str, text: str) -> str:
    """What the compiler says of the text; empty if it has nothing to say."""
    language = "c++" if "++" in standard else "c"
    result = subprocess.run(
        [compiler, f"-std={standard}", *WARNINGS, f"-I{include}", "-x", language, "-fsyntax-only", "-"],
        input=text, capture_output=True, text=True, check=False)
    return result.stderr if result.returncode or result.stderr else ""


def cases(compilers: list[str]):
    """(compiler, standard, text) of everything that must compile."""
    for compiler in compilers:
        if "++" not in compiler:
            for standard in C_STANDARDS:
                yield compiler, standard, '#include "regard/regard.h"\n' + USE_OF_C
            continue
        for standard in ["c++11", *CPP_STANDARDS]:
            yield compiler, standard, '#include "regard/regard.h"\n'
        for standard in CPP_STANDARDS:
            for header in CPP_HEADERS:
                yield compiler, standard, f'#include "regard/{header}"\n'


def main() -> int:
    include, *wanted = sys.argv[1:]
    compilers = [name for name in wanted if shutil.which(name)]
    for name in sorted(set(wanted) - set(compilers)):
        print(f"{name} is not on this machine")
    listed = list(cases(compilers))
    with ThreadPoolExecutor(2) as pool:
        said = pool.map(lambda case: compile_text(case[0], include, case[1], case[2]), listed)
        wrong = [(case, text) for case, text in zip(listed, said) if text]
    for (compiler, standard, text), message in wrong:
        print(f"{compiler} -std={standard}, {text.splitlines()[0]}\n{message}")
    for compiler in compilers:
        if "++" not in compiler:
            continue
        first = compile_text(compiler, include, "c++17", '#include "regard/regard.hpp"\n').split("\n")
        if not any(NEEDS_CPP20 in line for line in first[:4]):
            print(f"{compiler} -std=c++17 does not begin with '{NEEDS_CPP20}':", *first[:4], sep="\n")
            wrong.append(((compiler, "c++17", ""), ""))
    print(f"{len(listed)} compilations, {len(wrong)} wrong")
    return 1 if wrong or not listed else 0


if __name__ == "__main__":
    sys.exit(main())
