"""The checks of speeches, on written histories."""

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ops.chaos.checks import speech
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.expected_speech import ExpectedSpeech
from ops.chaos.history import (
    Accepted,
    CancelSent,
    RecordReceived,
    RequestSent,
    SessionFailed,
    SoundEnded,
    SoundReceived,
    SpeechNamed,
    digest_of,
)
from ops.chaos.plan import Planned
from shared.protocol.records import (
    AudioChunk,
    CodeChunk,
    Finish,
    LogRecord,
    OutputEnd,
    OutputEnds,
    OutputRecord,
    OutputSummary,
    Usage,
)
from shared.protocol.requests import GenerateRequest
from tests.chaos.test_checker import failure, make_run

edit = msgspec.structs.replace
ID, BUS_ID = "c1-0", "req-1"
SOUND = bytes(range(12))
SPEECH = ExpectedSpeech([5, 6, 7], SOUND)
END = OutputSummary(units={"samples": 6})
CODES: list[OutputRecord] = [
    CodeChunk(0, 1, 0, [[5], [6]]),
    CodeChunk(1, 1, 2, [[7]]),
    OutputEnd(2, 1, OutputSummary(units={"frames": 3})),
]


def audio(index: int, first: int, num: int, sound: bytes = SOUND, attempt: int = 1) -> AudioChunk:
    pcm = base64.b64encode(sound[2 * first : 2 * (first + num)]).decode()
    return AudioChunk(index, attempt, first, num, 24_000, pcm)


AUDIO: list[OutputRecord] = [audio(0, 0, 2), audio(1, 2, 4), OutputEnd(2, 1, END)]
FINISH = Finish(
    0, 1, Usage(0, 0), 0, [], {"codes": OutputSummary(units={"frames": 3}), "audio": END}
)
ENDS = OutputEnds(["codes", "audio"], FINISH.outputs)


def heard(at: int, size: int, session: int = 1, sound: bytes = SOUND) -> SoundReceived:
    return SoundReceived(1.3, ID, session, at, size, digest_of(sound[at : at + size]))


HEARD = [heard(0, 4), heard(4, 8), SoundEnded(1.4, ID, 1, False)]


def run_of(
    outputs: dict[str, list[OutputRecord]],
    *,
    log: list[LogRecord] | None = None,
    clients: list[Any] = HEARD,
    ends: OutputEnds | None = ENDS,
    http: bool = False,
    failed: str = "",
) -> RecordedRun:
    """A speech of which a client heard all, over NATS or, with another id, through a gateway."""
    log = [FINISH] if log is None else log
    run = make_run()
    request = GenerateRequest("demo", given_text="a", outputs=["audio"], timeout_s=10.0)
    planned = Planned(ID, request, "plain", 0, 10.0, http=http)
    events: list[Any] = [RequestSent(1.0, ID, 1, 0, True), Accepted(1.1, ID, 1), *clients]
    if http:
        events.append(SpeechNamed(1.2, ID, 1, BUS_ID))
    else:
        events += [RecordReceived(1.4, ID, 1, record) for record in log]
    if failed:
        events.append(SessionFailed(1.3, ID, 1, failed, "why"))
    id = BUS_ID if http else ID
    final = edit(
        run.final,
        logs={} if http else {ID: log},
        unnamed={BUS_ID: log} if http else {},
        outputs={id: outputs},
        ends={} if ends is None else {id: ends},
    )
    return replace(
        run,
        planned={ID: planned},
        expected={},
        speeches={ID: SPEECH},
        clients=events,
        final=final,
    )


def found(run: RecordedRun) -> list[str]:
    return [f"{violation.invariant}: {violation.text}" for violation in speech.find(run)]


def of(codes: list[OutputRecord] = CODES, sound: list[OutputRecord] = AUDIO) -> Any:
    return {"codes": codes, "audio": sound}


@pytest.mark.parametrize("http", [False, True])
def test_a_clean_speech_is_not_flagged(http: bool) -> None:
    assert found(run_of(of(), http=http)) == []
    codes: list[OutputRecord] = [
        CodeChunk(0, 2, 0, [[5], [6]]),
        OutputEnd(1, 1, OutputSummary(), True),
    ]
    cut = of(codes, [CUT_AT_ONCE])
    stopped: list[LogRecord] = [failure("cancelled", 0)]
    assert found(run_of(cut, log=stopped, clients=[heard(0, 4)], http=False)) == []


OTHER_CODES: list[OutputRecord] = [
    CodeChunk(0, 1, 0, [[1], [2], [3]]),
    OutputEnd(1, 1, OutputSummary(units={"frames": 3})),
]
CUT_AT_ONCE = OutputEnd(0, 1, OutputSummary(), cut=True)
WRONG = bytes([0, 0, 0, 9, *SOUND[4:]])

FAULTY: list[tuple[Callable[[], RecordedRun], str]] = [
    (lambda: run_of(of(sound=AUDIO[:2])), "I16: audio: has no end"),
    (lambda: run_of(of(sound=[audio(0, 0, 2), audio(1, 0, 2), *AUDIO[1:]])), "record 1 instead"),
    (lambda: run_of(of(sound=[audio(0, 0, 2), audio(1, 1, 5), AUDIO[2]])), "continues at 1"),
    (lambda: run_of(of(sound=[audio(0, 0, 2), OutputEnd(1, 1, END)])), "audio: 4 of 4 differs"),
    (lambda: run_of(of(sound=[audio(0, 0, 2, WRONG), *AUDIO[1:]])), "audio: 1 of 12 differs"),
    (lambda: run_of(of(sound=[*AUDIO, audio(3, 6, 1, SOUND * 2)])), "1 records follow its end"),
    (
        lambda: run_of(of(sound=[audio(0, 0, 2, attempt=2), *AUDIO[1:]])),
        "I4: audio: record 1 is of attempt 1",
    ),
    (lambda: run_of(of(codes=OTHER_CODES)), "I3: codes: 0 of 3"),
    (lambda: run_of(of(sound=[*AUDIO[:2], OutputEnd(2, 1, END, True)])), "was cut, although the"),
    (lambda: run_of(of(sound=[*AUDIO[:2], OutputEnd(2, 1, OutputSummary())])), "request differs"),
    (lambda: run_of(of(), ends=None), "no list of its outputs"),
    (lambda: run_of(of(), ends=OutputEnds(ENDS.expected, {})), "the ends of [] alone"),
    (lambda: run_of(of(), clients=[heard(0, 4), heard(0, 4)]), "I2: session 1: samples at byte 0"),
    (lambda: run_of(of(), clients=[heard(0, 4), heard(8, 4)]), "byte 8 instead of 4: missing"),
    (lambda: run_of(of(), clients=[heard(0, 4, sound=WRONG)]), "I3: session 1: the 4 bytes at 0"),
    (lambda: run_of(of(), clients=HEARD[:2]), "ended without the end of its sound"),
    (lambda: run_of(of(), clients=[HEARD[0], HEARD[2]]), "its sound ended at byte 4 of 12"),
    (lambda: run_of(of(), http=True, clients=[], failed="connection"), "never got the whole"),
    (lambda: run_of(of(), http=True, failed="400"), "I10: failed with 400"),
    (lambda: run_of(of(), http=True, log=[]), "I1: its log has no end"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name"), FAULTY, ids=[name for _, name in FAULTY])
def test_each_fault_is_flagged(make: Callable[[], RecordedRun], name: str) -> None:
    assert any(name in violation for violation in found(make())), found(make())


def test_a_speech_whose_id_no_client_learned_is_known_by_its_codes() -> None:
    run = run_of(of(), http=True)
    run.clients[:] = [event for event in run.clients if not isinstance(event, SpeechNamed)]
    assert found(run) == []
    run = replace(run, final=edit(run.final, outputs={BUS_ID: of(codes=OTHER_CODES)}))
    assert found(run) == ["I5: a speech that no client has asked for"]


def test_a_client_that_cancels_needs_no_end() -> None:
    run = run_of(of(), http=True, clients=[heard(0, 4), CancelSent(1.3, ID, 0)])
    assert found(run) == []
