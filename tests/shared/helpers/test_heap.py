"""Arrays of a process that keeps what it has freed."""

import subprocess
import sys

PROGRAM = """
import resource
import numpy as np
from shared.helpers.heap import keep_freed_memory

{}
for turn in range(40):
    if turn == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(500_000) for _ in range(8)]
    del arrays
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_arrays_that_are_made_again_and_again_cost_no_page_faults() -> None:
    # Each array is written, and has 1,000 pages; all of them fit into what is kept.
    assert count_faults("") > 1000
    assert count_faults("keep_freed_memory()") < 100


def count_faults(before: str) -> int:
    program = [sys.executable, "-c", PROGRAM.format(before)]
    return int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
