"""A failing test is reported, and ends no run."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ALLOWED_SKIPS

ROOT = Path(__file__).parent.parent

# Objects whose collection parses source, while the report of the failure does.
TESTS = """
import ast, gc, time
import pytest

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        ast.parse("x = [1, 2, 3]")

def test_that_fails_amid_garbage():
    gc.disable()
    gc.set_threshold(50)
    garbage = [Cycle() for _ in range(1000)]
    del garbage
    gc.enable()
    assert {"a": 1} == {"a": 2}

@pytest.mark.timeout(1)
def test_that_hangs():
    time.sleep(60)

def test_that_passes():
    pass
"""


def test_every_reason_of_a_mark_may_skip_all_of_its_tests(request: pytest.FixtureRequest) -> None:
    """Then the run also passes on a machine that lacks something that this machine has."""
    marks = (mark for item in request.session.items for mark in item.iter_markers("skipif"))
    reasons = Counter(mark.kwargs["reason"] for mark in marks)
    allowed = {reason: ALLOWED_SKIPS.get(reason, 0) for reason in reasons}
    assert reasons <= Counter(allowed), "raise the numbers of ALLOWED_SKIPS"


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_failures_and_time_limits_are_listed(tmp_path: Path, workers: str) -> None:
    """In one process, and in a worker of pytest-xdist, as in `make test`."""
    (tmp_path / "test_some.py").write_text(TESTS)
    options = ["-p", "tests.conftest", "--numprocesses", workers, "-q"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout
    assert "2 failed, 1 passed" in done.stdout
    listed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    assert listed == ["test_that_fails_amid_garbage", "test_that_hangs"]
