"""Decoding of token logs' records.

Any client with access to the bus can write other bytes into a log, and newer versions write other
kinds of records.
"""

from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct

from shared.bus.reading import StoredMessage
from shared.protocol.encoding import or_none
from shared.protocol.records import AnyRecord, Failure, Finish, OutputEnd


class UnknownRecord(Struct, frozen=True):
    """Record of a kind that this version does not know. It has an index like any other record.

    If its index does not continue the log, it is ignored like an undecodable message.
    """

    type: str
    index: int
    attempt: int


_decode_known: Callable[[bytes], AnyRecord | None]
_decode_known = or_none(msgspec.json.Decoder(AnyRecord).decode)
_decode_unknown = or_none(msgspec.json.Decoder(UnknownRecord).decode)


def decode_record(data: bytes) -> AnyRecord | UnknownRecord | None:
    """Return the record in a message of a log; None for undecodable bytes."""
    return _decode_known(data) or _decode_unknown(data)


def records_of(messages: Iterable[StoredMessage], expected: int) -> list[AnyRecord | UnknownRecord]:
    """Return the records in these messages of a log.

    Records of an unknown kind must have the index after the previous record's index. `expected` is
    the index of the first record.
    """
    records: list[AnyRecord | UnknownRecord] = []
    for message in messages:
        record = decode_record(message.data)
        if record is None or (isinstance(record, UnknownRecord) and record.index != expected):
            continue
        records.append(record)
        expected = record.index + 1
    return records


def is_final(record: AnyRecord | UnknownRecord | None) -> bool:
    """Return whether a record is the last one of its log."""
    return isinstance(record, Finish | Failure | OutputEnd)
