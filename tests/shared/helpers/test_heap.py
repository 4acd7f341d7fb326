"""Arrays of a process that keeps what it has freed, or returns it."""

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


LOADING = """
import contextlib
from pathlib import Path
import numpy as np
from shared.helpers.heap import returning_freed_memory

with {}:
    # The first array that is freed makes the C library keep later ones.
    del [np.ones(500_000)][:]
    arrays = [np.ones(500_000) for _ in range(200)]
    del arrays[::2]
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(status["RssAnon"].split()[0])
"""


def test_freed_arrays_between_others_are_returned() -> None:
    size_kib = 100 * 500_000 * 8 // 1024
    assert run(LOADING, "contextlib.nullcontext()") > 1.9 * size_kib
    assert run(LOADING, "returning_freed_memory()") < 1.2 * size_kib


def count_faults(before: str) -> int:
    return run(PROGRAM, before)


def run(program: str, part: str) -> int:
    command = [sys.executable, "-c", program.format(part)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
