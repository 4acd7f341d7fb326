"""A failing test is reported, and ends no run."""

import re
import subprocess
import sys
from pathlib import Path

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


def test_failures_and_time_limits_are_listed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-q", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout
    assert "2 failed, 1 passed" in done.stdout
    listed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    assert listed == ["test_that_fails_amid_garbage", "test_that_hangs"]
