"""tools/mutate.py: which changes it draws, and that a text is changed in one place and restored."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutate  # noqa: E402


@pytest.mark.parametrize("line, code", [
    ("  int a = 1;  // 2 < 3", "  int a = 1;  "), ("#include <x>", ""), ("// a < b", ""),
    ('  static_assert(a < 4);', ""), ('f("a < b", 1);', "f(       , 1);")])
def test_comments_strings_and_assertions_are_left(line, code):
    assert mutate.code_of(line) == code


def test_changes_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    path = tmp_path / "text.cuh"
    path.write_text("// 1 < 2\n"
                    "for (int i = 0; i < n && !last; i += 8) std::vector<int> x = a * b;\n")
    found = {(m.before, m.after) for m in mutate.mutants_of(path)}
    assert found == {("0", "1"), (" < ", " <= "), (" && ", " || "), ("!", ""), (" += ", " -= "),
                     ("8", "9"), (" * ", " + ")}
    assert {m.line for m in mutate.mutants_of(path)} == {2}


def test_the_same_seed_draws_the_same_changes_of_every_folder():
    drawn = mutate.draw(7, 50)
    assert drawn == mutate.draw(7, 50) and drawn != mutate.draw(8, 50)
    assert len({(m.path, m.line, m.column, m.after) for m in drawn}) == 50
    for folder, share in mutate.TEXTS.items():
        assert sum(m.path.startswith(folder) for m in drawn) == 50 * share // 5


def test_a_text_is_changed_in_one_place_and_restored(tmp_path):
    copy = mutate.Copy(tmp_path)
    mutant = mutate.draw(3, 50)[0]
    copy.change(mutant)
    before, after = ((root / mutant.path).read_text().splitlines() for root in (ROOT, copy.root))
    assert [n for n, (a, b) in enumerate(zip(before, after), 1) if a != b] == [mutant.line]
    line = before[mutant.line - 1]
    assert after[mutant.line - 1] == (line[:mutant.column] + mutant.after
                                      + line[mutant.column + len(mutant.before):])
    copy.restore(mutant)
    assert (copy.root / mutant.path).read_text() == (ROOT / mutant.path).read_text()


def test_each_changed_text_takes_the_place_of_one_object(tmp_path):
    objects = mutate.RELEASE / "CMakeFiles/regard_objects.dir"
    copy = mutate.Copy(tmp_path)
    texts = copy.scalar_texts(objects)
    assert [name for name in texts if not (objects / f"{name}.o").exists()] == []
    included = {path for text in texts.values()
                for path in re.findall(r'#include "(/.*)"', (copy.root / text).read_text())}
    for name in mutate.SCALAR_SOURCES:
        assert name in texts or str(copy.root / name) in included
    assert all(path.startswith(f"{copy.root}/src/") for path in included)


def test_the_report_counts_and_names_survivors():
    mutants = [mutate.Mutant("a.h", 3, 0, " < ", " <= ", "a < b | c", outcome)
               for outcome in ("found", "survives", "hangs", "does not compile")]
    text = mutate.report(mutants, 5)
    assert "of 4 changes 1 do not compile; of the other 3 the tests find 2 (67 %)" in text
    assert text.count("| a.h:3 | `a < b \\| c` | `<` to `<=` |") == 1
