"""Invariants I1 to I5 and I16 of speeches: the right codes and samples of each, once.

Codes and samples are compared with a run without faults, which computes each speech in one piece.
So the samples of a log are also the vocoder's output for the codes of that log.
"""

import base64
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ops.chaos.checks.recorded_run import RecordedRun, Violation
from ops.chaos.checks.requests import first_difference
from ops.chaos.expected_speech import ExpectedSpeech
from ops.chaos.history import RequestSent, SoundEnded, SoundReceived, SpeechNamed, digest_of
from ops.chaos.plan import AUDIO, CODES, Planned
from shared.protocol.pipeline import TEXT
from shared.protocol.records import (
    AudioChunk,
    CodeChunk,
    Finish,
    LogRecord,
    OutputEnd,
    OutputRecord,
)
from shared.state.log_records import is_final

Faults = Iterator[tuple[str, str]]
"""Pairs of an invariant and a description of its violation."""

OUTPUTS = (CODES, AUDIO)
TRANSIENT_CODES = ("connection", "silence", "503")


class Sound(NamedTuple):
    """The sound of one session of a client."""

    pieces: list[SoundReceived]
    ends: list[SoundEnded]


def find(run: RecordedRun) -> Iterator[Violation]:
    """Yield the violations of all speeches."""
    sounds = _sounds_of(run)
    for planned in run.planned.values():
        if planned.speaks:
            faults = _client_faults(run, planned, sounds.get(planned.id, {}))
            if not planned.http:
                log = run.final.logs.get(planned.id, [])
                speech = run.speeches[planned.id]
                faults = chain(faults, _log_faults(run, planned.id, log, speech))
            yield from (Violation(invariant, planned.id, text) for invariant, text in faults)
    named = {e.bus_id: run.speeches[e.id] for e in run.clients if isinstance(e, SpeechNamed)}
    for id, log in run.final.unnamed.items():
        faults = _unnamed_faults(run, id, log, named.get(id) or _speech_of_codes(run, id))
        yield from (Violation(invariant, id, text) for invariant, text in faults)
    for id in run.final.outputs.keys() - run.final.logs.keys() - run.final.unnamed.keys():
        yield Violation("I5", id, "outputs of a request that has no log")


def _sounds_of(run: RecordedRun) -> Mapping[str, Mapping[int, Sound]]:
    """Return the sound that each session received, by request and session."""
    sounds: dict[str, dict[int, Sound]] = defaultdict(dict)
    for event in run.clients:
        if isinstance(event, RequestSent) and run.planned[event.id].speaks:
            sounds[event.id][event.session] = Sound([], [])
        elif isinstance(event, SoundReceived):
            sounds[event.id][event.session].pieces.append(event)
        elif isinstance(event, SoundEnded):
            sounds[event.id][event.session].ends.append(event)
    return sounds


# -- sounds at clients -------------------------------------------------------------------------


def _client_faults(run: RecordedRun, planned: Planned, sounds: Mapping[int, Sound]) -> Faults:
    speech = run.speeches[planned.id]
    for session, sound in sounds.items():
        for invariant, text in _sound_faults(sound, speech):
            yield invariant, f"session {session}: {text}"
    whole = {session for session, sound in sounds.items() if _is_whole(sound)}
    find_more = _gateway_client_faults if planned.http else _bus_client_faults
    yield from find_more(run, planned, whole)


def _is_whole(sound: Sound) -> bool:
    return bool(sound.ends) and not sound.ends[0].cut


def _bus_client_faults(run: RecordedRun, planned: Planned, whole: set[int]) -> Faults:
    for read in run.sessions.get(planned.id, []):
        number, final = read.opened.session, read.final
        finished = final is not None and isinstance(final.record, Finish)
        if finished and number not in whole:
            yield "I2", f"session {number} ended without the end of its sound"


def _gateway_client_faults(run: RecordedRun, planned: Planned, whole: set[int]) -> Faults:
    if planned.behaviour == "deadline":
        return  # Each failure may be the deadline.
    failures = run.session_failures.get(planned.id, [])
    for failed in failures:
        if failed.code not in TRANSIENT_CODES:
            yield "I10", f"failed with {failed.code}: {failed.reason}"
    if not whole and planned.id not in run.cancelled:
        yield "I1", f"its client never got the whole speech, after {len(failures)} failures"


def _sound_faults(sound: Sound, speech: ExpectedSpeech) -> Faults:
    reached = 0
    for piece in sound.pieces:
        if piece.at != reached:
            kind = "repeated" if piece.at < reached else "missing"
            yield "I2", f"samples at byte {piece.at} instead of {reached}: {kind}"
            return
        reached += piece.num_bytes
        if piece.digest != digest_of(speech.sound[piece.at : reached]):
            yield "I3", f"the {piece.num_bytes} bytes at {piece.at} have other samples"
            return
    if len(sound.ends) > 1:
        yield "I2", f"its sound ended {len(sound.ends)} times"
    if sound.ends and not sound.ends[0].cut and reached != len(speech.sound):
        yield "I2", f"its sound ended at byte {reached} of {len(speech.sound)}"


# -- the logs ----------------------------------------------------------------------------------


def _unnamed_faults(
    run: RecordedRun, id: str, log: Sequence[LogRecord], speech: ExpectedSpeech | None
) -> Faults:
    """Check the logs of a speech over HTTP. Its own log contains its end and nothing else."""
    if speech is None:
        yield "I5", "a speech that no client has asked for"
        return
    yield from _log_faults(run, id, log, speech)
    if not (log and is_final(log[-1])):
        yield "I1", "its log has no end"
    if len(log) > 1 or any(record.index for record in log):
        yield "I2", f"its log has {len(log)} records in place of its end alone"


def _log_faults(
    run: RecordedRun, id: str, log: Sequence[LogRecord], speech: ExpectedSpeech
) -> Faults:
    outputs = run.final.outputs.get(id, {})
    for name, records in outputs.items():
        for invariant, text in output_faults(records):
            yield invariant, f"{name}: {text}"
    finished = bool(log) and isinstance(log[-1], Finish)
    pairs: list[tuple[str, Sequence[int], Sequence[int]]] = [
        (CODES, codes_of(outputs), speech.codes),
        (AUDIO, sound_of(outputs), speech.sound),
    ]
    for name, values, targets in pairs:
        if values != targets[: None if finished else len(values)]:
            at = first_difference(values, targets)
            yield "I3", f"{name}: {at} of {len(values)} differs, {len(targets)} are right"
    yield from end_faults(run, id, log)


def output_faults(records: Sequence[OutputRecord]) -> Faults:
    """Check one output's log: no gap, nothing twice, one end, no attempt after a later one."""
    position = 0
    for index, record in enumerate(records):
        if record.index != index:
            kind = "repeated" if record.index < index else "missing"
            yield "I2", f"record {record.index} instead of {index}: {kind}"
            return
        # A coordinator that cuts an output counts its attempts separately.
        is_cut = isinstance(record, OutputEnd) and record.cut
        if index and not is_cut and record.attempt < records[index - 1].attempt:
            yield "I4", f"record {index} is of attempt {record.attempt}, after a later one"
        if isinstance(record, OutputEnd) and index + 1 < len(records):
            yield "I16", f"{len(records) - index - 1} records follow its end"
            return
        match record:
            case CodeChunk(position=at, frames=frames):
                length = len(frames)
            case AudioChunk(first_sample=at, num_samples=length, pcm=pcm):
                if 2 * length != len(base64.b64decode(pcm)):
                    yield "I2", f"record {index} says that it has {length} samples"
            case _:
                continue
        if at != position:
            yield "I2", f"continues at {at} instead of {position}, in record {index}"
        position = at + length


def codes_of(outputs: Mapping[str, Sequence[OutputRecord]]) -> list[int]:
    chunks = (record for record in outputs.get(CODES, ()) if isinstance(record, CodeChunk))
    return [frame[0] for chunk in chunks for frame in chunk.frames]


def sound_of(outputs: Mapping[str, Sequence[OutputRecord]]) -> bytes:
    chunks = (record for record in outputs.get(AUDIO, ()) if isinstance(record, AudioChunk))
    return b"".join(base64.b64decode(chunk.pcm) for chunk in chunks)


def _speech_of_codes(run: RecordedRun, id: str) -> ExpectedSpeech | None:
    """Return a planned speech with the codes of a log.

    Its gateway died before the client received the id that the gateway had made.
    """
    codes = codes_of(run.final.outputs.get(id, {}))
    over_http = (planned for planned in run.planned.values() if planned.speaks and planned.http)
    speeches = (run.speeches[planned.id] for planned in over_http)
    return next((s for s in speeches if s.codes[: len(codes)] == codes), None)


# -- I16: outputs end as their request does ----------------------------------------------------


def end_faults(run: RecordedRun, id: str, log: Sequence[LogRecord]) -> Faults:
    outputs, ends = run.final.outputs.get(id, {}), run.final.ends.get(id)
    end = log[-1] if log else None
    if ends is None:
        # It was refused, or ended before it was admitted.
        if outputs or isinstance(end, Finish):
            yield "I16", "it has no list of its outputs"
        return
    finals = {name: records[-1] for name, records in outputs.items()}
    for name in ends.expected:
        if name == TEXT:
            continue
        last = finals.get(name)
        if not isinstance(last, OutputEnd):
            yield "I16", f"{name}: has no end, although the request has"
        elif isinstance(end, Finish) and last.cut:
            yield "I16", f"{name}: was cut, although the request finished"
        elif isinstance(end, Finish) and end.outputs.get(name) != last.summary:
            yield "I16", f"{name}: the end of the request differs from the output's own end"
    if isinstance(end, Finish) and ends.ended.keys() != set(ends.expected):
        yield "I16", f"finished with the ends of {sorted(ends.ended)} alone"
