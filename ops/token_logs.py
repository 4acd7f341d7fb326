"""Reading of whole token logs, for the chaos harness and the tests."""

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.records import LogRecord
from shared.state.log_records import decode_record


async def read_log(bus: Bus, request_id: str) -> list[LogRecord]:
    """The records of a request's own log, as far as it has been written."""
    stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id))
    records = [decode_record(message.data) for message in stored]
    return [record for record in records if isinstance(record, LogRecord)]
