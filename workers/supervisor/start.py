"""Start of local workers: waits until all are ready, as long as they show signs of life.

A worker shows a sign of life when it reports a new step or more bytes, when it computes, or when
its process reads from a disk. A sign counts only if it exceeds all earlier signs of the same
worker. So a worker that repeatedly dies and restarts stops showing signs of life.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from shared.blobs.server import host_id
from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.helpers.process_usage import UNUSED, Usage, usage_of
from shared.protocol import subjects
from shared.protocol.messages import Heartbeat, StartReport
from workers.roles import WorkerSpec

# An event loop that only waits, and publishes one report per second, uses less than this share of
# a processor. A worker that computes gets more, even on a busy machine.
IDLE_SHARE = 0.02
MIN_CPU_S = 0.5
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class Show(Protocol):
    """Receiver of the progress of a start, which it shows to the user."""

    def ready(self, title: str, after_s: float) -> None: ...

    def progress(self, title: str, text: str) -> None:
        """Show the current step of a worker. It is called again while the step is unchanged."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation of one worker at one moment."""

    exit_code: int | None = None
    is_ready: bool = False
    report: StartReport | None = None
    usage: Usage = UNUSED


@dataclass(slots=True, eq=False)
class _Worker:
    """State of one worker between observations."""

    title: str
    sign_s: float
    """Time of the last sign of life."""
    is_ready: bool = False
    is_shown: bool = False
    """Whether it was shown as ready."""
    text: str = "starting"
    step_to_bytes: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    read_bytes: int = 0


class StartWatch:
    """The state of a start."""

    def __init__(
        self, specs: Sequence[WorkerSpec], silence_s: float, show: Show, now_s: float
    ) -> None:
        self._began_s = now_s
        self._silence_s = silence_s
        self._show = show
        self._workers = [_Worker(title, now_s) for title in titles_of(specs)]

    @property
    def is_complete(self) -> bool:
        return all(worker.is_ready for worker in self._workers)

    def observe(self, now_s: float, observations: Mapping[int, Observation]) -> None:
        """Process observations by number of the worker. A missing worker has no process."""
        for number, worker in enumerate(self._workers):
            now = observations.get(number, Observation())
            worker.is_ready = now.is_ready
            if now.is_ready:
                worker.sign_s = now_s
                if not worker.is_shown:
                    self._show.ready(worker.title, now_s - self._began_s)
                worker.is_shown = True
            else:
                worker.is_shown = worker.is_shown and now.exit_code is None
                if _shows_life(worker, now, now_s):
                    worker.sign_s = now_s
                worker.text = _describe(now)
                # A worker that was shown as ready only has a late heartbeat.
                if not worker.is_shown:
                    self._show.progress(worker.title, worker.text)

    def why_stalled(self, now_s: float) -> str | None:
        """Return why the start cannot succeed any more, or None."""
        missing = [worker for worker in self._workers if not worker.is_ready]
        if not missing or now_s - max(worker.sign_s for worker in missing) < self._silence_s:
            return None
        names = "; ".join(f"{worker.title} (last: {worker.text})" for worker in missing)
        return (
            f"not ready, and no sign of life for {self._silence_s:g} s (start_silence_s): {names}"
        )


def titles_of(specs: Sequence[WorkerSpec]) -> list[str]:
    """Return a name for each worker: role, model and stage, with a number among equal ones."""
    total, so_far = Counter(specs), Counter[WorkerSpec]()
    titles = []
    for spec in specs:
        so_far[spec] += 1
        words = [
            spec.role,
            spec.model,
            spec.stage,
            spec.pool,
            total[spec] > 1 and f"#{so_far[spec]}",
        ]
        titles.append(" ".join(word for word in words if word))
    return titles


def _shows_life(worker: _Worker, now: Observation, now_s: float) -> bool:
    """Record the observation's signs of life, and return whether there is a new one."""
    alive = False
    if (report := now.report) is not None and (
        report.done_bytes > worker.step_to_bytes.get(report.step, -1)
    ):
        worker.step_to_bytes[report.step] = report.done_bytes
        alive = True
    least_s = max(MIN_CPU_S, IDLE_SHARE * (now_s - worker.sign_s))
    if now.usage.cpu_s > worker.cpu_s + least_s:
        alive = True
    if now.usage.read_bytes > worker.read_bytes:
        worker.read_bytes = now.usage.read_bytes
        alive = True
    if alive:
        # The idle share counts from the last sign of any kind.
        worker.cpu_s = max(worker.cpu_s, now.usage.cpu_s)
    return alive


def _describe(now: Observation) -> str:
    if now.exit_code is not None:
        return f"ended with code {now.exit_code}; starts again"
    return "starting" if now.report is None else _describe_step(now.report)


def _describe_step(report: StartReport) -> str:
    """Return the current step of a worker, such as `reading weights, 1.2 of 4.7 GB`."""
    if not report.total_bytes:
        return report.step
    unit, size = next((unit for unit in UNITS if report.total_bytes >= unit[1]), UNITS[-1])
    done, total = (
        f"{num_bytes / size:.1f}" for num_bytes in (report.done_bytes, report.total_bytes)
    )
    return f"{report.step}, {done} of {total} {unit}"


POLL_S = 0.1

Sign = TypeVar("Sign", Heartbeat, StartReport)


class Watched(Protocol):
    """Process of a worker that starts."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...


class Quiet:
    """Shows nothing."""

    def ready(self, title: str, after_s: float) -> None:
        pass

    def progress(self, title: str, text: str) -> None:
        pass


async def wait_ready(
    bus: Bus,
    specs: Sequence[WorkerSpec],
    process_of: Callable[[int], Watched | None],
    silence_s: float,
    show: Show,
) -> list[Heartbeat]:
    """Return the workers' heartbeats as soon as each of `specs` has one.

    `process_of` returns the current process of a worker by its number. Raises Unavailable when
    no worker that is not ready has shown a sign of life for `silence_s`.
    """
    loop = asyncio.get_running_loop()
    watch = StartWatch(specs, silence_s, show, loop.time())
    host = host_id()
    while True:
        beats, reports = await read_signs(bus)
        here = [beat for beat in beats if beat.may_run_on(host)]
        own: dict[int, Heartbeat] = {}
        observations = {}
        for number, spec in enumerate(specs):
            if (process := process_of(number)) is None:
                continue
            role = spec.role
            if (beat := _find(here, process, role)) is not None:
                own[number] = beat
            observations[number] = Observation(
                exit_code=process.returncode,
                is_ready=beat is not None and process.returncode is None,
                report=_find(reports, process, role),
                usage=usage_of(process.pid),
            )
        watch.observe(loop.time(), observations)
        if watch.is_complete:
            return list(own.values())
        if (reason := watch.why_stalled(loop.time())) is not None:
            raise Unavailable(reason)
        # Readiness is an event of other processes, so the loop has to poll.
        await asyncio.sleep(POLL_S)


async def read_signs(bus: Bus) -> tuple[list[Heartbeat], list[StartReport]]:
    """Return the heartbeats of ready workers and the reports of workers that start.

    Both are empty until the first worker has created their stream.
    """
    try:
        # Without this check, reads of a missing stream are repeated for BROKER_DEADLINE_S.
        await bus.figures.size(subjects.WORKERS_STREAM)
        return await bus.heartbeats.read(), await bus.heartbeats.read_starts()
    except Unavailable:
        return [], []


def _find(signs: Sequence[Sign], process: Watched, role: str) -> Sign | None:
    """Return the sign of life of a process.

    The role is compared too, because machines that share a broker use the same process ids.
    """
    return next((sign for sign in signs if (sign.pid, sign.role) == (process.pid, role)), None)
