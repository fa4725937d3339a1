"""Sphinx's settings for `make docs`: the guides and the reference as one site in build/docs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]

project = "Regard"
copyright = "the authors of Regard; Apache-2.0"
version = (ROOT / "CMakeLists.txt").read_text().split("project(regard VERSION ")[1].split()[0]
extensions = ["breathe", "myst_parser", "autoapi.extension", "sphinx.ext.napoleon"]
napoleon_use_ivar = True  # a class's "Attributes" are fields of its text; autoapi describes them too
html_theme = "furo"
html_title = f"Regard {version}"

breathe_projects = {"regard": str(ROOT / "build/doxygen/xml")}
breathe_default_project = "regard"
breathe_domain_by_extension = {"h": "c", "hpp": "cpp"}

# Read as text: neither the compiled module nor a framework is needed.
autoapi_dirs = [str(ROOT / "python/regard")]
autoapi_generate_api_docs = False
python_maximum_signature_line_length = 80

myst_heading_anchors = 4
# The guides also link to files outside docs/, which are no pages here; tests/docs checks those
# links.
suppress_warnings = ["myst.xref_missing", "duplicate_declaration.c", "duplicate_declaration.cpp",
                     "autoapi.python_import_resolution"]


# The package's folder under its name, without __init__.py, which would load the compiled module.
sys.modules["regard"] = ModuleType("regard")
sys.modules["regard"].__path__ = [str(ROOT / "python/regard")]
filled = importlib.import_module("regard.docstrings").filled


def plain_text(app, what, name, thing, options, lines: list[str]) -> None:
    """Placeholders are filled. The text is plain: | and * mean themselves, and indented paragraphs
    are code."""
    lines[:] = filled("\n".join(lines)).split("\n")
    text: list[str] = []
    in_code = False
    for line in lines:
        begins = line.startswith("    ") and text[-1:] == [""] and not text[-2].startswith(" ")
        in_code = begins or (in_code and (not line or line.startswith("    ")))
        text += ["::", ""] if begins else []
        text.append(line if in_code else line.replace("|", r"\|").replace("*", r"\*"))
    lines[:] = text


def setup(app) -> None:
    app.connect("autodoc-process-docstring", plain_text, priority=400)  # before napoleon reads it
