"""Packages of PyPI for tests, of versions that the environment of the tests cannot have."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ops.install import UV, index_options


def python_with(requirements: list[str], folder: Path) -> Path:
    """Return a Python in `folder` that has packages. Skip the test without an index."""
    python = folder / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    install = [UV, "pip", "install", "--quiet", "--python", str(python), "--system-certs"]
    done = subprocess.run(
        [*install, *index_options(), *requirements], capture_output=True, text=True, check=False
    )
    if unreached := re.search(r"Failed to fetch: \S+|Request failed after.*", done.stderr):
        pytest.skip(f"uv could not reach its index: {unreached[0]}")
    assert done.returncode == 0, done.stderr
    return python
