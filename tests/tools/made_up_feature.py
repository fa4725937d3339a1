"""A made-up scalar feature, `shift`: a constant that is added to every logit, after ALiBi.

EDITS are all that its author changes in the library and in the tests of the C API: the dry run
behind docs/extending.md. Each edit finds a place by a regular expression and adds a text behind it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    file: str
    behind: str  # a regular expression; the first match counts
    text: str


LIBRARY = {
    "field": Edit("include/regard/regard.hpp", r"  double softcap = 0;.*\n",
                  "  double shift = 0;  ///< added to every logit\n"),
    "C field": Edit("include/regard/regard.h", r"  int32_t reserved; .*\n(?=\} regard_attention;)",
                    "  double shift; /**< added to every logit */\n"),
    "C size": Edit("src/c_layout.hpp", r"REGARD_PIN\(regard_attention, reserved, \d+\);\n"
                   r"static_assert\(sizeof\(regard_attention\) == \d+",
                   " + 8"),
    "C value": Edit("src/c_api.cpp", r"  attention\.softcap = a\.softcap;\n",
                    "  attention.shift = a.shift;\n"),
    "check": Edit("src/problem/describe.cpp", r"\"must be finite and not negative \(0 = off\)\"\);\n",
                  "  require(std::isfinite(a.shift), \"shift\", a.shift, \"must be finite\");\n"),
    "value": Edit("src/problem/describe.cpp", r"p\.score = \{[^}]*\.softcap = a\.softcap",
                  ", .shift = a.shift"),
    "bit": Edit("src/problem/describe.cpp", r"      \.signed_scale = !positive,\n",
                "      .shift = a.shift != 0,\n"),
    "print": Edit("src/problem/print.cpp", r"  if \(p\.features\.softcap\).*\n",
                  "  if (p.features.shift) text += \", shift \" + printed(p.score.shift);\n"),
    "feature": Edit("src/semantics/features.h", r"  bool signed_scale = false;.*\n",
                    "  bool shift = false;\n"),
    "shortcuts name": Edit("src/semantics/features.h", r"const auto& \[[^\]]*signed_scale", ", shift"),
    "shortcuts": Edit("src/semantics/features.h", r"signed_scale <= known\.signed_scale",
                      " && shift <= known.shift"),
    "parameter": Edit("src/semantics/score.h", r"  Real softcap = 0;\n", "  Real shift = 0;\n"),
    "narrowed name": Edit("src/semantics/score.h", r"const auto& \[scale, softcap", ", shift"),
    "narrowed": Edit("src/semantics/score.h", r"\.softcap = float\(clamp_to\(softcap, least, most\)\)",
                     ", .shift = float(shift)"),
    "score": Edit("src/semantics/score.h", r"    s = \{add_head_terms.*\n  \}\n",
                  "  if (on.shift) s = {L::fma(s.value, L::set(s.unit), L::set(params.shift)),"
                  " Real(1)};\n"),
    "plain": Edit("src/semantics/score.h", r"!on\.bias && !has_head_terms\(on\)",
                  " && !on.shift"),
    "record name": Edit("src/cuda/record.cpp", r"scale, softcap", ", shift"),
    "record": Edit("src/cuda/record.cpp", r"  if \(softcap != 0\).*\n",
                   "  if (shift != 0) object.add_number(\"shift\", shift);\n"),
    "ranks name": Edit("src/distributed/part.cpp", r"scale,\s+softcap", ", shift"),
    "ranks": Edit("src/distributed/part.cpp", r"  add\(\"softcap\", softcap\);\n",
                  "  add(\"shift\", shift);\n"),
    "list": Edit("src/plan/cuda/config_members.hpp", r"REGARD_MEMBER\(signed_scale\)",
                 ", REGARD_MEMBER(shift)"),
}

TESTS = {
    "oracle's argument": Edit("tests/python/oracle.py", r"seqused_k=None, scale=None, softcap=0\.0,",
                              " shift=0.0,"),
    "oracle's value": Edit("tests/python/oracle.py",
                           r"None if sink is None else work\(sink\[h\]\), z, scale, softcap,",
                           " shift,"),
    "oracle's head": Edit("tests/python/oracle.py",
                          r"def __init__\(self, q, k, v, bias, mask, slope, sink, z, scale, softcap,",
                          " shift,"),
    "oracle": Edit("tests/python/oracle.py", r"s = rnd\(s - slope \* np\.abs.*\n",
                   "        if shift:\n            s = rnd(s + shift)\n"),
    "case": Edit("tests/python/cases.py", r"    \"softcap\": \{\"softcap\": 1\.5\},\n",
                 "    \"shift\": {\"shift\": 0.7},\n"),
    "case's value": Edit("tests/python/cases.py", r"for name in \(\"causal\", \"window\", \"softcap\"",
                         ", \"shift\""),
    "off": Edit("tests/python/sensitivity.py", r"    \"softcap\": \{\"softcap\": 0\.0\},\n",
                "    \"shift\": {\"shift\": 0.0},\n"),
    "ctypes": Edit("tests/python/regard_ctypes.py", r"\(\"continue_from\", c_int32\), \(\"reserved\", c_int32\)",
                   ", (\"shift\", c_double)"),
}


def apply(root: Path, edits: list[Edit]) -> None:
    for edit in edits:
        path = root / edit.file
        text = path.read_text()
        found = re.search(edit.behind, text)
        assert found, f"{edit.file} has no {edit.behind}"
        path.write_text(text[:found.end()] + edit.text + text[found.end():])
