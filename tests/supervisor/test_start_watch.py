"""Signs of life of workers that start, from observations made by hand."""

from collections.abc import Mapping

import pytest

from shared.helpers.process_usage import Usage
from shared.protocol.messages import StartReport
from workers.roles import WorkerSpec
from workers.supervisor.start import Observation, StartWatch, titles_of

SILENCE_S = 10.0
ENGINE = WorkerSpec("engine", "demo")
RENDERER = WorkerSpec("renderer")
READY = Observation(is_ready=True)


class Shown:
    """The lines of a start."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def ready(self, title: str, after_s: float) -> None:
        self.lines.append(f"{title} ready in {after_s:g} s")

    def progress(self, title: str, text: str) -> None:
        line = f"{title}: {text}"
        if line not in self.lines:
            self.lines.append(line)


def reading(done: int, step: str = "reading weights", **changes: object) -> Observation:
    report = StartReport("engine", "engine-1", "0", 1, step, "demo", "", done, 4_700_000_000)
    return Observation(report=report, **changes)  # type: ignore[arg-type]


def stall_of(
    beats: Mapping[int, list[Observation]], *specs: WorkerSpec
) -> tuple[str | None, Shown]:
    """Feed one observation of each worker a second; return why the start has stalled at the end."""
    progress = Shown()
    watch = StartWatch(specs, SILENCE_S, progress, 0.0)
    (num_seen,) = {len(observations) for observations in beats.values()}
    for second in range(num_seen):
        watch.observe(float(second), {n: each[second] for n, each in beats.items()})
        if (reason := watch.why_stalled(float(second))) is not None:
            return reason, progress
    return None, progress


def test_a_start_has_no_limit_while_weights_are_read() -> None:
    slow = [reading(100_000_000 * (second // 8)) for second in range(300)]
    reason, progress = stall_of({0: slow}, ENGINE)
    assert reason is None
    assert "engine demo: reading weights, 1.2 of 4.7 GB" in progress.lines


def test_a_worker_that_holds_the_interpreter_computes() -> None:
    """It reports nothing meanwhile."""
    busy = [Observation(usage=Usage(cpu_s=0.3 * second)) for second in range(300)]
    assert stall_of({0: busy}, ENGINE)[0] is None


def test_a_worker_that_reads_from_a_disk_lives() -> None:
    waits = [Observation(usage=Usage(read_bytes=4096 * (second // 8))) for second in range(300)]
    assert stall_of({0: waits}, ENGINE)[0] is None


def test_a_loop_that_waits_and_reports_the_same_is_silent() -> None:
    hung = [reading(1_200_000_000, usage=Usage(cpu_s=0.002 * second)) for second in range(300)]
    reason, _ = stall_of({0: hung}, ENGINE)
    assert reason == (
        "not ready, and no sign of life for 10 s (start_silence_s):"
        " engine demo (last: reading weights, 1.2 of 4.7 GB)"
    )


def test_one_worker_that_moves_is_enough_until_it_is_ready() -> None:
    hung = [reading(0)] * 60
    moves = [Observation(usage=Usage(cpu_s=float(second))) for second in range(60)]
    assert stall_of({0: hung, 1: moves}, ENGINE, RENDERER)[0] is None
    ready = [*moves[:20], *[Observation(is_ready=True, usage=Usage(cpu_s=99.0))] * 40]
    reason, progress = stall_of({0: hung, 1: ready}, ENGINE, RENDERER)
    assert reason is not None
    assert "engine demo" in reason
    assert "renderer" not in reason
    assert progress.lines.count("renderer ready in 20 s") == 1


def test_a_worker_that_dies_again_and_again_falls_silent() -> None:
    """Every life of it computes and reads as much as the one before."""
    life = [
        *(reading(1000 * n, usage=Usage(cpu_s=float(n), read_bytes=n)) for n in range(4)),
        Observation(exit_code=1),
    ]
    reason, _ = stall_of({0: life * 20}, ENGINE)
    assert reason is not None
    assert "engine demo" in reason


def test_a_worker_without_a_process_is_silent() -> None:
    reason, progress = stall_of({1: [READY] * 30}, ENGINE, RENDERER)
    assert reason is not None
    assert "engine demo (last: starting)" in reason
    assert progress.lines == ["engine demo: starting", "renderer ready in 0 s"]


def test_a_ready_worker_that_dies_is_waited_for_again() -> None:
    progress = Shown()
    watch = StartWatch([ENGINE], SILENCE_S, progress, 0.0)
    for second, observation in enumerate([READY, Observation(exit_code=-9), READY]):
        watch.observe(float(second), {0: observation})
        assert watch.is_complete == observation.is_ready
    assert progress.lines == [
        "engine demo ready in 0 s",
        "engine demo: ended with code -9; starts again",
        "engine demo ready in 2 s",
    ]


def test_a_heartbeat_that_is_late_neither_stalls_nor_repeats_a_line() -> None:
    progress = Shown()
    watch = StartWatch([ENGINE], SILENCE_S, progress, 0.0)
    watch.observe(0.0, {0: READY})
    watch.observe(500.0, {0: READY})
    watch.observe(501.0, {0: Observation()})
    assert watch.why_stalled(501.0) is None
    watch.observe(502.0, {0: READY})
    assert progress.lines.count("engine demo ready in 0 s") == 1
    assert not any("502" in line for line in progress.lines)


@pytest.mark.parametrize(
    ("specs", "titles"),
    [
        ([RENDERER, ENGINE], ["renderer", "engine demo"]),
        ([ENGINE, RENDERER, ENGINE], ["engine demo #1", "renderer", "engine demo #2"]),
        ([WorkerSpec("speaker", "demo", "speak")], ["speaker demo speak"]),
    ],
)
def test_workers_have_distinct_titles(specs: list[WorkerSpec], titles: list[str]) -> None:
    assert titles_of(specs) == titles
