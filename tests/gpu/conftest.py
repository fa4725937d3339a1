"""Collection and running of the GPU's tests: which backends, which share, and what went wrong.

`backend` runs a test once for each kernel family; types that a family does not have are left out.
--shard I/N runs one of N shares, which tools/test_gpu.py starts side by side: kernels are compiled
at their first use, on one core each. A kernel that faults spoils its process, and one that hangs
holds it: both end the process here; --record says how far it got, and the next process goes on.
"""

import json
import os
import sys
import threading
import time

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: its matrices are small here
sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "python")]
pytest.register_assert_rewrite("solve", "cases", "test_edges", "test_metamorphic",
                               "test_invariance", "test_dropout", "test_concurrency",
                               "test_adversarial")

import device  # noqa: E402
import regard_ctypes as regard  # noqa: E402

HANG_SECONDS = 45  # a test that takes longer is taken to hang
ENDED_EARLY = 9    # the exit status of a process that must be followed by another


def pytest_addoption(parser):
    group = parser.getgroup("regard")
    group.addoption("--device", default="cuda", choices=["cuda", "host"],
                    help="host: a dry run of these tests on the CPU's backends")
    group.addoption("--shard", default="0/1", help="I/N: the I-th of N shares, from 0")
    group.addoption("--record", help="a file that gets JSON lines for each test as it begins and "
                    "ends; tests that have ended according to it are left out")
    group.addoption("--all-pairs", action="store_true",
                    help="every pair of features by itself (minutes of compiling)")


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: needs the GPU, or its memory, for itself")
    config.addinivalue_line("markers", "deterministic: every call of the test is")
    config.missing = device.install(config.getoption("--device"))


def pytest_report_header(config):
    if config.missing:
        return f"no GPU to test: {config.missing}"
    machine = device.STATE.driver
    return f"regard {regard.C.regard_version().decode()} on {machine.name()}"


@pytest.hookimpl(trylast=True)  # so that backend varies fastest, and a cached case serves them all
def pytest_generate_tests(metafunc):
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    for fixture in ("backend", "kernel"):
        if fixture in metafunc.fixturenames and fixture not in own:
            metafunc.parametrize(fixture, device.backends())
    if "level" in metafunc.fixturenames:
        metafunc.parametrize("level", device.levels())


def pytest_ignore_collect(collection_path, config):
    if collection_path.name == "test_all_pairs.py" and not config.getoption("--all-pairs"):
        return True


def backend_of(item):
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return next((parameters[name] for name in ("backend", "kernel", "level")
                 if name in parameters), None), parameters.get("type")


def case_of(item):
    """What a test shares with the same test on other backends."""
    backend, _ = backend_of(item)
    return item.nodeid.replace(f"-{backend}]", "]") if backend else item.nodeid


def ended(path):
    """Tests that a file of --record says to have ended, in this process or an earlier one."""
    if not path or not os.path.exists(path):
        return set()
    with open(path) as file:
        return {line["test"] for line in map(json.loads, file) if "outcome" in line}


def pytest_collection_modifyitems(config, items):
    if config.missing:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=config.missing))
    share, shares = map(int, config.getoption("--shard").split("/"))
    cases, chosen, left_out, done = {}, [], [], ended(config.getoption("--record"))
    for item in items:
        backend, type = backend_of(item)
        fits = not backend or not type or device.takes(backend, type)
        if item.path.name == "test_shared.py" and backend == "cuda:simt":
            fits = type in (None, "f64", "bf16")  # each kernel takes a second to compile
        mine = fits and cases.setdefault(case_of(item), len(cases)) % shares == share
        if mine and item.nodeid not in done:
            chosen.append(item)
        else:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


# -------------------------------------------------------------------------------- each test's way


@pytest.fixture(autouse=True)
def calls(request):
    """Every test begins with the defaults, attached to the GPU, after a call that succeeded."""
    device.STATE.deterministic = True if request.node.get_closest_marker("deterministic") else None
    device.STATE.own_workspace = True
    device.STATE.on_host = frozenset()
    device.STATE.driver.attach()
    regard.dropout_probability(0.0)
    yield device.STATE
    device.STATE.driver.attach()


class Record:
    """Writes a line for each finished test; ends the process where going on is useless."""

    def __init__(self, config):
        self.file = open(config.getoption("--record"), "a")
        self.timer = None

    def write(self, nodeid, **more):
        self.file.write(json.dumps({"test": nodeid} | more) + "\n")
        self.file.flush()

    def finish(self, nodeid, outcome, seconds, message=""):
        self.write(nodeid, outcome=outcome, seconds=round(seconds, 3), message=message)

    def watch(self, nodeid):
        self.write(nodeid)
        began = time.monotonic()

        def hung():
            self.finish(nodeid, "failed", time.monotonic() - began,
                        f"hung: no end after {HANG_SECONDS} s")
            os._exit(ENDED_EARLY)

        self.timer = threading.Timer(HANG_SECONDS, hung)
        self.timer.daemon = True
        self.timer.start()


def message_of(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return " ".join(text.split())[:300]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    if not item.config.getoption("--record"):
        return (yield)
    record = item.config.stash.setdefault(KEY, None) or Record(item.config)
    item.config.stash[KEY] = record
    record.watch(item.nodeid)
    item.reports = []
    try:
        return (yield)
    finally:
        record.timer.cancel()
        bad = [report for report in item.reports if report.failed]
        outcome = "failed" if bad else "skipped" if any(r.skipped for r in item.reports) else (
            "passed")
        record.finish(item.nodeid, outcome, sum(r.duration for r in item.reports),
                      message_of(bad[0]) if bad else "")
        if bad and not item.config.missing and device.STATE.driver.is_broken():
            os._exit(ENDED_EARLY)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if hasattr(item, "reports"):
        item.reports.append(report)
    return report


KEY = pytest.StashKey()
