"""Audit log. Commands of operators and gateways append to it, and no worker can change it.

The broker guarantees the identity, which is part of the subject, and the time.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.audit import AuditRecord, decode_audit_record
from shared.protocol.encoding import to_json


class AuditEntry(NamedTuple):
    """Record of the log, with the data added by the broker."""

    sequence: int
    at_ms: float
    """Time of storage, in Unix milliseconds of the broker's clock."""
    identity: str
    record: AuditRecord


async def write(bus: Bus, identity: str, record: AuditRecord) -> None:
    """Append a record of an identity. Raises Unavailable."""
    await bus.publish_without_id(subjects.audit(identity), to_json(record))


async def read_newest(bus: Bus) -> AsyncIterator[AuditEntry]:
    """Yield all entries, the newest first, without entries of newer versions."""
    first, sequence = await bus.figures.sequence_range(subjects.AUDIT_STREAM)
    for number in range(sequence, first - 1, -1):
        stored = await bus.read_next(subjects.AUDIT_STREAM, number)
        if stored is None or stored.sequence != number:
            continue
        record = decode_audit_record(stored.data)
        if record is not None:
            identity = subjects.last_token(stored.subject)
            yield AuditEntry(number, stored.stored_ms, identity, record)
