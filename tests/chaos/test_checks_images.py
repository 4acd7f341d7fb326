"""The checks of painted images, on written histories."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ops.chaos.checks import images
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.history import Accepted, ImageReceived, RecordReceived, RequestSent
from ops.chaos.plan import Planned
from shared.protocol.records import (
    Finish,
    ImageRecord,
    LogRecord,
    OutputEnd,
    OutputEnds,
    OutputRecord,
    OutputSummary,
    StepState,
    Usage,
)
from shared.protocol.requests import GenerateRequest
from shared.state.media_store import media_url
from tests.chaos.test_checker import failure, make_run

edit = msgspec.structs.replace
ID, FILES = "c1-0", ["0" * 64, "1" * 64]
END = OutputSummary(units={"images": 2})
FINISH = Finish(0, 1, Usage(0, 0), 0, [], {"image": END})


def step(index: int, number: int, step: int, attempt: int = 1) -> StepState:
    return StepState(index, attempt, number, step, 5, media_url("a" * 64))


def image(index: int, number: int, file: str = "") -> ImageRecord:
    return ImageRecord(index, 1, number, media_url(file or FILES[number]), 48, 48, 7)


RIGHT: list[OutputRecord] = [
    step(0, 1, 2),
    step(1, 0, 1),
    image(2, 1),
    step(3, 0, 3),
    image(4, 0),
    OutputEnd(5, 1, END),
]


def run_of(
    records: list[OutputRecord] = RIGHT,
    files: tuple[tuple[int, str], ...] = ((1, FILES[1]), (0, FILES[0])),
    log: list[LogRecord] | None = None,
) -> RecordedRun:
    """A request for two images, which a client has received."""
    log = [FINISH] if log is None else log
    request = GenerateRequest("demo", prompt="a", outputs=["image"], timeout_s=10.0)
    events: list[Any] = [RequestSent(1.0, ID, 1, 0, True), Accepted(1.1, ID, 1)]
    events += [ImageReceived(1.3, ID, 1, number, digest) for number, digest in files]
    events += [RecordReceived(1.4, ID, 1, record) for record in log]
    run = make_run()
    ends = {ID: OutputEnds(["image"], {"image": END} if log == [FINISH] else {})}
    return replace(
        run,
        planned={ID: Planned(ID, request, "plain", 0, 10.0)},
        expected={},
        images={ID: FILES},
        clients=events,
        final=edit(run.final, logs={ID: log}, outputs={ID: {"image": records}}, ends=ends),
    )


def found(run: RecordedRun) -> list[str]:
    return [f"{violation.invariant}: {violation.text}" for violation in images.find(run)]


def test_clean_images_are_not_flagged() -> None:
    assert found(run_of()) == []
    cut: list[OutputRecord] = [step(0, 1, 2), OutputEnd(1, 1, OutputSummary(), cut=True)]
    assert found(run_of(cut, (), [failure("cancelled", 0)])) == []


FAULTY: list[tuple[Callable[[], RecordedRun], str]] = [
    (lambda: run_of([*RIGHT[:2], image(2, 1, "f" * 64), *RIGHT[3:]]), "I3: image 1 of 2 has other"),
    (lambda: run_of([*RIGHT[:3], image(3, 1), *RIGHT[4:]]), "I2: image 1 is in the log twice"),
    (lambda: run_of([*RIGHT[:3], step(3, 0, 1), *RIGHT[4:]]), "I2: image 0 goes back to step 1"),
    (lambda: run_of([*RIGHT[:3], step(3, 1, 4), *RIGHT[4:]]), "I2: image 1 goes back to step 4"),
    (lambda: run_of([*RIGHT[:2], *RIGHT[3:]]), "I2: record 3 instead of 2: missing"),
    (lambda: run_of([step(0, 1, 2), OutputEnd(1, 1, END)]), "finished with 0 of 2 images"),
    (lambda: run_of([step(0, 1, 2, 2), *RIGHT[1:]]), "I4: record 1 is of attempt 1"),
    (lambda: run_of(RIGHT[:-1]), "I16: image: has no end"),
    (lambda: run_of(files=((1, FILES[1]),)), "I2: session 1 got the images [1]"),
    (
        lambda: run_of(files=((1, FILES[1]), (0, "f" * 64))),
        "I3: session 1: image 0 has other bytes",
    ),
]


@pytest.mark.parametrize(("make", "name"), FAULTY, ids=[name for _, name in FAULTY])
def test_each_fault_of_images_is_flagged(make: Callable[[], RecordedRun], name: str) -> None:
    assert any(name in violation for violation in found(make())), found(make())
