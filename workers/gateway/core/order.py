"""Order in which the records of several logs are added to an answer. Pure.

Records of one log arrive in order, but the logs arrive independently. The events for a record may
depend on the order inside each log alone, so that another gateway can continue the stream.
"""

from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from typing import Any

from shared.protocol.records import AnyRecord, AudioChunk, Failure, Finish, OutputEnd, TokenChunk

Numbered = tuple[int, AnyRecord]
"""A record with the number of its log."""
Records = AsyncGenerator[Numbered, None]


def in_arrival_order(options: Any, records: Records) -> Records:
    return records


async def in_part_order(options: Any, records: Records) -> Records:
    """Yield the records of each part after the end of the part before it.

    All parts are read as they arrive. A failure is not held back, because it ends the answer.
    """
    waiting: dict[int, deque[AnyRecord]] = defaultdict(deque)
    turn = 0
    async for part, record in records:
        if isinstance(record, Failure):
            yield part, record
            continue
        waiting[part].append(record)
        while waiting[turn]:
            oldest = waiting[turn].popleft()
            yield turn, oldest
            turn += isinstance(oldest, Finish)


class SpeechOrder:
    """Holds back the end of a request until its sound has ended.

    For sound that is `timed`, it also holds back samples until the text that they speak has been
    sent, and the end of the sound until the text has ended.
    """

    def __init__(self, *, timed: bool) -> None:
        self._timed = timed
        self._num_tokens = 0
        self._has_text_ended = False
        self._has_sound_ended = False
        self._sound: deque[Numbered] = deque()
        self._finish: Numbered | None = None

    def add(self, part: int, record: AnyRecord) -> list[Numbered]:
        """Add a record, and return the records that are due now."""
        due: list[Numbered] = []
        match record:
            case AudioChunk() | OutputEnd():
                self._sound.append((part, record))
            case Finish():
                self._has_text_ended, self._finish = True, (part, record)
            case TokenChunk():
                for delta in record.choices:
                    self._num_tokens = delta.position + len(delta.token_ids)
                    self._has_text_ended = delta.finish_reason is not None
                due.append((part, record))
            case _:
                due.append((part, record))
        while self._sound and self._is_due(self._sound[0][1]):
            self._has_sound_ended = isinstance(self._sound[0][1], OutputEnd)
            due.append(self._sound.popleft())
        if self._finish is not None and self._has_sound_ended:
            due.append(self._finish)
            self._finish = None
        return due

    def _is_due(self, record: AnyRecord) -> bool:
        if not self._timed or self._has_text_ended:
            return True
        return isinstance(record, AudioChunk) and (record.end_token or 0) <= self._num_tokens


async def in_speech_order(records: Records, *, timed: bool) -> Records:
    """Yield the records of merged logs in the order of SpeechOrder."""
    order = SpeechOrder(timed=timed)
    async for part, record in records:
        for numbered in order.add(part, record):
            yield numbered
