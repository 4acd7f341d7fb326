"""The benchmark's handle of a peer's process."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ops.bench.peers import protocol
from ops.bench.peers.protocol import Request, Result, Setup
from ops.bench.peers.roster import Spec, environment
from ops.harness import machine
from shared.helpers.process_usage import usage_of

# A start compiles, and the machine may be busy.
PATIENCE_S = 900.0
END_S = 30.0


class PeerFailed(Exception):
    """A peer failed; the message has its traceback, or the name of its log file."""


@dataclass(frozen=True, slots=True)
class Measured:
    result: Result
    other_cpu: float
    """Share of the machine that other processes used meanwhile."""


class PeerProcess:
    def __init__(self, spec: Spec, python: Path, setup: Setup, logs: Path) -> None:
        """Start the peer. Raises PeerFailed if it does not become ready."""
        self.spec = spec
        self._log = logs / f"{spec.name}.log"
        began_s = time.perf_counter()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", f"ops.bench.peers.{spec.module[0]}", *spec.module[1:]],
                env=environment(spec, python, setup.threads, setup.kv_cache_gib),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._ask(protocol.write(setup))
        self.start_s = time.perf_counter() - began_s

    @property
    def peak_bytes(self) -> int:
        return machine.peak_bytes(self._process.pid)

    def run(self, requests: list[Request]) -> Measured:
        """Run requests. Raises PeerFailed."""
        pid = self._process.pid
        began_s, busy_s, own_s = time.perf_counter(), machine.busy_s(), usage_of(pid).cpu_s
        result = protocol.read_result(self._ask(protocol.write(requests)))
        took_s = time.perf_counter() - began_s
        others_s = (machine.busy_s() - busy_s) - (usage_of(pid).cpu_s - own_s)
        share = max(0.0, others_s) / (took_s * (os.cpu_count() or 1))
        return Measured(result, share)

    def stop(self) -> None:
        # The process ends at the end of its stdin.
        with contextlib.suppress(BrokenPipeError), self._process:
            timer = threading.Timer(END_S, self._kill)
            timer.start()
        timer.cancel()

    def _ask(self, line: str) -> str:
        with self._impatience():
            answer = self._exchange(line)
        failed = protocol.read_failed(answer) if answer else None
        if answer and failed is None:
            return answer
        self._kill()
        self.stop()
        raise PeerFailed(failed.message if failed else f"its process ended; see {self._log}")

    def _exchange(self, line: str) -> str:
        """Return a line, or an empty one if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()
        return self._process.stdout.readline()

    @contextlib.contextmanager
    def _impatience(self) -> Iterator[None]:
        timer = threading.Timer(PATIENCE_S, self._kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
