"""The cache of compiled kernels, for processes that need the same at the same time."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no compiler, or no AVX-512")

# It counts its calls, and waits for the file `go`.
WRAPPER = """#!/bin/sh
case "$*" in
*" -o "*)
    echo $$ >> {folder}/calls
    while [ ! -e {folder}/go ]; do sleep 0.05; done
    ;;
esac
exec {compiler} "$@"
"""
# A process that needs the kernels. A small source takes the place of ours, which takes minutes.
PROCESS = """
import sys
from pathlib import Path
from shared.native import library, targets
targets.SOURCES, targets.HEADERS = ("small.cpp",), ()
targets.SOURCE_FOLDER = Path(sys.argv[1])
library.FLAGS = ("-shared", "-fPIC")
print("begins", flush=True)
print(library._compile(sys.argv[2]), flush=True)
"""


@dataclass
class Machine:
    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[str]:
        """Start a process, and return when it begins to look for its kernels."""
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(self.folder), str(self.folder / "compiler")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"XDG_CACHE_HOME": str(self.folder / "cache")},
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        return process

    def calls(self) -> list[int]:
        """Return the process ids of the compilers so far."""
        file = self.folder / "calls"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_calls(self, count: int) -> None:
        wait_until(lambda: len(self.calls()) >= count)

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    wrapper = tmp_path / "compiler"
    wrapper.write_text(WRAPPER.format(folder=tmp_path, compiler=COMPILER))
    wrapper.chmod(0o755)
    (tmp_path / "small.cpp").write_text('extern "C" int answer() { return 42; }\n')
    build = Machine(tmp_path)
    yield build
    build.go()
    for process in build.processes:
        process.kill()
        process.communicate()


def result(process: subprocess.Popen[str]) -> Path:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return Path(out.strip())


def test_one_of_several_processes_compiles_and_the_others_wait(machine: Machine) -> None:
    first = machine.start()
    machine.wait_for_calls(1)
    others = [machine.start() for _ in range(2)]
    # They would call their compilers by now.
    time.sleep(1)
    assert len(machine.calls()) == 1
    machine.go()
    files = {result(process) for process in (first, *others)}
    assert len(files) == 1
    assert files.pop().is_file()
    assert len(machine.calls()) == 1
    assert [path.suffix for path in (machine.folder / "cache" / "pagemill").iterdir()] == [".so"]


def test_a_process_that_dies_while_it_compiles_blocks_no_other(machine: Machine) -> None:
    first = machine.start()
    machine.wait_for_calls(1)
    second = machine.start()
    first.send_signal(signal.SIGKILL)
    first.wait()
    # Its compiler continues, without the lock.
    machine.wait_for_calls(2)
    os.kill(machine.calls()[0], 0)
    machine.go()
    assert result(second).is_file()


def test_a_compiler_that_fails_lets_the_next_process_try(machine: Machine) -> None:
    first = machine.start()
    machine.wait_for_calls(1)
    second = machine.start()
    os.kill(machine.calls()[0], signal.SIGKILL)
    machine.wait_for_calls(2)
    machine.go()
    assert first.wait(120) != 0
    assert result(second).is_file()
