"""A client's view of a token log, and the promises that every log must keep."""

import os
import signal
from collections.abc import Sequence

from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.protocol.records import Failure, Finish, LogRecord, TokenChunk
from shared.protocol.requests import GenerateRequest


def tokens_of(records: Sequence[LogRecord], choice: int = 0) -> list[int]:
    return [
        token
        for record in records
        if isinstance(record, TokenChunk)
        for delta in record.choices
        if delta.index == choice
        for token in delta.token_ids
    ]


def text_of(records: Sequence[LogRecord], choice: int = 0) -> str:
    return "".join(
        delta.text
        for record in records
        if isinstance(record, TokenChunk)
        for delta in record.choices
        if delta.index == choice
    )


def attempts_of(records: Sequence[LogRecord]) -> list[int]:
    """Return the numbers of the attempts that have written records, each greater than the last."""
    attempts = [record.attempt for record in records]
    assert attempts == sorted(attempts)
    return sorted(set(attempts))


def assert_gapless(records: Sequence[LogRecord]) -> None:
    """Records 0, 1, 2, …; tokens of each choice 0, 1, 2, …; one final record, at the end."""
    assert [record.index for record in records] == list(range(len(records)))
    assert isinstance(records[-1], Finish | Failure)
    assert all(isinstance(record, TokenChunk) for record in records[:-1])
    position: dict[int, int] = {}
    for record in records:
        for delta in record.choices if isinstance(record, TokenChunk) else []:
            assert delta.position == position.get(delta.index, 0)
            position[delta.index] = delta.position + len(delta.token_ids)


async def read_amid_signal(
    bus: Bus,
    request: GenerateRequest,
    pid: int,
    number: int = signal.SIGKILL,
    *,
    after: int = 1,
    request_id: str = "",
) -> list[LogRecord]:
    """Return all records of a request; a process gets a signal after the first `after`."""
    records: list[LogRecord] = []
    async for record in ask(bus, request, request_id or new_request_id()):
        records.append(record)
        if len(records) == after:
            os.kill(pid, number)
    assert_gapless(records)
    assert isinstance(records[-1], Finish)
    return records
