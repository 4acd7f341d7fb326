"""The rights of a hostile file that has taken over its decoder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.helpers import sandbox, syscall_filter
from tests.renderer.decoding.trying import OPERATIONS, REFUSED

ROOT = Path(__file__).parent.parent.parent
# The interpreter and its modules may belong to root alone, so the user may read all files.
RIGHTS = "+dac_read_search"
AS_USER = [
    "setpriv",
    f"--reuid={sandbox.NOBODY}",
    f"--regid={sandbox.NOBODY}",
    "--clear-groups",
    f"--inh-caps={RIGHTS}",
    f"--ambient-caps={RIGHTS}",
]

needs_filter = pytest.mark.skipif(
    not syscall_filter.is_available(), reason="needs seccomp on a known processor"
)


@needs_filter
@pytest.mark.parametrize("user", ["this user", "an ordinary user"])
def test_a_decoder_can_do_nothing_but_compute(user: str) -> None:
    """An ordinary user owns files and processes, and has all rights in a user namespace."""
    prefix: list[str] = []
    if user != "this user":
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("this user is an ordinary one, or there is no setpriv")
        prefix = AS_USER
    command = [*prefix, sys.executable, "-m", "tests.renderer.decoding.trying"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == dict.fromkeys(OPERATIONS, REFUSED)
