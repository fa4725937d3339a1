"""The documents hold together: links lead somewhere, programs are those of examples/, the names of
options and variables exist."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["docs", "bench", "examples", "tests", ".github"]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS
                                      for page in (ROOT / folder).rglob("*.md"))])
MOST_LINES = {"README.md": 150, "docs/performance.md": 150}

FILES = [path.relative_to(ROOT).as_posix() for folder in (
    "include", "src", "cli", "python", "cmake", "bench", "examples", "tests", "tools")
    for path in (ROOT / folder).rglob("*")] + [path.name for path in ROOT.iterdir()]
PLACEHOLDERS = ["_x.", "grads.", "layer."]  # names that a reader chooses

BLOCK = re.compile(r"^(?:<!-- (\S+): (\S+) -->\n)?```(cpp|c)\n(.*?)^```", re.MULTILINE | re.DOTALL)
REGION = re.compile(r"^ *(?://|/\*) \[(\w+)\](?: \*/)?\n(.*?)^ *(?://|/\*) \[/\1\]",
                    re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def regions(path: Path) -> dict[str, str]:
    """What stands between `// [name]` and `// [/name]`, moved to the left; "all" is the file
    without its first line."""
    text = path.read_text(encoding="utf-8")
    found = {name: textwrap.dedent(code) for name, code in REGION.findall(text)}
    return {**found, "all": text.split("\n", 1)[1]}


def anchors(page: Path) -> set[str]:
    """As hosts of Git derive them from headings: lower case, hyphens for blanks, no punctuation."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"),
                  flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower())
        slug, number = plain.replace(" ", "-"), 1
        while slug in found:
            slug, number = f"{plain.replace(' ', '-')}-{number}", number + 1
        found.add(slug)
    return found


def links(page: Path) -> list[tuple[str, str]]:
    """The path and the anchor of each relative link, outside code."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"),
                  flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [(target.partition("#")[0], target.partition("#")[2]) for target in targets
            if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"no {path}"
        assert target.is_relative_to(ROOT), f"{path} leaves the repository"
        if anchor:
            assert anchor in anchors(target), f"{path} has no heading for #{anchor}"


def test_every_page_is_on_the_map() -> None:
    """docs/README.md links each page of docs/ (those of docs/python are on a map of their own)."""
    mapped = {path for path, _ in links(ROOT / "docs/README.md")}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert not {page for page in pages - mapped - {"README.md"} if not page.startswith("python/")}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_programs_are_those_of_the_examples(page: Path) -> None:
    """`<!-- examples/guide.cpp: packed -->` before a block says which region it shows."""
    for path, region, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        assert path, f"this block names no example, so that nothing compiles it:\n{code}"
        assert path.endswith(f".{language}")
        assert code == regions(ROOT / path)[region], f"differs from {path}, {region}"


def test_every_region_is_shown() -> None:
    shown = {(path, region) for page in PAGES
             for path, region, _, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    for path in (ROOT / "examples").glob("*.c*"):
        for region in regions(path).keys() - {"all"}:
            assert (name_of(path), region) in shown, f"{path.name}: no page shows {region}"


@pytest.mark.parametrize("page", [page for page in PAGES if "notes" not in page.parts], ids=name_of)
def test_named_files_exist(page: Path) -> None:
    """`src/plan/cuda/chip.cpp` is a path from the root, `chip.cpp` the end of one."""
    text = re.sub(r"^```.*?^```|^    .*?$", "", page.read_text(encoding="utf-8"),
                  flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([\w/.-]+\.(?:c|h|hpp|cpp|cuh|py|cmake|sh|txt|jsonl))`", text):
        assert (page.parent / name).exists() or any(
            file == name or file.endswith("/" + name) for file in FILES) or any(
            part in name for part in PLACEHOLDERS), f"no file {name}"


@pytest.mark.parametrize("name", ["architecture", "extending", "kernels"])
def test_named_functions_and_values_exist(name: str) -> None:
    """Each `name` of the pages for contributors is a word of the code."""
    words: set[str] = set()
    for folder in ("include", "src", "tests", "tools", "python"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".h", ".hpp", ".cpp", ".cuh", ".py"}:
                words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Za-z_]\w{3,})(?:<\w+>)?`", page))
    assert named and not named - words


@pytest.mark.parametrize("name, most", MOST_LINES.items())
def test_length(name: str, most: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


def test_options_of_the_build_have_a_line() -> None:
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    options = set(re.findall(r"^(?:option|set)\((REGARD_\w+) ", text, re.MULTILINE))
    table = re.findall(r"^\| `(REGARD_\w+)`", (ROOT / "docs/guide-cpp.md").read_text(), re.MULTILINE)
    assert options == set(table)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        code = re.findall(r"`make ([\w-]+)|^    make ([\w-]+)", page.read_text(encoding="utf-8"),
                          re.MULTILINE)
        for name in filter(None, (a or b for a, b in code)):
            assert name in targets, f"{name_of(page)}: no make {name}"


def test_environment_variables_have_a_line() -> None:
    """What the library, the tool and the package read from the environment is in docs/gpu.md."""
    sources = [path for folder in ("src", "cli", "python") for path in (ROOT / folder).rglob("*")
               if path.suffix in {".cpp", ".hpp", ".py"}]
    read = {name for path in sources for name in re.findall(
        r'(?:getenv|variable|environ\.get)\("(\w+)"', path.read_text(encoding="utf-8"))}
    environment = (ROOT / "src/cuda/environment.cpp").read_text(encoding="utf-8")
    read |= set(re.findall(r'"([A-Z_]{4,})"', environment))  # those of its loops too
    table = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE))
    assert {"REGARD_BACKEND", "REGARD_CACHE_DIR"} <= read  # the search finds some
    assert read <= table, f"not in docs/gpu.md: {sorted(read - table)}"
