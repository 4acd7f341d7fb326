"""Invariants I2 to I4 and I16 of painted images: each once, with the bytes of a run alone."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ops.chaos.checks.recorded_run import RecordedRun, Violation
from ops.chaos.checks.speech import Faults, end_faults, output_faults
from ops.chaos.history import ImageReceived
from ops.chaos.plan import PAINTED
from shared.protocol.records import Finish, ImageRecord, OutputRecord, StepState
from shared.state.media_store import media_url


def find(run: RecordedRun) -> Iterator[Violation]:
    """Yield the violations of all painted images."""
    received: dict[str, list[ImageReceived]] = defaultdict(list)
    for event in run.clients:
        if isinstance(event, ImageReceived):
            received[event.id].append(event)
    for id, digests in run.images.items():
        for faults in (
            _log_faults(run, id, digests),
            _client_faults(run, id, digests, received[id]),
            end_faults(run, id, run.final.logs.get(id, [])),
        ):
            yield from (Violation(invariant, id, text) for invariant, text in faults)


def _log_faults(run: RecordedRun, id: str, digests: Sequence[str]) -> Faults:
    records: Sequence[OutputRecord] = run.final.outputs.get(id, {}).get(PAINTED, [])
    yield from output_faults(records)
    images: dict[int, str] = {}
    steps: dict[int, int] = defaultdict(int)
    for record in records:
        match record:
            case ImageRecord(number=number, media=media):
                if number in images:
                    yield "I2", f"image {number} is in the log twice"
                elif number >= len(digests) or media != media_url(digests[number]):
                    yield "I3", f"image {number} of {len(digests)} has other pixels"
                images[number] = media
            case StepState(number=number, step=step) if record.state:
                if step <= steps[number] or number in images:
                    yield "I2", f"image {number} goes back to step {step} from {steps[number]}"
                steps[number] = step
            case _:
                continue
    log = run.final.logs.get(id, [])
    if log and isinstance(log[-1], Finish) and len(images) < len(digests):
        yield "I2", f"finished with {len(images)} of {len(digests)} images"


def _client_faults(
    run: RecordedRun, id: str, digests: Sequence[str], received: Sequence[ImageReceived]
) -> Faults:
    by_session: dict[int, list[int]] = defaultdict(list)
    for event in received:
        by_session[event.session].append(event.number)
        if event.number >= len(digests) or event.digest != digests[event.number]:
            yield "I3", f"session {event.session}: image {event.number} has other bytes"
    for session in run.sessions.get(id, []):
        number, final = session.opened.session, session.final
        finished = final is not None and isinstance(final.record, Finish)
        if finished and sorted(by_session[number]) != list(range(len(digests))):
            yield "I2", f"session {number} got the images {by_session[number]}"
