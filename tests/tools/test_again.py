"""What a failing test prints repeats it."""

import pathlib
import re
import shutil
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent.parent
FAILING = """
import os
import pytest

@pytest.mark.parametrize("text", ["a b", "it's", "c"])
def test_text(text):
    assert text == "c", f"{text} is not c with {os.environ['REGARD_WORD']}"
"""


def test_a_failure_prints_the_command_that_repeats_it(tmp_path):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_text.py").write_text(FAILING)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    first = subprocess.run(run, cwd=tmp_path, env={"REGARD_WORD": "two words"}, text=True,
                           capture_output=True)
    assert "2 failed, 1 passed" in first.stdout
    commands = re.findall(r"-+ to repeat it -+\n(.+)", first.stdout)
    assert len(commands) == 2
    for command, text in zip(commands, ["a b", "it's"]):
        again = subprocess.run(command, shell=True, cwd="/", env={}, text=True,
                               capture_output=True)
        assert "1 failed" in again.stdout and "passed" not in again.stdout
        assert f"{text} is not c with two words" in again.stdout
