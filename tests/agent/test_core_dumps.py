"""Agents leave no core dumps."""

import subprocess
import sys

READ = """
import ctypes, resource
from workers.agent.core_dumps import forbid_core_dumps
forbid_core_dumps()
PR_GET_DUMPABLE = 3
print(resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(PR_GET_DUMPABLE))
"""


def test_neither_the_limit_nor_the_kernel_permits_a_core() -> None:
    ran = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True)
    assert ran.stdout == "(0, 0) 0\n"
