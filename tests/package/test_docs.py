"""Every python block of README.md and docs/ runs, a page's blocks one after the other."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
         if "```python\n" in page.read_text(encoding="utf-8")]
FRAMEWORKS = {"pytorch.md": ["torch"], "jax.md": ["jax"], "models.md": ["torch"],
              "distributed.md": ["torch"],
              "transformers.md": ["torch", "transformers"]}


def pages():
    """Those that load a whole framework for one example are for `make test-all`."""
    slow = {"jax.md", "transformers.md"}
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix(),
                         marks=pytest.mark.exhaustive if page.name in slow else ())
            for page in PAGES]


@pytest.mark.parametrize("page", pages())
def test_examples_run(page):
    for module in FRAMEWORKS.get(page.name, []):
        pytest.importorskip(module)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text[: match.start(1)].count("\n")
        exec(compile("\n" * line + match[1], str(page), "exec"), namespace)


def test_docstrings_name_no_place_to_fill():
    import regard
    import regard.masks

    modules = [regard, regard.masks]
    for name in ("torch", "jax"):
        if importlib.util.find_spec(name):
            modules.append(importlib.import_module(f"regard.{name}"))
    for module in modules:
        for name in module.__all__:
            text = getattr(module, name).__doc__ or ""
            assert not re.search(r"\{\w+\}", text), f"{module.__name__}.{name}"
