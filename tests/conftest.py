"""A test that fails ends with the command that repeats it.

Tests draw their inputs from their names and parameters, so that a name is all that it takes. The
marker `exhaustive` (pyproject.toml) keeps a test out of `make test`; `make test-all` has it. With
REGARD_TEST_SHARE=1/3, one of three such tests runs, by their names; 0/3 and 2/3 are the others.
"""

import os
import shlex
import sys
import zlib

import pytest

# What a test's result depends on besides its name.
PREFIXES = ("REGARD_", "LD_LIBRARY_PATH")


def command_of(item):
    """The command that runs a test again, by itself, in any folder."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(os.environ.items())
                if name.startswith(PREFIXES)]
    node = f"{item.path}::{item.nodeid.partition('::')[2]}"
    return " ".join([*settings, shlex.quote(sys.executable), "-m pytest", shlex.quote(node)])


def pytest_collection_modifyitems(config, items):
    if "REGARD_TEST_SHARE" not in os.environ:
        return
    number, _, count = os.environ["REGARD_TEST_SHARE"].partition("/")
    chosen, others = [], []
    for item in items:
        is_chosen = (not item.get_closest_marker("exhaustive")
                     or zlib.crc32(item.nodeid.encode()) % int(count) == int(number))
        (chosen if is_chosen else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("to repeat it", command_of(item)))
    return report
