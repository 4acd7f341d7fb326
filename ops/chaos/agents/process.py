"""An agent in a process of its own, of which one knows the responses that it holds."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

TAKEN, LEFT = "+", "-"
"""First letters of the lines that the process writes, each with the id of a response."""


class AgentProcess:
    """A process of `ops.chaos.agents.worker`, its file of taken responses, and the signals for it.

    What it held when it was killed or stopped tells whether the fault has hit anything.
    """

    def __init__(self, config: Path, url: str, bug: str, report: Path) -> None:
        command = [sys.executable, "-m", "ops.chaos.agents.worker", str(config), url, bug]
        self._report = report
        with report.with_suffix(".log").open("wb") as log, report.open("wb") as taken:
            self._process = subprocess.Popen(command, stdout=taken, stderr=log)
        self.pid = self._process.pid

    @property
    def taken(self) -> set[str]:
        """Ids of all responses that the agent has ever worked on."""
        return {line[1:] for line in self._report.read_text().splitlines()}

    @property
    def held(self) -> set[str]:
        """Ids of the responses that the agent works on."""
        return held_in(self._report.read_text())

    def kill(self) -> None:
        """Kill the process, and return when it has ended."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Have the process stand still, and return when it does."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def held_in(report: str) -> set[str]:
    """Return the responses that were taken more often than left: one may come to an agent twice."""
    held = Counter[str]()
    for line in report.splitlines():
        held[line[1:]] += 1 if line.startswith(TAKEN) else -1
    return {name for name, count in held.items() if count > 0}
